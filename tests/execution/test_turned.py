"""Products that are turned at once get their layout from what turns them."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.execution.turned import turned_at_once
from autoshard.graph.equation_plan import EquationPlan

ROWS, COLUMNS, WHOLE = ((), ("data",), ()), ((), (), ("data",)), ((), (), ())


def gradient(x, y):
    return jnp.swapaxes(jnp.einsum("ecd,ecf->edf", x, y), 1, 2)


def heads(x, y):
    return jnp.swapaxes(jnp.einsum("ecd,ecf->edf", x, y), 0, 1)


@pytest.mark.parametrize(
    ("fn", "product", "turning", "is_turned"),
    [
        (gradient, EquationPlan(results=((0, ROWS),)), EquationPlan(results=((0, COLUMNS),)), True),
        (gradient, EquationPlan(results=((0, ROWS),)), EquationPlan(results=((0, ROWS),)), False),
        (
            gradient,
            EquationPlan(results=((0, ROWS),)),
            EquationPlan(operands=((0, (WHOLE,)),), results=((0, COLUMNS),)),
            False,
        ),
        (
            gradient,
            EquationPlan(results=((0, ROWS),), scatters=(("data", 1),)),
            EquationPlan(results=((0, COLUMNS),)),
            False,
        ),
        (heads, EquationPlan(results=((0, WHOLE),)), EquationPlan(results=((0, WHOLE),)), False),
    ],
    ids=["same layout", "other layout", "moved", "scattered", "batches"],
)
def test_a_product_that_is_turned_where_it_is_has_no_layout_of_its_own(fn, product, turning, is_turned):
    shape = jax.ShapeDtypeStruct((4, 8, 8), jnp.float32)
    jaxpr = jax.make_jaxpr(fn)(shape, shape).jaxpr
    assert [e.primitive.name for e in jaxpr.eqns] == ["dot_general", "transpose"]
    found = turned_at_once(jaxpr.eqns, [3, 4], {3: product, 4: turning})
    assert found == (frozenset(jaxpr.eqns[0].outvars) if is_turned else frozenset())


def test_on_tpus_products_without_batches_are_turned_at_once_too():
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda x, y: (x.T @ y).T)(shape, shape).jaxpr
    equations = jaxpr.eqns[1:]
    assert [e.primitive.name for e in equations] == ["dot_general", "transpose"]
    rows, columns = (
        EquationPlan(results=((0, ((), ("data",))),)),
        EquationPlan(results=((0, (("data",), ())),)),
    )
    shardings = {3: rows, 4: columns}
    assert turned_at_once(equations, [3, 4], shardings, is_tpu=True) == frozenset(equations[0].outvars)
    assert not turned_at_once(equations, [3, 4], shardings)
