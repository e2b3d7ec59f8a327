"""Calls that JAX inlines when it lowers a program, which since 0.11 stay in its jaxpr until then."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.trace.inline import late_calls_inlined
from autoshard.trace.trace import trace

TABLE = np.arange(4.0, dtype=np.float32)  # a constant of the program


@functools.partial(jax.jit, inline=True)
def late(x):
    return 2.0 * x - 1.0


@jax.jit
def kept(x):
    return late(x) + late(late(x * TABLE))


def program(x):
    def body(carry, _):
        return late(carry), jax.checkpoint(lambda y: jnp.sin(late(y)))(carry)

    last, each = jax.lax.scan(body, kept(x), None, length=3)
    return jax.lax.cond(last[0] > 0, late, lambda y: y, last), each, late(x)


def as_of_0_11(closed):
    """What JAX makes of `late` since 0.11, also where this JAX inlined it while it traced."""

    def marked(jaxpr):
        return jaxpr.replace(eqns=[equation(e) for e in jaxpr.eqns])

    def equation(e):
        params = {name: param(value) for name, value in e.params.items()}
        if params.get("name") == "late":
            params["inline"] = jax.Inline.JAX_LATE if hasattr(jax, "Inline") else True
        return e.replace(params=params)

    def param(value):
        if isinstance(value, tuple):
            return tuple(map(param, value))
        if isinstance(value, jax.extend.core.ClosedJaxpr):
            return jax.extend.core.ClosedJaxpr(marked(value.jaxpr), value.consts)
        return marked(value) if isinstance(value, jax.extend.core.Jaxpr) else value

    return jax.extend.core.ClosedJaxpr(marked(closed.jaxpr), closed.consts)


@pytest.fixture
def traced(monkeypatch):
    """The program with `late` as calls, whatever this JAX does with `inline=True`."""
    monkeypatch.setitem(globals(), "late", jax.jit(late.__wrapped__))
    monkeypatch.setitem(globals(), "kept", jax.jit(kept.__wrapped__))
    return as_of_0_11(jax.make_jaxpr(program)(jnp.ones(4)))


def test_late_calls_are_inlined_wherever_they_stand_and_others_stay(traced):
    found = late_calls_inlined(traced)
    assert str(traced).count("name=late") >= 6
    assert "name=late" not in str(found) and "name=kept" in str(found)
    x = jnp.array([0.3, -1.0, 2.0, 5.0])
    run = lambda closed: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, x)
    for ours, theirs in zip(run(found), run(traced), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("around, stays", [(jax.checkpoint, True), (jax.jit, False)])
def test_a_late_call_with_constants_is_inlined_only_where_they_have_a_place(around, stays):
    def late(x):
        return x * TABLE + 1.0

    called = jax.jit(late)
    traced = as_of_0_11(jax.make_jaxpr(lambda x: around(lambda y: jnp.sin(called(y)))(x))(jnp.ones(4)))
    found = late_calls_inlined(traced)
    assert "name=late" in str(traced) and ("name=late" in str(found)) == stays
    x = jnp.array([0.3, -1.0, 2.0, 5.0])
    for run in (jax.extend.core.jaxpr_as_fun(found), jax.jit(jax.extend.core.jaxpr_as_fun(found))):
        np.testing.assert_allclose(run(x)[0], jnp.sin(late(x)), rtol=1e-6)


def test_a_traced_function_is_inlined_where_another_calls_it():
    x = jnp.array([0.3, -1.0, 2.0, 5.0])
    traced = jax.jit(lambda x: jnp.sin(x) * TABLE).trace(x)
    closed = jax.make_jaxpr(lambda x: jax.checkpoint(lambda y: traced(y) + 1)(traced(x)))(x)
    outer, inner = late_calls_inlined(closed), late_calls_inlined(jax.make_jaxpr(traced)(x))
    assert [e.primitive.name for e in inner.jaxpr.eqns] == ["sin", "mul"]
    assert "eval_jaxpr" not in [e.primitive.name for e in outer.jaxpr.eqns]
    np.testing.assert_allclose(jax.extend.core.jaxpr_as_fun(inner)(x)[0], traced(x), rtol=1e-6)
    np.testing.assert_allclose(jax.extend.core.jaxpr_as_fun(outer)(x)[0], traced(traced(x)) + 1, rtol=1e-6)


def test_a_program_without_late_calls_stays_the_same_object():
    closed = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)[0])(1.0)
    assert late_calls_inlined(closed) is closed


def test_a_graph_has_their_operations_in_its_own_computation():
    graph = trace(lambda x: late(x) + 1, (jax.ShapeDtypeStruct((4,), jnp.float32),)).graph
    assert [n.name for n in graph.nestings] == [] and {"mul", "sub", "add"} <= {o.name for o in graph.operations}
