"""The names that a configuration may use for models, optimizers and data, and what each stands for.

A configuration selects from these tables and never names an import path, so that reading a configuration from a
stranger runs no code of theirs.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import grain
import jax.numpy as jnp
import numpy as np
import optax
from autoshard_models.gpt import GPTConfig
from autoshard_models.gpt_linen import LinenGPTConfig
from autoshard_models.presets import PRESETS
from autoshard_models.train_step import TrainFunctions, build

from autoshard.errors import ConfigError
from autoshard.train.config import DataSection, ModelSection, OptimizerSection, TrainConfig, suggestion
from autoshard.train.data import TrainData
from autoshard.train.data.batches import Part, drawn
from autoshard.train.data.language import next_token
from autoshard.train.data.text import part_of, python_sources, text_files

Entry = TypeVar("Entry")


def look_up(table: Mapping[str, Entry], key: str, name: str) -> Entry:
    """The entry of `table` called `name`.

    Raises:
        ConfigError: there is none; the message names the configuration `key` and the valid names.
    """
    if name not in table:
        raise ConfigError(f"{key}: nothing is registered as {name!r}. {suggestion(name, list(table))}")
    return table[name]


# ---- models


MODELS: Mapping[str, type[GPTConfig]] = MappingProxyType({"gpt": GPTConfig, "gpt_linen": LinenGPTConfig})
"""Configuration class of each model, which `autoshard_models.train_step.build` accepts."""


def model_config(section: ModelSection) -> GPTConfig:
    """The configuration of the model that `section` asks for.

    Raises:
        ConfigError: no such model, preset or field, or a field's value does not fit it.
    """
    config_class = look_up(MODELS, "model.name", section.name)
    base = look_up(PRESETS, "model.preset", section.preset)
    fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)} | fields
    chosen = {
        name: _fitting(name, value, look_up(defaults, "model.overrides", name))
        for name, value in section.overrides.items()
    }
    try:
        return config_class(**(fields | chosen))
    except ValueError as error:
        raise ConfigError(f"model.overrides: {error} Change one of them.") from error


def _fitting(name: str, value: bool | int | float | str, current: Any) -> Any:
    """`value` as the type of the field that it replaces."""
    kind = type(current)
    if kind is float and type(value) is int:
        return float(value)
    if kind in (bool, int, float):
        if type(value) is kind:
            return value
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
    else:
        try:
            return jnp.dtype(value)
        except TypeError:
            wanted = "the name of a number type, such as bfloat16"
    raise ConfigError(f"model.overrides.{name}: must be {wanted}; received {value!r}. Correct the value.")


# ---- optimizers


def _schedule(section: OptimizerSection, total_steps: int) -> optax.Schedule:
    peak, warmup = section.learning_rate, section.warmup_steps
    decay_steps = max(total_steps - warmup, 1)  # a run may end within the warm-up
    after = {
        "constant": optax.constant_schedule(peak),
        "cosine": optax.cosine_decay_schedule(peak, decay_steps, alpha=0.1),
        "linear": optax.linear_schedule(peak, peak * 0.1, decay_steps),
    }[section.schedule]
    # Counted from 1, so that the first step already moves the parameters.
    rise = lambda step: peak * (step + 1) / max(warmup, 1)
    return optax.join_schedules([rise, after], [warmup]) if warmup else after


def _adamw(section: OptimizerSection, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=section.weight_decay)


def _sgd(section: OptimizerSection, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    if "weight_decay" in section.model_fields_set and section.weight_decay:
        raise ConfigError(
            f"optimizer.weight_decay: `sgd` has none; received {section.weight_decay}. Leave it out or use `adamw`."
        )
    return optax.sgd(learning_rate, momentum=0.9)


def _adafactor(section: OptimizerSection, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    # Adafactor takes the decay of one step; AdamW's is scaled by the learning rate, and so is this one.
    return optax.adafactor(learning_rate, weight_decay_rate=section.learning_rate * section.weight_decay or None)


OPTIMIZERS: Mapping[str, Callable[[OptimizerSection, optax.Schedule], optax.GradientTransformation]] = MappingProxyType(
    {"adamw": _adamw, "sgd": _sgd, "adafactor": _adafactor}
)
"""Builder of each optimizer, from its section and the learning rate by step; clipping is added around it."""


def make_optimizer(section: OptimizerSection, total_steps: int) -> optax.GradientTransformation:
    """The optimizer that `section` asks for, for a run of `total_steps` steps.

    Raises:
        ConfigError: no such optimizer, or a setting that does not fit it.
    """
    builder = look_up(OPTIMIZERS, "optimizer.name", section.name)
    optimizer = builder(section, _schedule(section, total_steps))
    if section.clip_norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(section.clip_norm), optimizer)


# ---- data


def _python_sources(section: DataSection) -> np.ndarray:
    if section.path is not None:
        raise ConfigError(
            f"data.path: `python_sources` reads Python's own library and takes no path; received {section.path!r}. "
            "Leave it out, or set data.name to `text`."
        )
    return python_sources()


def _text(section: DataSection) -> np.ndarray:
    if section.path is None:
        raise ConfigError("data.path: `text` needs a file or a folder; received nothing. Set data.path.")
    return text_files(section.path)


DATA: Mapping[str, Callable[[DataSection], np.ndarray]] = MappingProxyType(
    {"python_sources": _python_sources, "text": _text}
)
"""Loader of each corpus: its bytes as uint8 (length,)."""


def load_data(config: TrainConfig) -> TrainData:
    """The batches that `config` asks for, to train and to evaluate on.

    Raises:
        ConfigError: no such data, none that fits the model, or none that can be read.
    """
    section = config.data
    corpus = look_up(DATA, "data.name", section.name or "python_sources")(section)
    length = section.sequence_length or model_config(config.model).context_length

    def batches(part: Part) -> grain.MapDataset:
        bytes_of_part = part_of(corpus, part, section.eval_fraction, length + 1)
        return drawn(lambda rng: next_token(bytes_of_part, rng, section.batch_size, length), section.seed, part)

    return TrainData(batches("train"), batches("eval"), length, "tokens")


# ---- a whole program


def train_functions(config: TrainConfig) -> TrainFunctions:
    """The two functions of the run that `config` describes: seed -> state, and (state, batch) -> (state, metrics).

    Raises:
        ConfigError: an unknown name, or settings that contradict each other.
    """
    model = model_config(config.model)
    if config.data.sequence_length is not None and config.data.sequence_length > model.context_length:
        raise ConfigError(
            f"data.sequence_length: must not exceed the model's context of {model.context_length} tokens; received "
            f"{config.data.sequence_length}. Lower it or raise model.overrides.context_length."
        )
    if model.vocab_size < 256:
        raise ConfigError(
            f"model.overrides.vocab_size: byte-level data needs at least 256; received {model.vocab_size}. Raise it."
        )
    return build(model, make_optimizer(config.optimizer, config.train.steps))


def output_folder(config: TrainConfig) -> pathlib.Path:
    """The folder in which the run keeps its results, as an absolute path."""
    return pathlib.Path(config.train.output_dir).expanduser().resolve()
