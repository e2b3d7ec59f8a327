"""Which products are made before what comes after them reads their operands.

XLA's schedule for least memory looks one step ahead: it puts off a product whose result takes more than the operands
that end with it, and gradients of weights can wait to the end of the step. Then their operands wait with them: for
that of an output layer, the gradient of all logits. Nor does it see that a product has become the last reader of a
value, if the reader before it knew the value by another name, as two products of one value do (`ListScheduler` in
OpenXLA, xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from autoshard.compiler.primitives import PRODUCTS, SUMS
from autoshard.cost.collectives import COMBINED_BYTES
from autoshard.graph.equation_plan import EquationPlan
from autoshard.graph.layout import SpecEntries
from autoshard.trace.walk import nested_programs, open_jaxpr

CONVOLUTIONS = frozenset({"conv_general_dilated"})

_WORKSPACE_BYTES = 32 * 2**20
"""What XLA gives each cuBLAS product from Hopper on (OpenXLA, xla/service/gpu/transforms/gemm_rewriter.cc), the most of
all devices."""


def products_first(
    equations: Sequence[jex.JaxprEqn],
    numbers: Sequence[int],
    shardings: Mapping[int, EquationPlan],
    axis_sizes: Mapping[str, int],
) -> dict[int, list[Any]]:
    """For positions of products, the operand that other products may read only when the product is made.

    Gradients of convolution kernels, which are small, are made first in any case: XLA may take a schedule that makes
    all of them last where it needs no more at its fullest instant than another, and does not count the gaps between
    what is then there for long. Of matrix products:

    It is that which a product reads next, and the products are those that none after them depends on. A product whose
    result must be summed over devices is left alone, unless it and its workspace take less than the operands that end
    with it: its partial sum may wait for others to be reduced with. One that is reduced alone need not wait, nor is it
    put off: where a gradient is scattered, so is its weight, and the copy that the next product gathers takes as much.
    XLA begins a reduce-scatter that makes many bytes after all that makes fewer, so that the next product waits for the
    sum. A product that a sum follows is left alone (`buffers.sums_in_place`): the compiler makes both in one kernel.

    Args:
      equations: Those of one jaxpr, in order. numbers: Of each. shardings: What the plan says, by equation number.
      axis_sizes: Of the mesh.
    """
    readers: dict[Any, list[jex.JaxprEqn]] = {}  # of each variable, the equations after the current one
    next_product: dict[Any, int] = {}  # of each variable, the first position after the current one
    last_product: dict[Any, int] = {}  # of each variable, the last position
    awaited: set[Any] = set()  # what products after the current one are made of
    found: dict[int, list[Any]] = {}
    for at in range(len(equations) - 1, -1, -1):
        equation = equations[at]
        variables = [v for v in equation.invars if not isinstance(v, jex.Literal)]
        is_product = has_product(equation)
        is_awaited = not awaited.isdisjoint(equation.outvars)
        if equation.primitive.name in PRODUCTS and not is_awaited:
            after = readers.get(equation.outvars[0], [])
            is_term = len(after) == 1 and after[0].primitive.name in SUMS
            later = [v for v in variables if v in next_product]
            wanted = shardings.get(numbers[at], EquationPlan())
            if later and equation.primitive.name in CONVOLUTIONS:
                found[at] = [min(later, key=next_product.__getitem__)]
            elif later and not is_term:
                first = min(later, key=next_product.__getitem__)
                ending = [v for v in variables if last_product.get(v, at) <= next_product[first]]
                is_early = not is_partial(equation, wanted) or is_reduced_alone(equation, wanted, axis_sizes)
                if is_early or _frees_memory(equation, wanted, ending, axis_sizes):
                    found[at] = [first]
        if is_product or is_awaited:
            awaited.update(variables)
        for v in variables:
            readers.setdefault(v, []).append(equation)
            if is_product:
                next_product[v] = at
                last_product.setdefault(v, at)
    return found


def has_product(equation: jex.JaxprEqn) -> bool:
    """Whether an equation is a product, or contains one."""
    if equation.primitive.name in PRODUCTS:
        return True
    return any(has_product(e) for nested in nested_programs(equation) for e in open_jaxpr(nested).eqns)


def is_partial(equation: jex.JaxprEqn, wanted: EquationPlan) -> bool:
    """Whether each device makes only a part of the sum: a dimension that the product sums over is split.

    Operands that are not named are those that the program makes from nothing; the others tell how they are split.
    """
    (summed, _) = equation.params["dimension_numbers"]
    return any(steps[-1][dim] for slot, steps in wanted.operands for dim in summed[slot])


def _frees_memory(
    equation: jex.JaxprEqn, wanted: EquationPlan, ending: Sequence[Any], axis_sizes: Mapping[str, int]
) -> bool:
    """Whether the operands `ending` take more on a device than the product's partial sum and workspace."""
    read_as = {equation.invars[slot]: steps[-1] for slot, steps in wanted.operands}
    ending_bytes = sum(_local_bytes(v.aval, read_as[v], axis_sizes) for v in ending if v in read_as)
    return ending_bytes > _partial_bytes(equation, wanted, axis_sizes) + _WORKSPACE_BYTES


def is_reduced_alone(equation: jex.JaxprEqn, wanted: EquationPlan, axis_sizes: Mapping[str, int]) -> bool:
    """Whether a product's partial sum is scattered by a collective of its own.

    XLA joins those that make up to `COMBINED_BYTES` on a device, of partial sums that take as many times more as there
    are devices. One that takes more itself has nothing to win but a latency that is small beside its time.
    """
    return bool(wanted.scatters) and _partial_bytes(equation, wanted, axis_sizes) > COMBINED_BYTES


def _partial_bytes(equation: jex.JaxprEqn, wanted: EquationPlan, axis_sizes: Mapping[str, int]) -> float:
    """Bytes of a product's result on a device before it is scattered."""
    scattered = [axis for axis, _ in wanted.scatters]
    whole = tuple(tuple(a for a in axes if a not in scattered) for axes in dict(wanted.results).get(0, ()))
    return _local_bytes(equation.outvars[0].aval, whole, axis_sizes)


def _local_bytes(aval: Any, entries: SpecEntries, axis_sizes: Mapping[str, int]) -> float:
    """Bytes of a device's piece of an array."""
    return aval.size * aval.dtype.itemsize / math.prod(axis_sizes[axis] for axes in entries for axis in axes)
