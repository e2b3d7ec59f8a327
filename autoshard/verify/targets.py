"""What the compiler must know of a device to compile for it while it is not there."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class GpuTarget:
    """A GPU as XLA:GPU describes it (OpenXLA, xla/stream_executor/device_description.proto).

    Attributes:
      name: Device type in autoshard's catalogue.
      description: What CUDA calls it.
      compute_capability: (major, minor).
      num_cores: Streaming multiprocessors. fpus_per_core: FP32 units in each.
      clock_ghz: Boost clock.
      memory_bytes, memory_bandwidth_bytes_per_s, l2_cache_bytes: As the driver reports them.
      shared_memory_per_core_bytes: Of a multiprocessor; a block may opt in to 1,024 bytes less.
      threads_per_core: Most threads that reside on a multiprocessor.
      source: Where the figures come from.
    """

    name: str
    description: str
    compute_capability: tuple[int, int]
    num_cores: int
    fpus_per_core: int
    clock_ghz: float
    memory_bytes: int
    memory_bandwidth_bytes_per_s: int
    l2_cache_bytes: int
    shared_memory_per_core_bytes: int
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
  shared_memory_per_block_optin: {self.shared_memory_per_core_bytes - 1024}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} }} }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "{self.description}"
"""


H100 = GpuTarget(
    name="H100-SXM",
    description="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    num_cores=132,
    fpus_per_core=128,
    clock_ghz=1.98,
    memory_bytes=84_978_434_048,
    memory_bandwidth_bytes_per_s=3_352_320_000_000,
    l2_cache_bytes=52_428_800,
    shared_memory_per_core_bytes=233_472,
    threads_per_core=2048,
    source="NVIDIA H100 data sheet; memory as the driver reports it",
)
