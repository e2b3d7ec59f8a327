"""Keeps what is summed, and what is added to the state, row by row in memory.

XLA:GPU stores what a reduction over 32 elements or more reads with the summed dimensions innermost, where the result's
order in memory is settled, as a gradient's is (`GpuLayoutAssignment::PropagateReductionLayoutToOperand`). The gradient
of a position embedding, a sum over the batch, so turns the residual stream of all layers around, and with it the
logits, which products need turned back: three times in memory, as soon as a device has 32 sequences.

It also stores what is gathered or scattered with that dimension outermost (`GpuLayoutAssignment`, `MoveDimToMajor`). A
gradient that is so turned would turn its optimizer's state: the update could not run in place, and the new state of all
weights would be there beside the old one before it is copied there. And features that a convolution made and that are
gathered would be there in two orders from then on, since cuDNN reads what is made of them row by row.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec

from autoshard.compiler.primitives import PRODUCTS, SUMS
from autoshard.graph.layout import SpecEntries
from autoshard.trace.walk import EquationKind, kind_of

LEAST_SUMMED = 32
"""From so many elements on XLA:GPU turns what a sum reads (`GpuLayoutAssignment`, a warp's worth)."""


_ADDING = SUMS | {"sub"}


def may_be_turned(equation: jex.JaxprEqn, entries: SpecEntries, ways: Mapping[str, int]) -> bool:
    """Whether XLA:GPU may turn what an equation reads.

    It is a sum that leaves a matrix, not over inner dimensions alone, over many elements on each device. Fewer are left
    alone, since the sums of several layers are added and reduced as one only where nothing stands between.

    Args:
      equation: Any. entries: The layout in which it reads its first operand. ways: The size of each mesh axis.
    """
    if equation.primitive.name != "reduce_sum" or not equation.params["axes"]:
        return False
    summed, shape = equation.params["axes"], equation.invars[0].aval.shape
    kept = len(shape) - len(summed)
    here = math.prod(shape[d] // math.prod(ways[a] for a in entries[d]) for d in summed)
    return kept > 1 and min(summed) < kept and here >= LEAST_SUMMED


def is_gathered_inside(entries: SpecEntries | None, wanted: SpecEntries) -> bool:
    """Whether an axis leaves a dimension that others are in front of, on the way from one layout to another."""
    return entries is not None and any(set(own) - set(left) for own, left in zip(entries[1:], wanted[1:], strict=True))


def is_of_state(equation: jex.JaxprEqn, is_state: Sequence[bool]) -> bool:
    """Whether an equation makes something of an optimizer's state alone, element by element: scalars aside, all that it
    reads is state and has the shape of what it makes.

    Args:
      equation: Any. is_state: For each operand, whether it is a donated argument or made of some in this way.
    """
    shapes = {equation.outvars[0].aval.shape} if len(equation.outvars) == 1 else set()
    read = [(v.aval.shape, own) for v, own in zip(equation.invars, is_state, strict=True) if v.aval.shape]
    is_leaf = kind_of(equation) is EquationKind.LEAF and equation.primitive.name not in PRODUCTS
    return is_leaf and bool(read) and all(own and {shape} == shapes for shape, own in read)


def added_to_state(equation: jex.JaxprEqn, is_state: Sequence[bool], is_scattered: Sequence[bool]) -> tuple[int, ...]:
    """The operand slot of what an equation adds to an optimizer's state, or takes from it, if that is a matrix or more.

    Not that of a sum over rows of a table: it is scattered right into what it is added to (`buffers.scattered_into`),
    where nothing stands between.

    Args:
      equation: Any. is_state: For each operand, whether `is_of_state` holds for it, or it is a donated argument.
      is_scattered: For each operand, whether a scatter made it.
    """
    if any(is_scattered) or equation.primitive.name not in _ADDING or len({v.aval.shape for v in equation.invars}) > 1:
        return ()
    is_matrix = equation.outvars[0].aval.ndim > 1
    return (is_state.index(False),) if is_matrix and sorted(is_state) == [False, True] else ()


def row_by_row(x: Any) -> Any:
    """`x`, an array of one device, stored with its last dimension innermost."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def shards_row_by_row(x: Any, spec: PartitionSpec, mesh: Mesh) -> Any:
    """`x`, which `spec` spreads over the `mesh`, with each shard stored so."""
    return jax.shard_map(row_by_row, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)
