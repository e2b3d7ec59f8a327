"""Optimizers: that they descend, how their learning rate moves, and which settings they refuse."""

import itertools

import jax.numpy as jnp
import optax
import pytest

from autoshard.errors import ConfigError
from autoshard.train.config import OptimizerSection
from autoshard.train.optimizers import OPTIMIZERS, make_optimizer


@pytest.mark.parametrize(("name", "schedule"), list(itertools.product(OPTIMIZERS, ["constant", "cosine"])))
def test_every_optimizer_moves_parameters_against_the_gradient(name, schedule):
    section = OptimizerSection(name=name, schedule=schedule, warmup_steps=2, learning_rate=0.1)
    optimizer = make_optimizer(section, total_steps=10)
    params = {"w": jnp.full((4, 4), 2.0)}
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert (optax.apply_updates(params, updates)["w"] < params["w"]).all()


def sgd_step_sizes(**settings) -> list[float]:
    """Sizes of the updates by plain-gradient steps of 1, in which momentum is unwound."""
    optimizer = make_optimizer(OptimizerSection(name="sgd", clip_norm=None, **settings), total_steps=10)
    params, gradient = jnp.zeros(()), jnp.ones(())
    state, sizes = optimizer.init(params), []
    for step in range(10):
        update, state = optimizer.update(gradient, state, params)
        momentum = (1 - 0.9 ** (step + 1)) / (1 - 0.9)
        sizes.append(-float(update) / momentum)
    return sizes


def test_warm_up_rises_from_the_first_step_and_the_schedule_falls_to_a_tenth():
    sizes = sgd_step_sizes(learning_rate=1.0, warmup_steps=4, schedule="linear")
    assert sizes[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert sizes[5:] == pytest.approx([0.85, 0.7, 0.55, 0.4, 0.25])
    cosine = sgd_step_sizes(learning_rate=1.0, schedule="cosine")
    assert cosine[0] == pytest.approx(1.0) and cosine[5] == pytest.approx(0.55)
    assert sgd_step_sizes(learning_rate=0.5, schedule="constant") == pytest.approx([0.5] * 10)


def test_clipping_bounds_the_gradient():
    optimizer = make_optimizer(OptimizerSection(name="sgd", clip_norm=1.0, schedule="constant", learning_rate=1.0), 10)
    params = jnp.zeros((4,))
    update, _ = optimizer.update(jnp.full((4,), 50.0), optimizer.init(params), params)
    assert jnp.linalg.norm(update) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"name": "adam"}, "`adamw`"),
        ({"name": "sgd", "weight_decay": 0.1}, "weight_decay"),
    ],
)
def test_unfitting_optimizers_are_refused(section, told):
    with pytest.raises(ConfigError, match=told):
        make_optimizer(OptimizerSection(**section), total_steps=10)
