"""What is summed stays row by row in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.execution.row_by_row import (
    added_to_state,
    is_gathered_inside,
    is_of_state,
    may_be_turned,
    shards_row_by_row,
)


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


def momentum(weight, mean, gradient, scale):
    return weight - scale * (0.9 * mean + gradient), mean.reshape(6, 4), mean @ gradient.T


def test_what_an_update_adds_to_the_state_is_found():
    """The state is a weight (4, 6) and its mean; the scale and the reshaped mean have other shapes."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 6), (4, 6), (4, 6), ())]
    jaxpr = jax.make_jaxpr(momentum)(*shapes).jaxpr
    state, found = set(jaxpr.invars[:2]), {}
    for equation in jaxpr.eqns:
        flags = [not isinstance(v, jax.extend.core.Literal) and v in state for v in equation.invars]
        if slots := added_to_state(equation, flags, [False] * len(flags)):
            found[equation.primitive.name] = slots
        if is_of_state(equation, flags):
            state.add(equation.outvars[0])
    assert [e.primitive.name for e in jaxpr.eqns if e.outvars[0] in state] == ["mul"]
    assert found == {"add": (1,), "sub": (1,)}, "the gradient to the mean, the step to the weight"


def test_only_matrices_are_kept():
    (equation,) = jax.make_jaxpr(jnp.add)(jnp.zeros(6), jnp.zeros(6)).eqns
    assert added_to_state(equation, [True, False], [False, False]) == ()


def test_what_is_scattered_is_left_alone():
    (equation,) = jax.make_jaxpr(jnp.add)(jnp.zeros((6, 4)), jnp.zeros((6, 4))).eqns
    found = [added_to_state(equation, [True, False], [False, is_scattered]) for is_scattered in (False, True)]
    assert found == [(1,), ()]


@pytest.mark.parametrize(
    ("entries", "wanted", "is_inside"),
    [
        (((), (), ("data",)), ((), (), ()), True),
        ((("data",), ()), ((), ()), False),
        (((), ()), ((), ("data",)), False),
        (((), ("data", "tensor")), (("data",), ("tensor",)), True),
    ],
    ids=["inner", "outermost", "slice", "moved outwards"],
)
def test_what_is_gathered_along_an_inner_dimension(entries, wanted, is_inside):
    assert is_gathered_inside(entries, wanted) == is_inside
