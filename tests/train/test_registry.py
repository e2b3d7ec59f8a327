"""Names of configurations: what they build, and what an unknown or unfitting one is told."""

import itertools

import jax.numpy as jnp
import optax
import pytest
from autoshard_models.gpt_linen import LinenGPTConfig

from autoshard.errors import ConfigError
from autoshard.train.config import DataSection, ModelSection, OptimizerSection, TrainConfig
from autoshard.train.registry import (
    OPTIMIZERS,
    load_corpus,
    make_optimizer,
    model_config,
    train_functions,
)


def test_model_config_takes_preset_and_overrides():
    section = ModelSection(name="gpt_linen", preset="125m", overrides={"scan_layers": True, "dtype": "float32"})
    config = model_config(section)
    assert isinstance(config, LinenGPTConfig) and config.scan_layers
    assert (config.num_layers, config.dtype, config.remat) == (12, jnp.float32, True)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"name": "bert"}, "model.name"),
        ({"preset": "175c"}, "`175b`"),
        ({"overrides": {"num_layer": 3}}, "`num_layers`"),
        ({"overrides": {"scan_layers": True}}, "scan_layers"),
        ({"overrides": {"num_layers": 2.5}}, "whole number"),
        ({"overrides": {"num_layers": True}}, "whole number"),
        ({"overrides": {"remat": 1}}, "true or false"),
        ({"overrides": {"dtype": "float99"}}, "number type"),
        ({"overrides": {"num_heads": 5}}, "num_heads=5"),
    ],
)
def test_unfitting_models_are_refused(section, told):
    with pytest.raises(ConfigError, match=told):
        model_config(ModelSection(**section))


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


@pytest.mark.parametrize(
    ("section", "told"),
    [({"name": "wikipedia"}, "data.name"), ({"name": "text"}, "data.path"), ({"path": "x"}, "data.path")],
)
def test_unfitting_data_is_refused(section, told):
    with pytest.raises(ConfigError, match=told):
        load_corpus(DataSection(**section))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"data": {"sequence_length": 129}}, "data.sequence_length"),
        ({"model": {"overrides": {"vocab_size": 255}}}, "vocab_size"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(data, told):
    with pytest.raises(ConfigError, match=told):
        train_functions(TrainConfig.model_validate(data))
