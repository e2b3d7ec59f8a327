"""What XLA:GPU must know of a GPU to compile for it while it is not there."""

import dataclasses

COMPILER_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""How programs are compiled for GPUs that are not there.

Without a GPU nothing can be tuned, and some of Triton's matrix products do not compile untuned. Products become calls
of cuBLAS instead, which is what tuning mostly ends with. Neither option changes the collectives.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuTarget:
    """A GPU as XLA:GPU describes it (OpenXLA, xla/stream_executor/device_description.proto).

    Attributes:
      name: Device type in autoshard's catalogue.
      aliases: What else `--target` calls it.
      description: What CUDA calls it.
      compute_capability: (major, minor).
      num_cores: Streaming multiprocessors. fpus_per_core: FP32 units in each.
      clock_ghz: Boost clock.
      memory_bytes, memory_bandwidth_bytes_per_s, l2_cache_bytes: Of the device.
      shared_memory_per_core_bytes: Of a multiprocessor. shared_memory_per_block_bytes: The most a block may opt in to.
      threads_per_core: Most threads that reside on a multiprocessor.
      source: Where the figures come from.
    """

    name: str
    aliases: tuple[str, ...]
    description: str
    compute_capability: tuple[int, int]
    num_cores: int
    fpus_per_core: int
    clock_ghz: float
    memory_bytes: int
    memory_bandwidth_bytes_per_s: int
    l2_cache_bytes: int
    shared_memory_per_core_bytes: int
    shared_memory_per_block_bytes: int
    threads_per_core: int
    source: str

    @property
    def text(self) -> str:
        """The target in text format, as `get_topology_desc(target_config=...)` takes it."""
        major, minor = self.compute_capability
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory_per_core_bytes} threads_per_core_limit: {self.threads_per_core}
  core_count: {self.num_cores} fpus_per_core: {self.fpus_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {self.memory_bandwidth_bytes_per_s} l2_cache_size: {self.l2_cache_bytes}
  clock_rate_ghz: {self.clock_ghz} device_memory_size: {self.memory_bytes}
  shared_memory_per_block_optin: {self.shared_memory_per_block_bytes}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} }} }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "{self.description}"
"""


_TABLE = "CUDA C++ Programming Guide, technical specifications per compute capability"
_SPECS = "OpenXLA, xla/backends/gpu/target_config/specs"

T4 = GpuTarget(
    name="T4",
    aliases=("t4",),
    description="Tesla T4",
    compute_capability=(7, 5),
    num_cores=40,
    fpus_per_core=64,
    clock_ghz=1.59,
    memory_bytes=16_000_000_000,
    memory_bandwidth_bytes_per_s=320_000_000_000,
    l2_cache_bytes=4_194_304,
    shared_memory_per_core_bytes=65_536,
    shared_memory_per_block_bytes=65_536,
    threads_per_core=1024,
    source=f"NVIDIA, Turing GPU Architecture white paper (Tesla T4), and T4 data sheet, memory nominal; {_TABLE}",
)
L4 = GpuTarget(
    name="L4",
    aliases=("l4",),
    description="NVIDIA L4",
    compute_capability=(8, 9),
    num_cores=58,
    fpus_per_core=128,
    clock_ghz=2.04,
    memory_bytes=24_000_000_000,
    memory_bandwidth_bytes_per_s=300_000_000_000,
    l2_cache_bytes=50_331_648,
    shared_memory_per_core_bytes=102_400,
    shared_memory_per_block_bytes=101_376,
    threads_per_core=1536,
    source=(
        "NVIDIA, L4 data sheet, memory nominal (30.3 TFLOP/s at 2.04 GHz are 58 multiprocessors of 128 units); NVIDIA, "
        f"Ada GPU Architecture white paper (AD104, 48 MiB of L2 cache); {_TABLE}"
    ),
)
A100_40 = GpuTarget(
    name="A100-SXM4-40GB",
    aliases=("a100-40",),
    description="NVIDIA A100-SXM4-40GB",
    compute_capability=(8, 0),
    num_cores=108,
    fpus_per_core=64,
    clock_ghz=1.41,
    memory_bytes=42_331_013_120,
    memory_bandwidth_bytes_per_s=1_555_200_000_000,
    l2_cache_bytes=41_943_040,
    shared_memory_per_core_bytes=167_936,
    shared_memory_per_block_bytes=166_912,
    threads_per_core=2048,
    source=f"{_SPECS}/a100_sxm_40.txtpb",
)
A100_80 = dataclasses.replace(
    A100_40,
    name="A100-SXM4-80GB",
    aliases=("a100", "a100-80"),
    description="NVIDIA A100-SXM4-80GB",
    memory_bytes=85_100_068_864,
    memory_bandwidth_bytes_per_s=2_039_040_000_000,
    source=f"{_SPECS}/a100_sxm_80.txtpb",
)
H100 = GpuTarget(
    name="H100-SXM",
    aliases=("h100",),
    description="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    num_cores=132,
    fpus_per_core=128,
    clock_ghz=1.98,
    memory_bytes=84_978_434_048,
    memory_bandwidth_bytes_per_s=3_352_320_000_000,
    l2_cache_bytes=52_428_800,
    shared_memory_per_core_bytes=233_472,
    shared_memory_per_block_bytes=232_448,
    threads_per_core=2048,
    source=f"{_SPECS}/h100_sxm.txtpb; memory as a driver reports it",
)
H200 = dataclasses.replace(
    H100,
    name="H200-SXM",
    aliases=("h200",),
    description="NVIDIA H200 141GB HBM3e",
    memory_bytes=151_397_597_184,
    memory_bandwidth_bytes_per_s=4_800_000_000_000,
    source=f"{_SPECS}/h200.txtpb",
)
B200 = GpuTarget(
    name="B200-SXM",
    aliases=("b200",),
    description="NVIDIA B200",
    compute_capability=(10, 0),
    num_cores=148,
    fpus_per_core=128,
    clock_ghz=1.965,
    memory_bytes=191_514_411_008,
    memory_bandwidth_bytes_per_s=7_672_320_000_000,
    l2_cache_bytes=132_644_864,
    shared_memory_per_core_bytes=233_472,
    shared_memory_per_block_bytes=232_448,
    threads_per_core=2048,
    source=f"{_SPECS}/b200.txtpb",
)
GPUS = (T4, L4, A100_40, A100_80, H100, H200, B200)
TOO_OLD = ("P100-SXM2", "V100-SXM2-16GB", "V100-SXM2-32GB")
"""Device types of the catalogue that CUDA 13 no longer compiles for (tried: ptxas 13.5 refuses sm_60 and sm_70)."""
