"""What a stage may hold: memory of one device against what the schedule keeps in flight there."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from autoshard.cluster import Cluster
from autoshard.pipelines.cost.interval_costs import IntervalCosts
from autoshard.pipelines.schedule.durations import PipelineDurations, StageDurations
from autoshard.pipelines.schedule.peak_memory import peak_bytes
from autoshard.pipelines.schedule.tasks import Schedule, ScheduleKind

TOLERANCE = 1e-9
"""Sums of bytes made in different orders differ by this share of the limit at most."""


def limits_bytes(cluster: Cluster, reserve: float) -> tuple[float, ...]:
    """For each slice, the memory of one device less the share `reserve`, which the compiler and its runtime need."""
    return tuple(s.device_type.memory_bytes * (1 - reserve) for s in cluster.slices())


@dataclasses.dataclass(frozen=True, slots=True)
class InFlight:
    """Micro-batches that a stage holds at one moment: whole ones, and others only for their weight tasks."""

    whole: int
    for_weights: int = 0


@functools.lru_cache(maxsize=4096)
def most_in_flight(kind: ScheduleKind, stage: int, num_stages: int, num_micro_batches: int) -> tuple[InFlight, ...]:
    """What a stage that has a submesh to itself holds at once, without what is less than another entry in both numbers.

    With K = min(M, S - s): GPipe holds M, 1F1B K. ZB-H1 puts weight tasks off by s micro-batches, so it holds K and up
    to min(s, M - K) more; when a micro-batch moves from the one to the other there is one more of the other. The
    interleaved schedule is counted as 1F1B, which holds no more than it on a stage.
    """
    reach = min(num_micro_batches, num_stages - stage)
    if kind is ScheduleKind.GPIPE:
        return (InFlight(num_micro_batches),)
    if kind is not ScheduleKind.ZERO_BUBBLE:
        return (InFlight(reach),)
    most = min(stage + 1, num_micro_batches)
    states = [InFlight(reach, min(stage, num_micro_batches - reach))]
    for moved in range(1, reach + 1):
        if states[-1].for_weights < most:
            states.append(InFlight(reach - moved, min(num_micro_batches - reach + moved, most)))
    return tuple(states)


def run_peak_bytes(
    costs: IntervalCosts, in_flight: tuple[InFlight, ...], num_pipelines: int, *, rematerialise: bool
) -> np.ndarray:
    """Peak on one device of each run of layers as a stage: what it keeps, residuals in flight, one running task."""
    held = costs.input_bytes if rematerialise else costs.residual_bytes
    working = costs.working_bytes + (costs.residual_bytes if rematerialise else 0.0)
    flying = [n.whole * held + n.for_weights * costs.weight_residual_bytes for n in in_flight]
    return costs.kept_bytes + costs.optimizer_bytes / num_pipelines + np.maximum.reduce(flying) + working


def fits(schedule: Schedule, stages: Sequence[StageDurations], limits: Sequence[float]) -> tuple[bool, ...]:
    """For each submesh of a pipeline, whether it never needs more than its limit."""
    if schedule.num_submeshes == schedule.num_stages:
        peaks = [_peak_bytes(schedule, s, stage) for s, stage in enumerate(stages)]
    else:
        peaks = peak_bytes(PipelineDurations(schedule, tuple(stages)))
    return tuple(p <= limit * (1 + TOLERANCE) for p, limit in zip(peaks, limits, strict=True))


def _peak_bytes(schedule: Schedule, stage: int, durations: StageDurations) -> float:
    """The peak of a stage that has a submesh to itself."""
    flying = most_in_flight(schedule.kind, stage, schedule.num_stages, schedule.num_micro_batches)
    held = [n.whole * durations.residual_bytes + n.for_weights * durations.weight_residual_bytes for n in flying]
    return durations.fixed_bytes + max(held) + durations.working_bytes
