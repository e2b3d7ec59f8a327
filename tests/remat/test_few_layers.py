"""A loss with few of its layers is the loss that a model with so few layers has."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard import TrainStep
from autoshard.remat.few_layers import few_layers_of
from autoshard.remat.policy import Keep
from autoshard.remat.rewrite import layers_of

WIDTH, BATCH = 16, 8


def loss_fn(params, batch):
    """Each layer also adds to a penalty, which all layers behind it read past."""
    x, penalty = batch["x"] @ params["first"], 0.0
    for w in params["layers"]:
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
        penalty = penalty + jnp.mean(x**2)
    return jnp.mean((x @ params["last"] - batch["y"]) ** 2) + 0.1 * penalty


STEP = TrainStep(loss_fn, optax.sgd(0.1))


def params_of(layers):
    draw = lambda n, *shape: jax.random.normal(jax.random.key(n), shape) / 4
    blocks = [{"up": draw(2 * n, WIDTH, 32), "down": draw(2 * n + 1, 32, WIDTH)} for n in range(layers)]
    return {"first": draw(100, WIDTH, WIDTH), "layers": blocks, "last": draw(101, WIDTH, 1)}


BATCH_OF = {"x": jnp.ones((BATCH, WIDTH)) / 3, "y": jnp.zeros((BATCH, 1))}


@pytest.mark.parametrize("keep", Keep)
def test_gradients_are_those_of_a_model_with_so_few_layers(keep):
    state = STEP.init(params_of(6))
    runs = layers_of(STEP, state, BATCH_OF).runs
    assert [run.count for run in runs] == [6]
    found = few_layers_of(STEP, state, BATCH_OF, runs).gradients(keep, [2])
    assert found is not None
    fn, (own, others, rest) = found
    leaves = jax.tree.leaves(state.params)
    by_shape = lambda shapes, arrays: [a for a, s in zip(arrays, shapes, strict=True) if a.shape == s.shape]
    assert len(by_shape(rest, leaves)) == len(leaves)
    left = jax.tree.leaves({**state.params, "layers": state.params["layers"][:2]})
    assert [x.shape for x in left] == [s.shape for s in own]
    arrays = [jax.random.key(0) if s.dtype == jax.random.key(0).dtype else None for s in others]
    inputs = iter(jax.tree.leaves(BATCH_OF))
    arrays = [next(inputs) if a is None else a for a in arrays]
    expected = jax.grad(loss_fn)({**state.params, "layers": state.params["layers"][:2]}, BATCH_OF)
    for a, b in zip(fn(left, arrays, leaves), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_what_only_the_last_layer_is_read_for_is_made_by_the_last_one_left():
    def odd(params, batch):
        x, kept = batch["x"], None
        for w in params["layers"]:
            hidden = jnp.tanh(x @ w["up"])
            x = x + hidden @ w["down"]
            kept = hidden
        return jnp.mean(x**2) + jnp.mean(kept)

    step = TrainStep(odd, optax.sgd(0.1))
    state = step.init(params_of(6))
    runs = layers_of(step, state, BATCH_OF).runs
    few = few_layers_of(step, state, BATCH_OF, runs)
    assert few.gradients(Keep.ALL, [3]) is not None  # every layer makes what the last one is read for
    assert few.gradients(Keep.ALL, [6]) is not None
