"""What a caller of `autoshard.plan` gives in another form than it takes, told before anything is traced."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard.calls.wrapped import bound, is_mapped
from autoshard.errors import ConfigError, PinError, StageError, TraceError
from autoshard.pipelines.search.options import StageOptions
from autoshard.plans.options import PlanOptions
from autoshard.train_step import TrainStep

_OF_A_STATE = ("step", "params", "opt_state", "rng")


def check_received(fn: Any, args: Sequence[Any], pins: Any, options: Any, stages: Any) -> None:
    """Refuses what is no function, no pins, no options, or no state of a `TrainStep`.

    Raises:
      TraceError: `fn` is no function, or one under `jax.pmap`.
      PinError: Pins are no mapping.
      ConfigError: Options are given as something else than their class.
      StageError: A `TrainStep` comes without the state that it makes.
    """
    if not callable(fn):
        raise TraceError(
            f"What is planned is a function, and its arguments come behind it; received {type(fn).__name__}. Write "
            "autoshard.plan(step, state, batch), without calling the step."
        )
    if is_mapped(bound(fn).fn):
        raise TraceError(
            f"A step under jax.pmap already says what each device does; received `{_name(fn)}` so. Plan the function "
            "inside, for the whole batch, without a leading dimension of devices and without jax.pmap."
        )
    if pins is not None and not isinstance(pins, Mapping):
        raise PinError(
            "Pins map path patterns to PartitionSpecs, such as {'batch.*': PartitionSpec('data')}; received "
            f"{type(pins).__name__}. Write a dict."
        )
    for name, value, kind in (("options", options, PlanOptions), ("stages", stages, StageOptions)):
        if value is not None and not isinstance(value, kind):
            raise ConfigError(
                f"{name}= takes an autoshard.{kind.__name__}; received {type(value).__name__}. Write "
                f"{name}=autoshard.{kind.__name__}(...)."
            )
    if isinstance(fn, TrainStep) and args:
        missing = [part for part in _OF_A_STATE if not hasattr(args[0], part)]
        if missing:
            raise StageError(
                f"The state of a TrainStep has {', '.join(_OF_A_STATE)}; received {type(args[0]).__name__} without "
                f"{', '.join(missing)}. Pass what `TrainStep.init` makes, or its shapes: "
                "jax.eval_shape(step.init, params)."
            )


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
