"""Keeps what is summed row by row in memory.

XLA:GPU stores what a reduction over 32 elements or more reads with the summed dimensions innermost, where the result's
order in memory is settled, as a gradient's is (`GpuLayoutAssignment::PropagateReductionLayoutToOperand`). The gradient
of a position embedding, a sum over the batch, so turns the residual stream of all layers around, and with it the
logits, which products need turned back: three times in memory, as soon as a device has 32 sequences.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.extend.core as jex
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec

from autoshard.planner.decisions import SpecEntries

LEAST_SUMMED = 32
"""From so many elements on XLA:GPU turns what a sum reads (`GpuLayoutAssignment`, a warp's worth)."""


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


def row_by_row(x: Any) -> Any:
    """`x`, an array of one device, stored with its last dimension innermost."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def shards_row_by_row(x: Any, spec: PartitionSpec, mesh: Mesh) -> Any:
    """`x`, which `spec` spreads over the `mesh`, with each shard stored so."""
    return jax.shard_map(row_by_row, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)
