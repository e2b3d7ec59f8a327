"""The time of local computation: the roofline (Williams, Waterman, Patterson, 2009) plus a launch.

time = launches x launch overhead + max(sum over operations of flops / rate, bytes / memory bandwidth)

Rates are the vendor's peaks, or where `DeviceType.measured` tells what was measured, those for the size at hand:

    matrix product          rate(dtype, flops of one product) x share left by its least dimension
    convolution             rate(dtype, flops of one) x share of it that convolutions reach
    fused attention         peak(dtype) x share of it that cuDNN's kernels reach
    function of an element  rate of exponentials and the like
    other arithmetic        rate of additions and the like
    memory                  rate(bytes that one kernel moves)
    other order of dims     rate(bytes of the array), on top of all else

and the lesser of the two terms counts too, but for the share of it that was found to hide behind the greater.

Where `DeviceType.convolution_efficiency` tells what cuDNN reaches: convolutions of few channels do the arithmetic of
more, and gradients of kernels are slower than others, since they sum over all images and positions.
"""

import enum
import math
from collections.abc import Iterable

import jax.numpy as jnp

from autoshard.cluster import DeviceType, KernelForms
from autoshard.graph.graph import Attention

FUNCTIONS = frozenset(
    "acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1 lgamma log log1p "
    "logistic pow rsqrt sin sinh sqrt tan tanh".split()
)
"""Primitives that take many instructions an element."""
PRODUCTS = frozenset({"dot_general", "ragged_dot_general"})
"""Matrix products, which run on matrix units where there are any."""
CONVOLUTIONS = frozenset({"conv_general_dilated"})
"""Convolutions, which run there too."""


CHANNELS_BYTES = 64
"""What cuDNN pads the input channels of a convolution's kernel to: of powers of two, 64 was nearest to the times of the
first layers of a Wide-ResNet and a ViT, of three channels (one H100, `benchmarks/results/gpu-steps.md`)."""
KERNEL_GRADIENT_SHARE = 0.65
"""Of the rate of convolutions, what gradients of their kernels reach: 17 of them in a Wide-ResNet (likewise)."""


ATTENTION_SHARE, ATTENTION_GRADIENT_SHARE = 0.52, 0.5
"""Of a device's peak, what the arithmetic of cuDNN's fused attention reaches on an H100 SXM (989 TFLOP/s), heads of 128
elements: with a causal mask 484, 518 and 529 TFLOP/s forward at 2,048, 4,096 and 8,192 positions, without one 465, 499
and 518 backward (617, 609 and 600 forward), and 315 and 305 at 512 (Shah et al. 2024, FlashAttention-3,
arXiv:2407.08608, read from the charts of figures 5 and 6). Only what a mask leaves counts as arithmetic."""

ALIGNMENT_BYTES = 16
"""What rows of matrices begin at multiples of where matrix units are to run at their rate (NVIDIA, Matrix
Multiplication Background User's Guide, DU-09799-001, section 2.2)."""

LONG_ROW = 256
"""Rows of more elements than that prolong a softmax (`KernelForms.row_pass_factor`); those of a ViT, of 256, do not."""
COLUMN_ROWS = 32
"""Rows that a block of XLA:GPU sums at once, each by one of its 32 warps (`ColumnReductionFusion`)."""

MOST_ROWS = 4096
"""Rows of the longest columns that XLA:GPU sums by one block: more are summed in parts (`TreeReductionRewriter`; in the
programs of `benchmarks/gpu_steps.py` 4,096 are not split, and 12,544 are)."""


class Work(enum.Enum):
    """Kinds of arithmetic, by the rate that they run at."""

    PRODUCT = "product"
    CONVOLUTION = "convolution"
    KERNEL_GRADIENT = "gradient of a convolution's kernel"
    ATTENTION = "fused attention"
    ATTENTION_GRADIENT = "gradient of fused attention"
    FUNCTION = "function"
    OTHER = "other"


def work_of(primitive: str) -> Work:
    """The kind of arithmetic that a primitive does."""
    kinds = (PRODUCTS, Work.PRODUCT), (CONVOLUTIONS, Work.CONVOLUTION), (FUNCTIONS, Work.FUNCTION)
    return next((work for primitives, work in kinds if primitive in primitives), Work.OTHER)


def attention_work(attention: Attention) -> Work:
    """The kind of arithmetic that a pass of fused attention does."""
    return Work.ATTENTION if attention is Attention.FORWARD else Work.ATTENTION_GRADIENT


