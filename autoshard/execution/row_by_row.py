"""Keeps what is summed row by row in memory.

XLA:GPU stores what a reduction over 32 elements or more reads with the summed dimensions innermost, where the result's
order in memory is settled, as a gradient's is (`GpuLayoutAssignment::PropagateReductionLayoutToOperand`). The gradient
of a position embedding, a sum over the batch, so turns the residual stream of all layers around, and with it the
logits, which products need turned back: three times in memory, as soon as a device has 32 sequences.
"""

from typing import Any

import jax
import jax.extend.core as jex
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec


def may_be_turned(equation: jex.JaxprEqn) -> bool:
    """Whether XLA:GPU may turn what it reads: it is a sum that leaves a matrix, not over inner dimensions alone."""
    if equation.primitive.name != "reduce_sum" or not equation.params["axes"]:
        return False
    kept = equation.invars[0].aval.ndim - len(equation.params["axes"])
    return kept > 1 and min(equation.params["axes"]) < kept


def row_by_row(x: Any) -> Any:
    """`x`, an array of one device, stored with its last dimension innermost."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def shards_row_by_row(x: Any, spec: PartitionSpec, mesh: Mesh) -> Any:
    """`x`, which `spec` spreads over the `mesh`, with each shard stored so."""
    return jax.shard_map(row_by_row, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)
