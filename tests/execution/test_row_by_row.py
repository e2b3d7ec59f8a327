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
    shape = jax.ShapeDtypeStruct((64, 64, 64), jnp.float32)
    (equation,) = jax.make_jaxpr(lambda x: jax.lax.reduce_sum(x, summed))(shape).eqns
    split = ((), (), ("data",)), {"data": 2}
    assert may_be_turned(equation, *split) == expected


def test_sums_of_few_elements_on_each_device_are_left_alone():
    (equation,) = jax.make_jaxpr(lambda x: jax.lax.reduce_sum(x, (0,)))(jnp.zeros((64, 4, 4))).eqns
    for ways, expected in ((2, True), (4, False)):  # 32 and 16 elements
        assert may_be_turned(equation, (("data",), (), ()), {"data": ways}) == expected


def test_values_are_kept():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = np.arange(8 * 4 * 6.0, dtype=np.float32).reshape(8, 4, 6)
    kept = jax.jit(lambda x: shards_row_by_row(x, P(("data", "tensor")), mesh))(x)
    np.testing.assert_array_equal(kept, x)
    assert kept.sharding.spec == P(("data", "tensor"))
