"""What is summed stays row by row in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.execution.row_by_row import may_be_turned, shards_row_by_row


@pytest.mark.parametrize(
    ("summed", "expected"),
    [((0,), True), ((1,), True), ((2,), False), ((1, 2), False), ((0, 1), False)],
    ids=["outer", "middle", "inner: is row by row anyway", "a vector is left", "a vector is left too"],
)
def test_sums_that_leave_a_matrix_and_not_only_inner_dimensions(summed, expected):
    shape = jax.ShapeDtypeStruct((2, 3, 4), jnp.float32)
    (equation,) = jax.make_jaxpr(lambda x: jax.lax.reduce_sum(x, summed))(shape).eqns
    assert may_be_turned(equation) == expected


def test_values_are_kept():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = np.arange(8 * 4 * 6.0, dtype=np.float32).reshape(8, 4, 6)
    kept = jax.jit(lambda x: shards_row_by_row(x, P(("data", "tensor")), mesh))(x)
    np.testing.assert_array_equal(kept, x)
    assert kept.sharding.spec == P(("data", "tensor"))
