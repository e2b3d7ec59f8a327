"""From the model section of a configuration to a model's own configuration, for every family of the zoo."""

import dataclasses
import typing
from typing import Any

import jax.numpy as jnp
from autoshard_models.zoo import FAMILIES

from autoshard.errors import ConfigError
from autoshard.train.config import ModelSection, TrainConfig
from autoshard.train.look_up import look_up

NUM_BYTES = 256
"""Smallest vocabulary of a language model, whose tokens are bytes."""


def model_config(section: ModelSection) -> Any:
    """The configuration of the model that `section` asks for, of the class that its family has.

    Raises:
        ConfigError: no such family, preset or field, or a field's value does not fit it.
    """
    family = look_up(FAMILIES, "model.name", section.name)
    base = look_up(family.presets, "model.preset", section.preset)
    types = typing.get_type_hints(family.config)
    chosen = {
        name: _fitting(name, value, look_up(types, "model.overrides", name))
        for name, value in section.overrides.items()
    }
    try:
        model = dataclasses.replace(base, **chosen)
    except ValueError as error:
        raise ConfigError(f"model.overrides: {error} Change one of them.") from error
    if getattr(model, "vocab_size", NUM_BYTES) < NUM_BYTES:
        raise ConfigError(
            f"model.overrides.vocab_size: byte-level data needs at least {NUM_BYTES}; received {model.vocab_size}. "
            "Raise it."
        )
    return model


def _fitting(name: str, value: Any, kind: Any) -> Any:
    """`value` as the type of the field that it is for."""
    is_count = lambda number: type(number) is int and number > 0
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind is bool and type(value) is bool or kind is int and is_count(value):
        return value
    if kind == tuple[int, ...] and isinstance(value, list) and value and all(map(is_count, value)):
        return tuple(value)
    wanted = {
        bool: "true or false",
        int: "a whole number above 0",
        float: "a number",
        tuple[int, ...]: "a list of whole numbers above 0",
    }.get(kind, "the name of a number type, such as bfloat16")
    if kind not in (bool, int, float, tuple[int, ...]):
        try:
            return jnp.dtype(value)
        except TypeError:
            pass
    raise ConfigError(f"model.overrides.{name}: must be {wanted}; received {value!r}. Correct the value.")


def batch_config(config: TrainConfig) -> Any:
    """The configuration of the model with the lengths of batches in place of its own.

    `data.sequence_length` shortens the sequences of a language model, and both sides of an encoder-decoder.

    Raises:
        ConfigError: as `model_config`, or `data.sequence_length` does not fit the model.
    """
    model, length = model_config(config.model), config.data.sequence_length
    if length is None:
        return model
    fields = [name for name in ("context_length", "input_length", "target_length") if hasattr(model, name)]
    if not fields:
        raise ConfigError(
            f"data.sequence_length: only language models read sequences, and `{config.model.name}` is none; received "
            f"{length}. Leave it out."
        )
    longest = getattr(model, fields[0])
    if length > longest:
        raise ConfigError(
            f"data.sequence_length: must not exceed the model's {fields[0]} of {longest} tokens; received {length}. "
            f"Lower it or raise model.overrides.{fields[0]}."
        )
    num_chunks = getattr(model, "attention_chunks", 1)
    if length % num_chunks:
        raise ConfigError(
            f"data.sequence_length: must be a multiple of the model's attention_chunks, {num_chunks}; received "
            f"{length}. Change it, or set model.overrides.attention_chunks."
        )
    return dataclasses.replace(model, **{name: min(length, getattr(model, name)) for name in fields})
