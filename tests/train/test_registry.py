"""Names of configurations: what they build, and what an unknown or unfitting one is told."""

import jax
import jax.numpy as jnp
import pytest
from autoshard_models.gpt_linen import LinenGPTConfig
from autoshard_models.zoo import FAMILIES

from autoshard.errors import ConfigError
from autoshard.train.config import ModelSection, TrainConfig
from autoshard.train.models import batch_config, model_config
from autoshard.train.registry import DATA, batch_shapes, load_data, train_functions


def config_of(**sections) -> TrainConfig:
    return TrainConfig.model_validate(sections)


def test_model_config_takes_preset_and_overrides():
    section = ModelSection(name="gpt_linen", preset="125m", overrides={"scan_layers": True, "dtype": "float32"})
    config = model_config(section)
    assert isinstance(config, LinenGPTConfig) and config.scan_layers
    assert (config.num_layers, config.dtype, config.remat) == (12, jnp.float32, True)
    overrides = {"table_rows": [7, 9], "top_dims": [4]}
    config = model_config(ModelSection(name="dlrm", overrides=overrides))
    assert (config.table_rows, config.top_dims, config.embed_dim) == ((7, 9), (4,), 16)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"name": "bert"}, "model.name"),
        ({"preset": "175c"}, "`175b`"),
        ({"name": "llama", "preset": "7b"}, "Valid: tiny, 8b, 70b"),
        ({"overrides": {"num_layer": 3}}, "`num_layers`"),
        ({"overrides": {"scan_layers": True}}, "scan_layers"),
        ({"overrides": {"num_layers": 2.5}}, "whole number"),
        ({"overrides": {"num_layers": True}}, "whole number"),
        ({"overrides": {"num_layers": 0}}, "above 0"),
        ({"overrides": {"remat": 1}}, "true or false"),
        ({"overrides": {"dtype": "float99"}}, "number type"),
        ({"overrides": {"num_heads": 5}}, "num_heads=5"),
        ({"overrides": {"vocab_size": 255}}, "vocab_size"),
        ({"name": "dlrm", "overrides": {"table_rows": 7}}, "a list of whole numbers"),
        ({"name": "vit", "overrides": {"image_size": [8]}}, "whole number"),
    ],
)
def test_unfitting_models_are_refused(section, told):
    with pytest.raises(ConfigError, match=told):
        model_config(ModelSection(**section))


def test_sequences_may_be_shorter_than_the_models():
    shapes = batch_shapes(config_of(model={"name": "encoder"}, data={"sequence_length": 20, "batch_size": 3}))
    assert shapes["inputs"].shape == (3, 20)
    config = config_of(model={"name": "encoder_decoder"}, data={"sequence_length": 40})
    assert (batch_config(config).input_length, batch_config(config).target_length) == (40, 32)
    assert load_data(config).items_per_example == 72


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"data": {"name": "wikipedia"}}, "data.name"),
        ({"data": {"name": "text"}}, "data.path"),
        ({"data": {"path": "x"}}, "data.path"),
        ({"model": {"name": "dlrm"}, "data": {"path": "x"}}, "data.path"),
        ({"model": {"name": "llama"}, "data": {"name": "digits"}}, "choose python_sources or text"),
        ({"model": {"name": "unet"}, "data": {"name": "clicks"}}, "`unet` cannot learn from 'clicks'"),
        ({"model": {"name": "vit", "overrides": {"num_classes": 9}}}, "num_classes"),
        ({"model": {"name": "vit", "overrides": {"image_size": 6}}}, "image_size"),
        ({"model": {"name": "encoder"}, "data": {"sequence_length": 4}}, "at least 5"),
    ],
)
def test_unfitting_data_is_refused(config, told):
    with pytest.raises(ConfigError, match=told):
        load_data(config_of(**config))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"data": {"sequence_length": 129}}, "context_length of 128"),
        ({"model": {"name": "encoder_decoder"}, "data": {"sequence_length": 65}}, "input_length of 64"),
        ({"model": {"name": "llama", "preset": "8b"}, "data": {"sequence_length": 24}}, "attention_chunks, 16"),
        ({"model": {"name": "vit"}, "data": {"sequence_length": 8}}, "`vit` is none"),
        ({"model": {"name": "vit"}, "data": {"name": "text"}}, "data.name"),
        ({"optimizer": {"num_micro_batches": 5}}, "must divide data.batch_size"),
        ({"model": {"name": "graph_network"}, "optimizer": {"num_micro_batches": 2}}, "joined graph"),
        ({"model": {"name": "unet", "overrides": {"num_groups": 5}}}, "cannot be built: Number of groups"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(config, told):
    with pytest.raises(ConfigError, match=told):
        train_functions(config_of(**config))


def test_micro_batches_and_loss_scaling_reach_the_step():
    tiny = {"num_layers": 1, "embed_dim": 8, "num_heads": 1}
    config = config_of(
        model={"overrides": tiny}, optimizer={"num_micro_batches": 2, "loss_scaling": True}, data={"batch_size": 4}
    )
    functions = train_functions(config)
    state = jax.eval_shape(functions.init, 0)
    assert state.loss_scale is not None
    batch = {name: jax.ShapeDtypeStruct((3, 8), jnp.int32) for name in ("inputs", "targets")}
    with pytest.raises(ValueError, match="num_micro_batches=2, batch=3"):
        jax.eval_shape(functions.step, state, batch)


def test_every_family_has_data():
    assert {name for source in DATA.values() for name in source.families} == set(FAMILIES)
