"""The time of local computation: the roofline (Williams, Waterman, Patterson, 2009) plus a launch.

time = launches x launch overhead + max(flops / reachable rate of the dtype, bytes / memory bandwidth)
"""

from autoshard.cluster import DeviceType


def flops_s(device: DeviceType, flops: float, dtype: str, is_product: bool) -> float:
    """Seconds that `flops` take at the device's reachable rate for `dtype`.

    Matrix products and convolutions (`is_product`) run at the rate of products. For everything else the catalogue's
    peak for the dtype serves; for bfloat16 and float16 on GPUs that is the matrix units' rate, and flatters the vector
    units, which matters little because such work is bound by memory.
    """
    return flops / (device.matmul_flops_per_s(dtype) if is_product else device.flops_per_s(dtype))


def kernel_s(device: DeviceType, arithmetic_s: float, moved_bytes: float, launches: float) -> float:
    """Seconds of `launches` kernels that do `arithmetic_s` of arithmetic and read and write `moved_bytes`."""
    return launches * device.launch_overhead_s + max(arithmetic_s, moved_bytes / device.memory_bandwidth_bytes_per_s)
