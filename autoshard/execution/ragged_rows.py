"""Products of rows in groups (`jax.lax.ragged_dot`), of which each device has an equal share of the rows."""

from collections.abc import Mapping, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from autoshard.graph.graph import FactorRule


def with_own_groups(
    equation: jex.JaxprEqn, shards: Sequence[jax.Array], rule: FactorRule, axes_of: Mapping[int, Sequence[str]]
) -> tuple[jax.Array, ...]:
    """The operands on one device, inside a region that is manual over the mesh: the sizes are those of its own rows.

    They come from a barrier. XLA lays the rows out once for each group, with zeros for those of others, and would keep
    what it lays out for one product until the last of all that read the same rows: from the forward pass until the
    gradient of the matrices.

    Args:
      equation: A product of rows in groups.
      shards: What this device has of the left side and of the right one, and the sizes of all groups.
      rule: Its rule.
      axes_of: The mesh axes that split each factor, major to minor.
    """
    lhs, rhs, sizes = jax.lax.optimization_barrier(tuple(shards))
    (ragged,) = equation.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    axes = [axis for factor in rule.operands[0][ragged] for axis in axes_of.get(factor, ())]
    if not axes:
        return lhs, rhs, sizes
    num_rows = lhs.shape[ragged]
    first = jax.lax.axis_index(tuple(axes)).astype(sizes.dtype) * num_rows
    ends = jnp.clip(jnp.cumsum(sizes, dtype=sizes.dtype) - first, 0, num_rows)
    return lhs, rhs, jnp.diff(ends, prepend=jnp.zeros(1, sizes.dtype))
