"""Which forms of a training step a search may try: what options allow, the step leaves open, and a batch divides."""

import dataclasses
from typing import Any

import jax

from autoshard.errors import ConfigError
from autoshard.plans.mean_loss import examples_of
from autoshard.plans.options import PlanOptions
from autoshard.train_step import TrainStep, batch_size


@dataclasses.dataclass(frozen=True, slots=True)
class Space:
    """Which forms of a step may be tried.

    Attributes:
      with_policies: Whether what layers recompute is chosen.
      counts: Numbers of micro-batches that come into question, rising; None in it is what the step says itself.
      is_asked: Whether the caller asks for the search; else only the need for memory calls for it.
      is_cut_asked: Whether the caller asks for micro-batches; else only a loss may be cut that stays the same.
    """

    with_policies: bool
    counts: tuple[int | None, ...]
    is_asked: bool
    is_cut_asked: bool


def space_of(step: TrainStep, state: Any, batch: Any, options: PlanOptions) -> Space:
    """The forms that `options` allow of a step, for a state and a batch.

    Raises:
      ConfigError: They ask for micro-batches that the step or the batch cannot be run in.
      StageError: A batch that is to be cut has no examples.
    """
    asked = options.micro_batches
    what = f"PlanOptions.micro_batches={asked!r} (plan.micro_batches)"
    if not (asked in (None, "as_written", "search") or isinstance(asked, int) and asked >= 1):
        raise ConfigError(f'{what} is a number of micro-batches, "as_written" or "search". Choose one.')
    if options.remat not in (None, "as_written", "search"):
        raise ConfigError(f'PlanOptions.remat is "as_written" or "search"; received {options.remat!r}. Choose one.')
    counts: tuple[int | None, ...] = (None,)
    if asked == 1 and step.parts is None:
        asked = "as_written"
    if asked not in (None, "as_written") and step.parts is not None:
        raise ConfigError(
            f"{what} is for a TrainStep that leaves its micro-batches open; received one with parts of {step.parts}. "
            "Leave out `parts`, or the option."
        )
    if isinstance(asked, int):
        size = batch_size(batch)
        if size % asked:
            raise ConfigError(f"{what} must divide the batch; received one of {size} examples. Choose a divisor.")
        counts = (asked,)
    elif asked == "search":
        counts = _doubled(batch_size(batch))
    elif asked is None and step.parts is None and not jax.tree.leaves(getattr(state, "mutable", None)):
        counts = _doubled(examples_of(batch))
    is_cut_asked = asked not in (None, "as_written")
    return Space(options.remat != "as_written", counts, options.remat == "search" or is_cut_asked, is_cut_asked)


def _doubled(size: int) -> tuple[int | None, ...]:
    """None, and 2, 4, ... as long as they divide a batch of `size` examples."""
    found: list[int | None] = [None]
    count = 2
    while count <= size and size % count == 0:
        found.append(count)
        count *= 2
    return tuple(found)
