"""Programs with mutable references (`jax.new_ref`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.errors import TraceError
from autoshard.trace.trace import trace


def gradients_added(w, x):
    """Gradients of four micro-batches, added into a reference; another one is made in each turn of a scan."""
    total = jax.new_ref(jnp.zeros_like(w))

    def add(i, _):
        total[...] += jax.grad(lambda w: jnp.sum(jnp.tanh(x[i] @ w)))(w)

    jax.lax.fori_loop(0, 4, add, None)

    def turn(carry, row):
        own = jax.new_ref(carry)
        own[...] += row
        return own[...], jnp.sum(own[...])

    last, sums = jax.lax.scan(turn, jnp.zeros(x.shape[1:]), x)
    return w - 0.1 * total[...], jax.freeze(jax.new_ref(last)), sums


SHAPES = jax.ShapeDtypeStruct((32, 64), jnp.float32), jax.ShapeDtypeStruct((4, 16, 32), jnp.float32)


def test_what_a_reference_holds_is_known_as_a_value():
    graph = trace(gradients_added, SHAPES).graph
    assert not graph.unknown
    assert not {"new_ref", "get", "swap", "addupdate", "freeze"} & {o.name for o in graph.operations}
    (products,) = {o.trips for o in graph.operations if o.name == "dot_general"}
    assert products == 4.0  # the loop that writes into the reference was not dropped


def test_a_planned_step_with_references_is_the_plain_one():
    w = jax.random.normal(jax.random.key(0), (32, 64)) / 4
    x = jax.random.normal(jax.random.key(1), (4, 16, 32))
    plan = autoshard.plan(gradients_added, *SHAPES, mesh={"data": 4, "tensor": 2})
    for planned, plain in zip(plan.jit(gradients_added)(w, x), jax.jit(gradients_added)(w, x), strict=True):
        np.testing.assert_allclose(planned, plain, rtol=2e-6, atol=2e-6)


def test_references_from_outside_are_refused():
    outside = jax.new_ref(jnp.zeros(8))

    def count(seen, x):
        seen[...] += x
        return x

    with pytest.raises(TraceError, match=r"argument `seen`.*Pass the value"):
        trace(count, (outside, jnp.ones(8)))
    with pytest.raises(TraceError, match="closes over"):
        trace(lambda x: count(outside, x), (jnp.ones(8),))