def flops_s(
    device: DeviceType, flops: float, dtype: str, work: Work, count: int = 1, least_dim: float = math.inf
) -> float:
    """Seconds that `flops` take at the device's reachable rate for `dtype`.

    Matrix products run at the rate of products and convolutions at theirs: where products were measured, and
    convolutions were not, at the share of that which their efficiencies tell. For everything else the peak for the
    dtype serves; for bfloat16 and float16 on GPUs that is the matrix units' rate, and flatters the vector units, which
    matters little because such work is bound by memory.

    Args:
      count: Over how many operations the flops are spread evenly.
      least_dim: Of a product, the least of its three dimensions (rows, columns, summed), batches aside; of a
        convolution, the input channels of its kernel.
    """
    measured = device.measured
    if work in (Work.ATTENTION, Work.ATTENTION_GRADIENT):
        share = ATTENTION_SHARE if work is Work.ATTENTION else ATTENTION_GRADIENT_SHARE
        return flops / (device.flops_per_s(dtype) * share)
    if measured is None:
        match work:
            case Work.PRODUCT:
                return flops / device.matmul_flops_per_s(dtype)
            case Work.CONVOLUTION | Work.KERNEL_GRADIENT:
                return flops / _convolution_rate(device, dtype, work, least_dim)
            case Work.FUNCTION | Work.OTHER:
                return flops / device.flops_per_s(dtype)
    match work:
        case Work.PRODUCT:
            return flops / measured.product_rate(dtype, flops / count, least_dim)
        case Work.CONVOLUTION | Work.KERNEL_GRADIENT:
            share = _convolution_rate(device, dtype, work, least_dim) / device.matmul_flops_per_s(dtype)
            return flops / (measured.product_rate(dtype, flops / count, math.inf) * share)
        case Work.FUNCTION:
            return flops / measured.function_per_s
        case Work.OTHER:
            return flops / measured.elementwise_per_s


def _convolution_rate(device: DeviceType, dtype: str, work: Work, channels: float) -> float:
    """Operations per second of a convolution whose kernel has that many input channels."""
    rate = device.convolution_flops_per_s(dtype)
    if device.convolution_efficiency is None:
        return rate
    padded_share = min(1.0, channels * jnp.dtype(dtype).itemsize / CHANNELS_BYTES)
    return rate * padded_share * (KERNEL_GRADIENT_SHARE if work is Work.KERNEL_GRADIENT else 1.0)


def kernel_s(
    device: DeviceType,
    arithmetic_s: float,
    moved_bytes: float,
    launches: int,
    row_passes: int = 0,
    columns_s: float = 0.0,
) -> float:
    """Seconds of `launches` kernels that do `arithmetic_s` of arithmetic and read and write `moved_bytes`.

    Args:
      row_passes: Reductions of long rows that their results wait for, where they take exponentials of these rows.
      columns_s: What the threads that sum columns take one after another (`columns_s`).
    """
    launch_s, measured = launches * device.launch_overhead_s, device.measured
    prolonged = 1.0 + _waiting_share(device.kernel_forms, row_passes, moved_bytes / max(launches, 1))
    if measured is None:
        return launch_s + max(arithmetic_s, prolonged * moved_bytes / device.memory_bytes_per_s, columns_s)
    memory_s = prolonged * moved_bytes / measured.memory_bytes_per_s.at(moved_bytes / max(launches, 1))
    exposed_s = (1 - measured.hidden_share) * min(arithmetic_s, memory_s)
    return launch_s + max(arithmetic_s, memory_s, columns_s) + exposed_s


def _waiting_share(forms: KernelForms | None, row_passes: int, size_bytes: float) -> float:
    """By which part of it a kernel of `size_bytes` takes longer than these, for the rows that it waits for."""
    if forms is None or row_passes == 0:
        return 0.0
    share = forms.row_pass_factor**row_passes - 1.0
    if forms.row_pass_bytes is None or size_bytes <= forms.row_pass_bytes:
        return share
    return share * math.sqrt(forms.row_pass_bytes / size_bytes)


def unaligned_factor(device: DeviceType, dtype: str, rows: Iterable[tuple[float, bool]]) -> float:
    """By how much a product is prolonged since rows of its matrices do not begin at multiples of `ALIGNMENT_BYTES`.

    Args:
      rows: Of both operands and the result, how many elements lie together, and whether the product sums along them.
        Shorter rows than that do not count.
    """
    forms = device.kernel_forms
    if forms is None:
        return 1.0
    row_bytes = [(elements * jnp.dtype(dtype).itemsize, is_summed) for elements, is_summed in rows]
    unaligned = [is_summed for size, is_summed in row_bytes if size > ALIGNMENT_BYTES and size % ALIGNMENT_BYTES]
    if not unaligned:
        return 1.0
    return forms.unaligned_sum_factor if any(unaligned) else forms.unaligned_factor


def columns_s(device: DeviceType, steps: float, is_storing: bool, window_additions: float) -> float:
    """Seconds that a thread takes which sums a column in `steps` steps; 0 where that was not measured.

    Args:
      is_storing: Whether something is stored for each element.
      window_additions: In each step, those of windowed sums.
    """
    forms = device.kernel_forms
    if forms is None:
        return 0.0
    step_s = forms.stored_column_step_s if is_storing else forms.column_step_s
    return steps * (step_s + window_additions * forms.window_step_s)


def transposing_s(device: DeviceType, size_bytes: float) -> float:
    """Seconds by which it takes longer to read `size_bytes` in another order of dimensions than they are stored in.

    Nothing where it was not measured: GPUs do it on the way (shared memory), and TPUs in the product before it.
    """
    rates = None if device.measured is None else device.measured.transposed_bytes_per_s
    return 0.0 if rates is None else size_bytes / rates.at(size_bytes)
