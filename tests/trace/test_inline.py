"""Programs without nested calls compute what they computed."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

from autoshard.trace.inline import inlined


def check(fn, *args) -> jax.extend.core.ClosedJaxpr:
    """The program of `fn` without calls, which must be legal and give the same."""
    flat, closed = inlined(jax.make_jaxpr(fn)(*args)), jax.make_jaxpr(fn)(*args)
    assert not {"jit", "pjit", "closed_call", "core_call"} & {e.primitive.name for e in flat.jaxpr.eqns}
    made = [v for e in flat.jaxpr.eqns for v in e.outvars]
    assert len(set(map(id, made))) == len(made)  # each variable is made once
    known = {*flat.jaxpr.invars, *flat.jaxpr.constvars}
    for equation in flat.jaxpr.eqns:
        assert all(v in known for v in equation.invars if not isinstance(v, Literal))
        known.update(equation.outvars)
    for x, y in zip(jaxpr_as_fun(flat)(*args), jaxpr_as_fun(closed)(*args), strict=True):
        np.testing.assert_array_equal(x, y)
    return flat


def test_a_function_that_is_called_twice_gets_variables_of_its_own_each_time():
    inner = jax.jit(lambda x, y: jnp.sin(x) * y)
    outer = jax.jit(lambda x: inner(inner(x, x), 2.0 * x))
    flat = check(lambda x: (outer(x), inner(x, x)), jnp.arange(3.0))
    assert [e.primitive.name for e in flat.jaxpr.eqns].count("sin") == 3


def test_calls_that_give_what_they_got_literals_or_the_same_twice():
    passing = jax.jit(lambda x, y: (y, x, 1.0, jnp.cos(x)))

    def fn(x):
        a, b, one, cosine = passing(x, 2.0)
        c, _, _, _ = passing(x, a)
        return a, b, one, cosine, cosine, c + one, x

    flat = check(fn, jnp.arange(3.0))
    assert [e.primitive.name for e in flat.jaxpr.eqns].count("cos") == 2  # that of the second call is not asked for


def test_constants_of_calls_become_constants_of_the_program():
    table = jnp.arange(4.0)
    inner = jax.jit(lambda x: x * table)
    flat = check(lambda x: inner(jax.jit(lambda y: inner(y) + table)(x)), jnp.ones(4))
    assert len(flat.jaxpr.constvars) == len(flat.consts)


def test_loops_checkpoints_and_rules_of_differentiation_stay():
    halved = jax.custom_jvp(lambda x: x / 2)
    halved.defjvp(lambda primals, tangents: (primals[0] / 2, tangents[0]))
    inner = jax.jit(lambda x: halved(jax.checkpoint(jax.jit(jnp.sin))(x)))
    flat = check(lambda x: jax.lax.fori_loop(0, 2, lambda _, y: inner(y), inner(x)), jnp.arange(3.0))
    names = [e.primitive.name for e in flat.jaxpr.eqns]
    assert "custom_jvp_call" in names and "scan" in names
    assert any("prevent_cse" in e.params for e in flat.jaxpr.eqns)
    assert float(jax.grad(lambda x: jaxpr_as_fun(flat)(x)[0].sum())(jnp.zeros(3))[0]) == 1.0  # 1 by its own rule
