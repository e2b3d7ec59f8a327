"""A function that changes its arguments in place is refused, since the change would be lost."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from autoshard.errors import TraceError
from autoshard.trace.trace import trace


def test_a_changed_dictionary_is_named():
    def step(state, x):
        state["count"] = state["count"] + 1
        return x * 2

    with pytest.raises(TraceError, match="step.*`0.count`.*Return the new state"):
        trace(step, ({"count": jnp.zeros(()), "scale": jnp.ones(3)}, jnp.ones(3)))


def test_a_module_updated_in_place_is_named():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def step(model, x):
        gradient = nnx.grad(lambda m: jnp.sum(m(x) ** 2))(model)
        model.kernel[...] = model.kernel[...] - 0.1 * gradient.kernel[...]
        return jnp.sum(x)

    with pytest.raises(TraceError, match="kernel"):
        trace(step, (model, jnp.ones((2, 4))))


def test_reading_a_module_is_no_change():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    graph = trace(lambda m, x: m(x), (model, jax.ShapeDtypeStruct((2, 4), jnp.float32))).graph
    assert len(graph.arguments) == 3
