"""What XLA:GPU must know of a GPU to compile for it while it is not there; the figures are the catalogue's."""

import dataclasses

from autoshard.cluster.catalogue import KnownDevice, catalogue

COMPILER_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""How programs are compiled for GPUs that are not there.

Without a GPU nothing can be tuned, and some of Triton's matrix products do not compile untuned. Products become calls
of cuBLAS instead, which is what tuning mostly ends with. Neither option changes the collectives.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuTarget:
    """A GPU to compile for.

    Attributes:
      name: Device type in autoshard's catalogue. aliases: What else `--target` calls it.
    """

    name: str
    aliases: tuple[str, ...]

    @property
    def text(self) -> str:
        """Its description in text format, as `get_topology_desc(target_config=...)` takes it."""
        return _text(catalogue().device(self.name))


def _text(device: KnownDevice) -> str:
    gpu, bandwidth = device.gpu, round(device.device_type.memory_bandwidth_bytes_per_s)
    assert gpu is not None
    major, minor = gpu.compute_capability
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory_per_core_bytes} threads_per_core_limit: {gpu.threads_per_core}
  core_count: {gpu.num_cores} fpus_per_core: {gpu.fpus_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {gpu.l2_cache_bytes}
  clock_rate_ghz: {gpu.clock_ghz} device_memory_size: {gpu.reported_memory_bytes}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block_bytes}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} }} }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "{device.device_kinds[0]}"
"""


T4 = GpuTarget("T4", ("t4",))
L4 = GpuTarget("L4", ("l4",))
A100_40 = GpuTarget("A100-SXM4-40GB", ("a100-40",))
A100_80 = GpuTarget("A100-SXM4-80GB", ("a100", "a100-80"))
H100 = GpuTarget("H100-SXM", ("h100",))
H200 = GpuTarget("H200-SXM", ("h200",))
B200 = GpuTarget("B200-SXM", ("b200",))
GPUS = (T4, L4, A100_40, A100_80, H100, H200, B200)
TOO_OLD = ("P100-SXM2", "V100-SXM2-16GB", "V100-SXM2-32GB")
"""Device types of the catalogue that CUDA 13 no longer compiles for."""
