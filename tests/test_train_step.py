"""A training step in micro-batches is the step over the whole batch, with each micro-batch's own random numbers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct

from autoshard import TrainStep
from autoshard.errors import StageError

PARAMS = {"w": jnp.arange(6.0).reshape(3, 2) / 10, "b": jnp.zeros(2)}
BATCH = {"x": jnp.sin(jnp.arange(24.0)).reshape(8, 3), "y": jnp.arange(8) % 2}


def loss_fn(params: Any, batch: Any, key: Any) -> Any:
    logits = batch["x"] @ params["w"] + params["b"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return jnp.mean(losses), {"hits": jnp.mean(logits.argmax(1) == batch["y"]), "examples": losses.size}


def close(found: Any, expected: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), found, expected)


@pytest.mark.parametrize("parts", [(8,), (2, 2, 2, 2), (1, 4, 3)])
def test_micro_batches_add_up_to_the_batch(parts):
    """Gradients and metrics are means over all examples, however these are shared out."""
    step = TrainStep(loss_fn, optax.adamw(1e-2))
    state = step.init(PARAMS)
    expected, metrics = step(state, BATCH)
    by_hand = jax.grad(lambda p: loss_fn(p, BATCH, None)[0])(PARAMS)
    close(expected.opt_state[0].mu, jax.tree.map(lambda g: 0.1 * g, by_hand))
    found, found_metrics = step.in_parts(parts)(state, BATCH)
    close((found.params, found.opt_state), (expected.params, expected.opt_state))
    mean_size = sum(n * n for n in parts) / 8  # the mean over examples of the size of their micro-batch
    close(found_metrics, metrics | {"examples": mean_size})
    assert int(found.step) == 1 and found.mutable == {} and found.loss_scale is None


def test_mutable_state_passes_from_part_to_part_and_random_numbers_differ():
    """Equal and unequal parts: each adds what it drew."""

    def noisy(params, mutable, batch, key):
        drawn = jax.random.uniform(key)
        new = {"log": jnp.roll(mutable["log"], 1).at[0].set(drawn), "count": mutable["count"] + 1}
        return params * drawn * jnp.mean(batch), (new, {"drawn": drawn})

    step = TrainStep(noisy, optax.sgd(1.0), has_mutable=True)
    state = step.init(jnp.float32(1.0), jax.random.key(5), {"log": jnp.zeros(4), "count": jnp.int32(0)})
    state = state.replace(step=jnp.int32(7))
    key = jax.random.fold_in(state.rng, 7)
    drawn = [float(jax.random.uniform(jax.random.fold_in(key, m))) for m in range(3)]
    for parts in ((2, 2, 2), (1, 2, 3)):
        after, metrics = step.in_parts(parts)(state, jnp.ones(6))
        mean = sum(n * x for n, x in zip(parts, drawn, strict=True)) / 6
        close(after.mutable["log"], [*drawn[::-1], 0.0])
        close((after.params, metrics["drawn"], metrics["loss"]), (1.0 - mean, mean, mean))
        assert int(after.mutable["count"]) == 3
        np.testing.assert_array_equal(jax.random.key_data(after.rng), jax.random.key_data(state.rng))
    after, metrics = step(state, jnp.ones(6))
    close(metrics["drawn"], float(jax.random.uniform(key)))  # one part draws from the step's own key


@struct.dataclass
class Scale:
    """The scale of the loss."""

    scale: jax.Array


class Moving:
    """Doubles the scale after finite gradients, and halves it after others."""

    def first(self) -> Scale:
        return Scale(jnp.float32(1024.0))

    def next(self, current: Scale, is_finite: jax.Array) -> Scale:
        return Scale(jnp.where(is_finite, current.scale * 2, current.scale / 2))


@pytest.mark.parametrize("parts", [None, (4, 4), (5, 3)])
def test_the_scale_of_the_loss_changes_nothing_unless_gradients_overflow(parts):
    plain = TrainStep(loss_fn, optax.sgd(0.1, momentum=0.9), parts=parts)
    scaled = dataclasses.replace(plain, scaling=Moving())
    expected, metrics = plain(plain.init(PARAMS), BATCH)
    state, found = scaled(scaled.init(PARAMS), BATCH)
    close((state.params, state.opt_state), (expected.params, expected.opt_state))
    close(found, metrics | {"loss_scale": 1024.0, "is_finite": 1.0})
    assert float(state.loss_scale.scale) == 2048.0
    left_out, found = scaled(state, BATCH | {"x": BATCH["x"].at[7, 0].set(jnp.inf)})
    jax.tree.map(np.testing.assert_array_equal, left_out.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, left_out.opt_state, state.opt_state)
    assert float(found["is_finite"]) == 0.0 and float(left_out.loss_scale.scale) == 1024.0 and int(left_out.step) == 2


def test_a_batch_without_examples_can_be_run_whole_only():
    """Nodes and edges of a graph differ in number."""
    loss = lambda params, batch, key: (params * (jnp.sum(batch["nodes"]) + jnp.sum(batch["edges"])), None)
    step, batch = TrainStep(loss, optax.sgd(1.0)), {"nodes": jnp.ones(3), "edges": jnp.ones(5)}
    state, metrics = step(step.init(jnp.float32(2.0)), batch)
    assert float(state.params) == 2.0 - 8.0 and list(metrics) == ["loss"]
    with pytest.raises(StageError, match=r"examples as its first dimension.*\(3,\), \(5,\)"):
        step.in_parts((1, 2))(state, batch)


@pytest.mark.parametrize(
    ("returned", "has_mutable", "message"),
    [
        (lambda x: x.mean(), False, r"must return \(loss, aux\)"),
        (lambda x: (x.mean(), {}), True, r"must return \(loss, \(mutable, aux\)\)"),
        (lambda x: (x.mean(), ({}, {}, {})), True, "received .loss, tuple"),
        (lambda x: (x, {}), False, r"`loss` has shape \[8, 3\]"),
        (lambda x: (x.mean(), {"rows": x.mean(1)}), False, r"`rows` has shape \[8\]"),
        (lambda x: (x.mean(), x.mean()), False, "must be a dict of scalars"),
    ],
)
def test_what_a_loss_may_not_return(returned, has_mutable, message):
    step = TrainStep(lambda params, *rest: returned(BATCH["x"] * params), optax.sgd(0.1), has_mutable)
    with pytest.raises(StageError, match=message):
        step(step.init(jnp.float32(1.0)), BATCH)


def test_parts_must_have_all_examples_and_the_name_is_that_of_the_loss():
    step = TrainStep(loss_fn, optax.sgd(0.1))
    assert step.__name__ == "loss_step"
    with pytest.raises(StageError, match=r"parts of \(4, 2\), 6 in all, for a batch of 8"):
        step.in_parts((4, 2))(step.init(PARAMS), BATCH)
