"""Optimizers that a configuration may name, with learning rates that change over a run."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import optax

from autoshard.errors import ConfigError
from autoshard.train.config import OptimizerSection
from autoshard.train.look_up import look_up


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
    _check_no_decay(section)
    return optax.sgd(learning_rate, momentum=0.9)


def _adafactor(section: OptimizerSection, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    # Adafactor takes the decay of one step; AdamW's is scaled by the learning rate, and so is this one.
    return optax.adafactor(learning_rate, weight_decay_rate=section.learning_rate * section.weight_decay or None)


def _adagrad(section: OptimizerSection, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    _check_no_decay(section)
    return optax.adagrad(learning_rate)


def _check_no_decay(section: OptimizerSection) -> None:
    if "weight_decay" in section.model_fields_set and section.weight_decay:
        raise ConfigError(
            f"optimizer.weight_decay: `{section.name}` has none; received {section.weight_decay}. Leave it out or use "
            "`adamw`."
        )


OPTIMIZERS: Mapping[str, Callable[[OptimizerSection, optax.Schedule], optax.GradientTransformation]] = MappingProxyType(
    {"adamw": _adamw, "sgd": _sgd, "adafactor": _adafactor, "adagrad": _adagrad}
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
