"""Equations that are read once a kind are read as if each were read alone."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from autoshard.trace.leaves import Leaves, describe
from autoshard.trace.rules import rule_of, signature_of
from autoshard.trace.trace import trace
from autoshard.trace.walk import called_jaxpr, open_jaxpr


def step(params, x, key):
    """Equal equations at different lines, types that differ in the dtype alone, dropped results, and a callback."""

    def loss(params):
        h = x
        for w in params:
            h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), jax.nn.gelu(h @ w), 0.0)
            h = h + jnp.sort(h.astype(jnp.bfloat16), axis=-1).astype(h.dtype) * h.max()
        return jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct((), jnp.float32), h.sum())

    gradients = jax.tree.map(jnp.sin, params)
    updates, _ = optax.adam(1e-3).update(gradients, optax.adam(1e-3).init(params), params)
    return optax.apply_updates(params, updates), loss(params)


def equations():
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    pending = [jax.make_jaxpr(step)([f32(8, 8)] * 3, f32(4, 8), key).jaxpr]
    while pending:
        for equation in pending.pop().eqns:
            yield equation
            called = called_jaxpr(equation)
            if called is not None:
                pending.append(open_jaxpr(called[1]))


def test_leaves_are_read_as_if_alone():
    leaves, numbers, count = Leaves(), {}, 0
    for equation in equations():
        leaf = leaves.of(equation)
        assert (leaf is None) == (called_jaxpr(equation) is not None)
        if leaf is None:
            continue
        count += 1
        assert (leaf.name, leaf.text) == (equation.primitive.name, describe(equation))
        assert leaf.rule == rule_of(equation)
        assert [(t.shape, t.dtype) for t in leaf.results] == [
            (v.aval.shape, str(v.aval.dtype)) for v in equation.outvars
        ]
        assert leaf.is_unknown == (leaf.name == "pure_callback" and equation.invars[0].aval.size > 1)
        assert numbers.setdefault(signature_of(equation), leaf.number) == leaf.number
    assert sorted(numbers.values()) == list(range(len(numbers))), "one leaf for each signature"
    assert count > 2 * len(numbers)


def test_a_custom_derivative_may_be_bound_to_what_cannot_be_hashed():
    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def scaled(x, factors):
        return x * factors[0]

    scaled.defvjp(lambda x, factors: (scaled(x, factors), None), lambda factors, _, g: (g * factors[0],))
    (call,) = jax.make_jaxpr(lambda x: scaled(x, [2.0]))(1.0).jaxpr.eqns
    with pytest.raises(TypeError, match="unhashable"):
        hash(tuple(call.params.items()))
    assert Leaves().of(call) is None
    assert [o.name for o in trace(lambda x: scaled(x, [2.0]), [1.0]).graph.operations] == ["mul"]
