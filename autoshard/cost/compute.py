"""The time of local computation: the roofline (Williams, Waterman, Patterson, 2009) plus a launch.

    time = launch overhead + max(flops / (peak of the dtype x reachable share), bytes / memory bandwidth)
"""

from autoshard.cluster import DeviceType


def kernel_s(device: DeviceType, flops: float, moved_bytes: float, dtype: str, launches: float = 1.0) -> float:
    """Seconds of one kernel on one device.

    Args:
      device: Where it runs.
      flops: Its floating-point operations. moved_bytes: Bytes it reads and writes.
      dtype: NumPy-style name of the operands' dtype. launches: Kernels launched.
    """
    rate = device.flops_per_s(dtype) * device.matmul_efficiency
    return launches * device.launch_overhead_s + max(flops / rate, moved_bytes / device.memory_bandwidth_bytes_per_s)
