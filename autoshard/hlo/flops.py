"""Floating-point operations of the matrix products, convolutions and fused attention of a compiled program."""

import math
import re
from collections.abc import Iterator

import numpy as np

from autoshard.graph.attention_flops import attention_flops
from autoshard.graph.graph import Attention
from autoshard.hlo.module import Array, HloModule, Instruction, Run

_LHS_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_RHS_CONTRACTED = re.compile(r'rhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_LHS_BATCH = re.compile(r'lhs_batch_dim(?:s=\{|ensions":\[)([\d,"]*)')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_SCORES = re.compile(r'"intermediate_tensor_shape":\{.*?"dimensions":\[([\d",]*)\]')
_WINDOW_LENGTH = re.compile(r'"sliding_window_length":(\d+)')
_PER_PAIR = {"c64": 8, "c128": 8}
"""Operations of a multiplication and an addition; 2 for real numbers."""


def product_flops(module: HloModule) -> float:
    """Operations of one step on one device, with all repetitions in loops; a multiplication and an addition are two.

    Multiplications by the zeros of padding and dilation are not counted.
    """
    return sum(flops_of(run) * run.times for run in module.runs(fused=True))


def products_within(module: HloModule, run: Run) -> Iterator[Run]:
    """The products, convolutions and attention that one instruction runs: itself, or those inside a fusion."""
    if run.instruction.opcode != "fusion":
        if flops_of(run):
            yield run
        return
    for name in run.instruction.called:
        body = module.computations[name]
        for instruction in body.instructions.values():
            yield from products_within(module, Run(body, instruction, run.times, run))


def flops_of(run: Run) -> float:
    """Operations of one instruction that is a product, a convolution or fused attention; 0 for others."""
    instruction = run.instruction
    if (attention := attention_of(instruction)) is not None:
        return _attention_flops(run, attention)
    if instruction.opcode == "dot" or _target(instruction).startswith("__cublas$"):
        lhs, summed = _array(run, 0), _sizes(run, _LHS_CONTRACTED)
        if summed is None or lhs is None:
            return 0.0
        return _per_pair(lhs) * math.prod(instruction.result[0].dims) * math.prod(summed)
    convolved = _convolved(run)
    if convolved is None:
        return 0.0
    return _per_pair(convolved[0]) * _multiplications(*convolved, instruction.attributes)


def _convolved(run: Run) -> tuple[Array, Array, Array] | None:
    """The image, the kernel and the result of a convolution, whichever of them it makes; None for all else."""
    target = _target(run.instruction)
    if run.instruction.opcode != "convolution" and not target.startswith("__cudnn$conv"):
        return None
    first, second, made = _array(run, 0), _array(run, 1), run.instruction.result[0]
    if first is None or second is None:
        return None
    match target:
        case "__cudnn$convBackwardInput":  # of the output's gradient and the kernel
            return made, second, first
        case "__cudnn$convBackwardFilter":  # of the input and the output's gradient
            return first, made, second
        case _:
            return first, second, made


def is_convolution(run: Run) -> bool:
    """Whether an instruction is a convolution, or the gradient of one."""
    return _convolved(run) is not None


def attention_of(instruction: Instruction) -> Attention | None:
    """Which pass of cuDNN's fused attention an instruction calls; None for all else."""
    target = _target(instruction)
    if not target.startswith("__cudnn$fmha"):
        return None
    return Attention.BACKWARD if "Backward" in target else Attention.FORWARD


def _attention_flops(run: Run, attention: Attention) -> float:
    """Operations of cuDNN's attention of queries, keys and values, its first three operands."""
    config = run.instruction.attributes.replace(" ", "")
    scores, window, query, value = _SCORES.search(config), _WINDOW_LENGTH.search(config), _array(run, 0), _array(run, 2)
    if scores is None or query is None or value is None:
        return 0.0
    examples, heads, num_queries, num_keys = (int(n) for n in re.findall(r"\d+", scores.group(1)))
    return attention_flops(
        attention,
        examples * heads,
        num_queries,
        num_keys,
        (query.dims[-1], value.dims[-1]),
        is_causal="CAUSAL" in config,
        window=int(window.group(1)) if window else None,
    )


def is_kernel_gradient(run: Run) -> bool:
    """Whether an instruction calls cuDNN for the gradient of a convolution's kernel."""
    return _target(run.instruction) == "__cudnn$convBackwardFilter"


def least_dim(run: Run) -> float:
    """The least of the three dimensions of a matrix product (rows, columns, summed), batches aside; the input channels
    of a convolution's kernel; +inf for others."""
    instruction, convolved = run.instruction, _convolved(run)
    if convolved is not None:
        labels = _LABELS.search(instruction.attributes)
        return math.inf if labels is None else convolved[1].dims[labels.group(2).index("i")]
    is_product = instruction.opcode == "dot" or _target(instruction).startswith("__cublas$")
    lhs, summed = _array(run, 0), _sizes(run, _LHS_CONTRACTED)
    if not is_product or lhs is None or summed is None:
        return math.inf
    batches, inner = math.prod(_sizes(run, _LHS_BATCH) or ()), math.prod(summed)
    rows = math.prod(lhs.dims) // (batches * inner)
    return min(rows, inner, math.prod(instruction.result[0].dims) // (batches * rows))


def rows_in_memory(run: Run) -> list[tuple[float, bool]]:
    """Of both operands of a matrix product and of its result, how many elements lie together in memory, and whether
    the product sums along them; empty for batched products and for all else."""
    instruction = run.instruction
    if instruction.opcode != "dot" and not _target(instruction).startswith("__cublas$") or _sizes(run, _LHS_BATCH):
        return []
    summed = (
        {int(d) for d in re.findall(r"\d+", found.group(1))} if (found := one.search(instruction.attributes)) else set()
        for one in (_LHS_CONTRACTED, _RHS_CONTRACTED)
    )
    arrays = [(_array(run, slot), dims) for slot, dims in enumerate(summed)]
    arrays.append((instruction.result[0], set()))
    return [
        (array.dims[array.innermost], array.innermost % len(array.dims) in dims)
        for array, dims in arrays
        if array is not None and array.dims
    ]


def is_library_product(instruction: Instruction) -> bool:
    """Whether an instruction calls a library for a matrix product or a convolution: its results are the product and a
    workspace."""
    return _target(instruction).startswith(("__cublas$", "__cudnn$conv"))


def _target(instruction: Instruction) -> str:
    """What a custom call calls; empty for all else."""
    found = _TARGET.search(instruction.attributes) if instruction.opcode == "custom-call" else None
    return found.group(1) if found else ""


def _sizes(run: Run, dims: re.Pattern[str]) -> list[int] | None:
    """Sizes of the dimensions of the first operand that an attribute lists; None where it is not there."""
    lhs, listed = _array(run, 0), dims.search(run.instruction.attributes)
    if lhs is None or listed is None:
        return None
    return [lhs.dims[int(d)] for d in re.findall(r"\d+", listed.group(1))]


def _per_pair(array: Array) -> int:
    return _PER_PAIR.get(array.dtype, 2)


def _array(run: Run, slot: int) -> Array | None:
    """The type of an operand."""
    names = run.instruction.operands
    made = run.computation.instructions.get(names[slot]) if slot < len(names) else None
    return made.result[0] if made is not None and made.result else None


def _multiplications(first: Array, kernel: Array, result: Array, attributes: str) -> float:
    """Products that a convolution of `first` with `kernel` sums into `result`."""
    labels = _LABELS.search(attributes)
    if labels is None:
        return 0.0
    into, of_kernel, out = labels.groups()
    count = math.prod(n for n, label in zip(result.dims, out, strict=True) if not label.isdigit())
    count *= kernel.dims[of_kernel.index("i")]
    window = _WINDOW.search(attributes)
    fields = dict(item.split("=") for item in window.group(1).split()) if window else {}
    dims = sorted(label for label in out if label.isdigit())
    for k, label in enumerate(dims):
        count *= _pairs(
            result.dims[out.index(label)],
            first.dims[into.index(label)],
            kernel.dims[of_kernel.index(label)],
            stride=_number(fields, "stride", k, 1),
            pad=_number(fields, "pad", k, 0),
            lhs_dilate=_number(fields, "lhs_dilate", k, 1),
            rhs_dilate=_number(fields, "rhs_dilate", k, 1),
        )
    return float(count)


def _number(fields: dict[str, str], name: str, dim: int, default: int) -> int:
    """The entry of a spatial dimension, such as 1 of `pad=1_2x0_0`."""
    return int(fields[name].split("x")[dim].split("_")[0]) if name in fields else default


def _pairs(out_size: int, in_size: int, window: int, *, stride: int, pad: int, lhs_dilate: int, rhs_dilate: int) -> int:
    """Along one dimension, how many pairs of output and window position fall on an input rather than on a zero."""
    at = np.arange(out_size)[:, None] * stride + np.arange(window)[None, :] * rhs_dilate - pad
    inside = (at >= 0) & (at <= (in_size - 1) * lhs_dilate) & (at % lhs_dilate == 0)
    return int(inside.sum())
