"""Copies that are used up before they are made again."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.execution.order import used_up_first
from autoshard.graph.equation_plan import EquationPlan

GATHERED = ((1, (((), ()),)),)
"""Operand 1, a matrix, is read whole."""


@pytest.mark.parametrize("waits", [False, True])
def test_a_copy_is_used_up_first_unless_the_second_use_waits_anyway(waits):
    def f(x, y, w):
        first = x @ w  # equation 0
        other = jnp.sin(first if waits else y)
        return first, other @ w  # equation 2

    jaxpr = jax.make_jaxpr(f)(*[jnp.ones((2, 2))] * 3).jaxpr
    again = EquationPlan(operands=GATHERED, delayed=(1,))
    shardings = {0: EquationPlan(operands=GATHERED), 2: again}
    found = used_up_first(jaxpr.eqns, [0, 1, 2], shardings)
    assert found == ({} if waits else {0: [jaxpr.invars[2]]})
    elsewhere = {0: EquationPlan(operands=((1, ((("data",), ()),)),)), 2: again}
    assert used_up_first(jaxpr.eqns, [0, 1, 2], elsewhere) == {}  # not the same copy
    assert used_up_first(jaxpr.eqns, [0, 1, 2], {2: EquationPlan(operands=GATHERED)}) == {}  # made once for both


@pytest.mark.parametrize("summed", [0, 1])
def test_a_product_comes_before_its_backward_product(summed):
    def f(activation, gradient, w):
        again = activation @ w  # equation 0, which nothing below needs
        for_w = jnp.einsum("bi,bo->io", activation, gradient)
        return again, for_w, jax.lax.dot_general(gradient, w, (((1,), (summed,)), ((), ())))

    jaxpr = jax.make_jaxpr(f)(*[jnp.ones((2, 2))] * 3).jaxpr
    read = EquationPlan(operands=GATHERED)
    numbers, last = list(range(len(jaxpr.eqns))), len(jaxpr.eqns) - 1
    found = used_up_first(jaxpr.eqns, numbers, {0: read, last: read})
    assert found == {0: [jaxpr.invars[2]]}
    assert used_up_first(jaxpr.eqns[:1] + jaxpr.eqns[last:], [0, last], {0: read, last: read}) == {}  # no gradient of w
