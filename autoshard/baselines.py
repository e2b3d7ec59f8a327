"""Data parallelism, ZeRO, tensor and expert parallelism and their mixes, as plans to compare with and to run."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from autoshard.api.program import Plan
from autoshard.errors import LayoutError
from autoshard.strategies import make
from autoshard.strategies.make import Outcome, Settings, Subject, prepare_subject, suited
from autoshard.strategies.strategies import ALL, DataRule, Spread, Strategy, TensorRule

__all__ = [
    "ALL",
    "DataRule",
    "Outcome",
    "Settings",
    "Spread",
    "Strategy",
    "TensorRule",
    "all_baselines",
    "baseline",
    "data_parallel",
    "megatron",
    "mixed",
    "plan_baseline",
    "prepare_subject",
    "suited",
    "try_baseline",
    "zero",
]


def data_parallel(fn: Callable[..., Any], *args: Any, **settings: Unpack[Settings]) -> Plan:
    """The batch split over all devices; parameters and optimizer state on each; gradients all-reduced.

    Args:
      fn: The function, such as a whole training step, that takes and returns its state.
      *args: Its positional arguments: pytrees of arrays or `jax.ShapeDtypeStruct`.
      **settings: See `Settings`.

    Returns:
      The plan, named `ddp`.

    Raises:
      LayoutError: The batch does not divide, or nothing tells it from the state.
      MemoryBudgetError: The baseline does not fit the budget.
      ClusterError, MeshError, SolverError: As for `autoshard.plan`.
    """
    return baseline(Strategy(DataRule.DDP), fn, *args, **settings)


def zero(fn: Callable[..., Any], *args: Any, stage: int = 3, **settings: Unpack[Settings]) -> Plan:
    """Data parallelism that also shards the optimizer state (stage 1), gradients (2) and parameters (3, i.e. FSDP).

    Args and errors are those of `data_parallel`, and `stage`: 1, 2 or 3 (LayoutError for any other).

    Returns:
      The plan, named `zero1`, `zero2` or `zero3`.
    """
    if stage not in (1, 2, 3):
        raise LayoutError(f"ZeRO has the stages 1, 2 and 3; received stage={stage!r}.")
    return baseline(Strategy(DataRule(f"zero{stage}")), fn, *args, **settings)


def megatron(fn: Callable[..., Any], *args: Any, **settings: Unpack[Settings]) -> Plan:
    """Tensor parallelism over all devices: weights split by columns and rows, the batch whole on each.

    Args and errors are those of `data_parallel`.

    Returns:
      The plan, named `megatron`.
    """
    return baseline(Strategy(None, TensorRule.MEGATRON), fn, *args, **settings)


def mixed(
    fn: Callable[..., Any], *args: Any, data: DataRule | str = DataRule.ZERO3, **settings: Unpack[Settings]
) -> Plan:
    """Data parallelism over some axes and tensor parallelism over another.

    Args and errors are those of `data_parallel`, and `data`, the rule of the data axes: `ddp`, `zero1`, `zero2` or
    `zero3` (ValueError for any other). MeshError also if the mesh lacks the tensor axis.

    Returns:
      The plan, named such as `zero3+megatron`.
    """
    return baseline(Strategy(DataRule(data), TensorRule.MEGATRON), fn, *args, **settings)


def baseline(strategy: Strategy, fn: Callable[..., Any], *args: Any, **settings: Unpack[Settings]) -> Plan:
    """The plan of any `Strategy`. Args and errors are those of `data_parallel`."""
    return plan_baseline(strategy, prepare_subject(fn, *args, **settings), **settings)


def all_baselines(
    fn: Callable[..., Any], *args: Any, strategies: Sequence[Strategy] | None = None, **settings: Unpack[Settings]
) -> tuple[Outcome, ...]:
    """Plans several baselines of one function, tracing it once.

    A baseline that exceeds the memory limit is planned without one and reported with what it would need; one that
    cannot be written down at all, say because the batch does not divide or there are no experts, is reported
    with the reason.

    Args:
      fn, *args, **settings: As for `data_parallel`.
      strategies: Which baselines; None for all that apply to the function.

    Returns:
      What became of each, in the order of `strategies`.

    Raises:
      ClusterError, LayoutError, TraceError: The inputs fit no baseline at all.
    """
    subject = prepare_subject(fn, *args, **settings)
    return tuple(try_baseline(s, subject, **settings) for s in (suited(subject) if strategies is None else strategies))


def plan_baseline(
    strategy: Strategy, subject: Subject, *, to_beat_s: float = math.inf, **settings: Unpack[Settings]
) -> Plan:
    """The plan of a strategy for what `prepare_subject` made. Further errors are those of `data_parallel`.

    Args:
      strategy: The strategy.
      subject: What is planned.
      to_beat_s: A plan that costs this or more is of no use, and is not sought to the end.
      **settings: See `Settings`.

    Raises:
      NotFasterError: None of its plans costs less than `to_beat_s`.
    """
    return Plan.of(make.plan_baseline(strategy, subject, to_beat_s=to_beat_s, **settings))


def try_baseline(strategy: Strategy, subject: Subject, **settings: Unpack[Settings]) -> Outcome:
    """What becomes of a strategy for what `prepare_subject` made; see `all_baselines`."""
    outcome = make.try_baseline(strategy, subject, **settings)
    return outcome if outcome.plan is None else dataclasses.replace(outcome, plan=Plan.of(outcome.plan))
