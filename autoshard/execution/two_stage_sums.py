"""Sums in two stages, as a plan says (`compiler/two_stage_sums.py`)."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from autoshard.graph.equation_plan import SumStage
from autoshard.graph.layout import SpecEntries

Place = Callable[[Any, SpecEntries | None], Any]
"""Puts a value in a layout; None leaves it as it is."""


def sum_in_stages(
    equation: jex.JaxprEqn,
    operand: Any,
    first: Sequence[SumStage],
    entries: SpecEntries | None = None,
    place: Place = lambda value, _: value,
) -> Any:
    """The result of a sum.

    Args:
      equation: A `reduce_sum`.
      operand: What it sums: the whole, or the shard of a device.
      first: What the first stage sums.
      entries: The layout of the operand; None where it is a shard.
      place: Puts what the first stage makes in its layout.
    """
    counts = {stage.dim: stage.num_first for stage in first}
    shape: list[int] = []
    axes: list[tuple[str, ...]] = []  # of the dimensions that are left
    first_dims, second_dims = [], []
    for dim, size in enumerate(operand.shape):
        num_first = counts.get(dim, 1)
        own = () if entries is None else entries[dim]
        if num_first == 1 or num_first < size:  # what is left of the dimension
            if dim in equation.params["axes"]:
                second_dims.append(len(axes))
            axes.append(own)
            shape.append(size // num_first)
        if num_first > 1:
            first_dims.append(len(shape))
            shape.append(num_first)
    bind = lambda value, dims: equation.primitive.bind(value, **{**equation.params, "axes": tuple(dims)})
    made = jax.lax.optimization_barrier(bind(jax.lax.reshape(operand, shape), first_dims))
    return bind(place(made, None if entries is None else tuple(axes)), second_dims)
