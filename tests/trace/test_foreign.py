"""Primitives of other libraries: opened where JAX implements them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

import autoshard
from autoshard.trace.trace import trace


def primitive_of(function, name="theirs"):
    """A primitive as a library defines one: an implementation in JAX, which JAX lowers."""
    made = Primitive(name)
    made.def_impl(function)
    made.def_abstract_eval(lambda *avals, **params: jax.core.ShapedArray(avals[0].shape, avals[0].dtype))
    mlir.register_lowering(made, mlir.lower_fun(function, multiple_results=False))
    return made


def relaxed(x, w, *, steps):
    return jax.lax.fori_loop(0, steps, lambda _, y: jnp.tanh(y @ w) + x, x)


THEIRS = primitive_of(relaxed)
OUTER = primitive_of(lambda x, w: 2 * THEIRS.bind(x, w, steps=2), "outer")
SHAPES = jax.ShapeDtypeStruct((64, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)


def test_what_is_implemented_in_jax_is_opened():
    def step(x, w):
        return jax.lax.scan(lambda y, _: (THEIRS.bind(y, w, steps=3), None), OUTER.bind(x, w), None, length=5)[0]

    graph = trace(step, SHAPES).graph
    assert not graph.unknown
    assert sorted(o.trips for o in graph.operations if o.name == "dot_general") == [2.0, 15.0]
    plan = autoshard.plan(step, *SHAPES, mesh={"data": 8})
    x, w = (jax.random.normal(jax.random.key(i), s.shape) / 4 for i, s in enumerate(SHAPES))
    np.testing.assert_allclose(plan.jit(step)(x, w), jax.jit(step)(x, w), rtol=1e-5, atol=1e-5)


def test_what_jax_cannot_trace_stays():
    on_numpy = primitive_of(lambda x: np.sort(np.asarray(x)), "on_numpy")
    another_type = primitive_of(lambda x: x.sum(), "another_type")
    for kept in (on_numpy, another_type):
        graph = trace(lambda x, kept=kept: kept.bind(x) + 1, SHAPES[:1]).graph
        assert [u.split(" at ")[0] for u in graph.unknown] == [kept.name]
