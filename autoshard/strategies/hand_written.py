"""A training step as people write it by hand: all its layers keep the same for the backward pass.

What the layers of a step recompute is one of three usual policies: nothing, all but the products with weights, or all
but their inputs. A plan whose form was searched (`autoshard/plans/variant_search.py`) stands beside strategies each in
the best of these, and in the form that the step has as it is written.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from autoshard.plans.step_variant import StepVariant
from autoshard.remat.policy import Keep, uniform
from autoshard.remat.rewrite import Layers, layers_of
from autoshard.train_step import TrainStep

AS_WRITTEN = "as written"
"""The recomputation of a step that is left as it is."""


@dataclasses.dataclass(frozen=True, slots=True)
class UniformPolicy:
    """What all layers of a model do for the backward pass.

    Attributes:
      recomputed: What they compute again, for people.
      keep: What they keep.
    """

    recomputed: str
    keep: Keep

    def __str__(self) -> str:
        return f"{self.recomputed} recomputed"

    def of(self, step: TrainStep, layers: Layers) -> TrainStep:
        """A step whose layers all follow it."""
        return StepVariant(uniform(layers.runs, self.keep)).of(step)


def in_form(name: str, recomputed: str) -> str:
    """What is planned or shown, and what layers compute again in it; `name` alone where that is empty.

    Args:
      name: A strategy. recomputed: As of `HandWritten`.
    """
    if not recomputed:
        return name
    return f"{name}, {recomputed}" if recomputed == AS_WRITTEN else f"{name}, {recomputed} recomputed"


POLICIES = (
    UniformPolicy("nothing", Keep.ALL),
    UniformPolicy("all but dots", Keep.WEIGHT_PRODUCTS),
    UniformPolicy("all", Keep.INPUTS),
)
"""No `jax.checkpoint`; around each layer with `dots_with_no_batch_dims_saveable`; around each layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class HandWritten:
    """A step in one of its forms.

    Attributes:
      recomputed: What its layers compute again in the backward pass, for people.
      fn: The step.
    """

    recomputed: str
    fn: Callable[..., Any]


def hand_written(step: TrainStep, state: Any, batch: Any) -> tuple[HandWritten, ...]:
    """A step under every policy of `POLICIES`, and as it is written where it says itself what layers recompute.

    Args:
      step: The step. state, batch: Its arguments, arrays or shapes.

    Returns:
      The forms; the step as it is written alone where no layers are found in it.
    """
    layers, as_written = layers_of(step, state, batch), HandWritten(AS_WRITTEN, step)
    if not layers.runs:
        return (as_written,)
    forms = tuple(HandWritten(policy.recomputed, policy.of(step, layers)) for policy in POLICIES)
    return (*forms, as_written) if layers.has_checkpoints else forms
