"""Copies that are used up before they are made again."""

import jax
import jax.numpy as jnp
import pytest
from planned import planned

from autoshard.compiler.reused_operands import used_up_first
from autoshard.graph.equation_plan import EquationPlan

GATHERED = ((1, (((), ()),)),)
"""Operand 1, a matrix, is read whole."""
SHAPES = [(2, 2)] * 3


def found(fn, equations):
    graph = planned(fn, SHAPES, equations, {"data": 2})
    return used_up_first(graph, graph.entry)


@pytest.mark.parametrize("waits", [False, True])
def test_a_copy_is_used_up_first_unless_the_second_use_waits_anyway(waits):
    def f(x, y, w):
        first = x @ w  # equation 0
        other = jnp.sin(first if waits else y)
        return first, other @ w  # equation 2

    again = EquationPlan(operands=GATHERED, delayed=(1,))
    assert found(f, {0: EquationPlan(operands=GATHERED), 2: again}) == ({} if waits else {0: [1]})
    elsewhere = {0: EquationPlan(operands=((1, ((("data",), ()),)),)), 2: again}
    assert found(f, elsewhere) == {}  # not the same copy
    assert found(f, {2: EquationPlan(operands=GATHERED)}) == {}  # made once for both


@pytest.mark.parametrize("summed", [0, 1])
def test_a_product_comes_before_its_backward_product(summed):
    def f(activation, gradient, w):
        again = activation @ w  # equation 0, which nothing below needs
        for_w = jnp.einsum("bi,bo->io", activation, gradient)
        return again, for_w, jax.lax.dot_general(gradient, w, (((1,), (summed,)), ((), ())))

    read = EquationPlan(operands=GATHERED)
    last = len(jax.make_jaxpr(f)(*map(jnp.ones, SHAPES)).eqns) - 1
    assert found(f, {0: read, last: read}) == {0: [1]}
    without = lambda *args: f(*args)[::2]  # no gradient of w
    last = len(jax.make_jaxpr(without)(*map(jnp.ones, SHAPES)).eqns) - 1
    assert found(without, {0: read, last: read}) == {}
