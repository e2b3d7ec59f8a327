"""Sums of which each device keeps a piece."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from autoshard.execution.scattered_sums import scattered_sum, sum_of_pieces


@pytest.mark.parametrize("axes", [("a",), ("b",), ("a", "b"), ("b", "a"), ("a", "c")])
@pytest.mark.parametrize(("dim", "dtype"), list(itertools.product([0, 1, 2], [jnp.float32, jnp.bfloat16, jnp.int32])))
def test_an_exchange_of_pieces_sums_as_a_reduce_scatter_does(axes, dim, dtype):
    """On a mesh of 2 x 2 x 2; of small whole numbers, so that every order of adding gives the same."""
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    x = jnp.asarray(np.random.default_rng(0).integers(-4, 5, (8, 4, 8, 12)), dtype)

    def both(x):
        return sum_of_pieces(x[0], axes, dim), scattered_sum(x[0], axes, dim, mesh)

    specs = PartitionSpec(("a", "b", "c"))
    run = jax.shard_map(lambda x: [y[None] for y in both(x)], mesh=mesh, in_specs=specs, out_specs=[specs, specs])
    by_exchange, by_scatter = jax.jit(run)(x)
    assert by_exchange.dtype == dtype
    np.testing.assert_array_equal(np.asarray(by_exchange, np.float32), np.asarray(by_scatter, np.float32))
