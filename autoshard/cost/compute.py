"""The time of local computation: the roofline (Williams, Waterman, Patterson, 2009) plus a launch.

time = launches x launch overhead + max(sum over operations of flops / rate, bytes / memory bandwidth)

Rates are the vendor's peaks, or where `DeviceType.measured` tells what was measured, those for the size at hand:

    matrix product          rate(dtype, flops of one product) x share left by its least dimension
    function of an element  rate of exponentials and the like
    other arithmetic        rate of additions and the like
    memory                  rate(bytes that one kernel moves)
    other order of dims     rate(bytes of the array), on top of all else

and the lesser of the two terms counts too, but for the share of it that was found to hide behind the greater.
"""

import enum
import math

from autoshard.cluster import DeviceType

FUNCTIONS = frozenset(
    "acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1 lgamma log log1p "
    "logistic pow rsqrt sin sinh sqrt tan tanh".split()
)
"""Primitives that take many instructions an element."""
PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
"""Primitives that run on matrix units, where there are any."""


class Work(enum.Enum):
    """Kinds of arithmetic, by the rate that they run at."""

    PRODUCT = "product"
    FUNCTION = "function"
    OTHER = "other"


def work_of(primitive: str) -> Work:
    """The kind of arithmetic that a primitive does."""
    return Work.PRODUCT if primitive in PRODUCTS else Work.FUNCTION if primitive in FUNCTIONS else Work.OTHER


def flops_s(
    device: DeviceType, flops: float, dtype: str, work: Work, count: int = 1, least_dim: float = math.inf
) -> float:
    """Seconds that `flops` take at the device's reachable rate for `dtype`.

    Matrix products and convolutions run at the rate of products. For everything else the catalogue's peak for the dtype
    serves; for bfloat16 and float16 on GPUs that is the matrix units' rate, and flatters the vector units, which
    matters little because such work is bound by memory.

    Args:
      count: Over how many operations the flops are spread evenly.
      least_dim: Of a product, the least of its three dimensions (rows, columns, summed), batches aside.
    """
    measured = device.measured
    if measured is None:
        return flops / (device.matmul_flops_per_s(dtype) if work is Work.PRODUCT else device.flops_per_s(dtype))
    match work:
        case Work.PRODUCT:
            return flops / measured.product_rate(dtype, flops / count, least_dim)
        case Work.FUNCTION:
            return flops / measured.function_per_s
        case Work.OTHER:
            return flops / measured.elementwise_per_s


def kernel_s(device: DeviceType, arithmetic_s: float, moved_bytes: float, launches: int) -> float:
    """Seconds of `launches` kernels that do `arithmetic_s` of arithmetic and read and write `moved_bytes`."""
    launch_s, measured = launches * device.launch_overhead_s, device.measured
    if measured is None:
        return launch_s + max(arithmetic_s, moved_bytes / device.memory_bandwidth_bytes_per_s)
    memory_s = moved_bytes / measured.memory_bytes_per_s.at(moved_bytes / max(launches, 1))
    exposed_s = (1 - measured.hidden_share) * min(arithmetic_s, memory_s)
    return launch_s + max(arithmetic_s, memory_s) + exposed_s


def transposing_s(device: DeviceType, size_bytes: float) -> float:
    """Seconds by which it takes longer to read `size_bytes` in another order of dimensions than they are stored in.

    Nothing where it was not measured: GPUs do it on the way (shared memory), and TPUs in the product before it.
    """
    rates = None if device.measured is None else device.measured.transposed_bytes_per_s
    return 0.0 if rates is None else size_bytes / rates.at(size_bytes)
