"""Which stages of a cut are computed again in the backward pass: no more of them than the memory asks for."""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from autoshard.pipelines.schedule.durations import StageDurations
from autoshard.pipelines.schedule.orders import make_schedule
from autoshard.pipelines.schedule.peak_memory import LiveMicroBatches, greatest_live
from autoshard.pipelines.search.arrangement import Stage
from autoshard.pipelines.search.replica_group import ReplicaGroup, SearchContext
from autoshard.pipelines.search.stage_bounds import StageBounds
from autoshard.pipelines.search.stage_memory import TOLERANCE
from autoshard.pipelines.search.step_durations import stage_durations

MOST_REMATS = 64
"""Where stages share submeshes, ways to choose those computed again that are simulated; of more, one is."""


def rematerialised_stages(
    context: SearchContext, group: ReplicaGroup, positions: list[StageBounds], cut: Sequence[int]
) -> list[tuple[Stage, ...]]:
    """The stages of a cut, those computed again that must be: all ways to choose them where stages share submeshes."""
    runs = list(itertools.pairwise(cut))
    num_submeshes = len(group.submeshes[0])
    if group.num_stages == num_submeshes:
        again = [
            bool(p.needs_remat[i - s, j - s - 1]) for s, ((i, j), p) in enumerate(zip(runs, positions, strict=True))
        ]
        return [tuple(Stage(*r, a) for r, a in zip(runs, again, strict=True))]
    limits = [context.limits_bytes[submesh.slice] for submesh in group.submeshes[0]]
    schedule = make_schedule(group.schedule, num_submeshes, group.num_stages, group.num_micro_batches[0])
    plain, again = (
        [
            stage_durations(context.intervals, pipeline, s, group.num_pipelines)
            for pipeline in group.pipelines([Stage(*r, is_again) for r in runs])[:1]
            for s in range(group.num_stages)
        ]
        for is_again in (False, True)
    )
    chosen: list[list[tuple[bool, ...]]] = []
    for submesh, (held, limit) in enumerate(zip(greatest_live(schedule), limits, strict=True)):
        here = slice(submesh, None, num_submeshes)
        chosen.append(least_rematerialised(held, num_submeshes, plain[here], again[here], limit, MOST_REMATS + 1))
        if not chosen[-1]:
            return []
    if math.prod(len(c) for c in chosen) > MOST_REMATS:
        chosen = [c[:1] for c in chosen]
    return [
        tuple(Stage(*r, ways[s % num_submeshes][s // num_submeshes]) for s, r in enumerate(runs))
        for ways in itertools.product(*chosen)
    ]


def least_rematerialised(
    held: Sequence[LiveMicroBatches],
    num_submeshes: int,
    plain: Sequence[StageDurations],
    again: Sequence[StageDurations],
    limit_bytes: float,
    most: int,
) -> list[tuple[bool, ...]]:
    """The ways to compute stages of one submesh again that fit its memory, without those that contain another.

    Args:
      held: What the submesh holds at its tasks. num_submeshes: Of the pipeline.
      plain, again: Bytes of its stages as they are, and computed again.
      limit_bytes: Of one device.
      most: Ways that are given, at most.

    Returns:
      For each way, which stages are computed again; those with the fewest first.
    """
    running = np.array([h.running for h in held]) // num_submeshes
    whole = np.array([h.whole for h in held], dtype=float)
    for_weights = np.array([h.for_weights for h in held], dtype=float)
    working, residual = (
        np.array([[getattr(stage, name) for stage in stages] for stages in (plain, again)])
        for name in ("working_bytes", "residual_bytes")
    )
    room = limit_bytes * (1 + TOLERANCE) - sum(s.fixed_bytes for s in plain)
    room = room - for_weights @ np.array([s.weight_residual_bytes for s in plain])
    if (whole @ residual.min(axis=0) + working.min(axis=0)[running] > room).any():
        return []
    as_is = whole @ residual[0] + working[0, running]  # [states]
    of_held = (whole * (residual[1] - residual[0])).T  # [stages, states]: what more is needed if one is computed again
    of_held[running, np.arange(len(held))] += (working[1] - working[0])[running]
    found: list[tuple[bool, ...]] = []
    for ways in _by_number(len(plain)):
        for kept in found:
            ways = ways[~ways[:, kept].all(axis=1)]
        fits = (as_is + ways @ of_held <= room).all(axis=1)
        found += [tuple(way) for way in ways[fits].tolist()]
        if len(found) >= most:
            return found[:most]
    return found


def _by_number(num_stages: int) -> Iterator[np.ndarray]:
    """[ways, stages]: those that compute none again, then one, two, ...; of equally many the later stages first."""
    for number in range(num_stages + 1):
        chosen = list(itertools.combinations(range(num_stages), number))[::-1]
        ways = np.zeros((len(chosen), num_stages), dtype=bool)
        ways[np.arange(len(chosen))[:, None], np.array(chosen, dtype=int).reshape(len(chosen), number)] = True
        yield ways
