"""A cut made better by moving its boundaries, layer by layer."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from autoshard.pipelines.search.arrangement import Arrangement
from autoshard.pipelines.search.partition import MOST_REPLICAS, StagePartition
from autoshard.pipelines.search.partition_bounds import CLOSE, partition_bounds_s
from autoshard.pipelines.search.rematerialised import rematerialised_stages
from autoshard.pipelines.search.replica_group import ReplicaGroup, SearchContext, arrangement_step_s
from autoshard.pipelines.search.stage_bounds import stage_bounds

MOST_MOVED = 16
"""Neighbouring boundaries that are moved at once."""


def improved_partition(
    context: SearchContext,
    group: ReplicaGroup,
    cut: StagePartition,
    suggestions: Sequence[Sequence[int]] = (),
    most_simulated: int = 40,
) -> StagePartition:
    """A cut after its boundaries were moved by single layers, as long as the simulator says that this helps.

    Neighbouring boundaries also move together, so that a stage can give a layer to any other.

    Args:
      context: Costs, cluster, memory.
      group: The replicas and their submeshes.
      cut: Where to begin. suggestions: Other cuts to look at first, as for `best_partition`.
      most_simulated: Cuts to run through the simulator at most.
    """
    positions = stage_bounds(context, group, shares_memory=False)
    best, seen = cut, {_starts(cut)}

    def look(cuts: Iterable[tuple[int, ...]]) -> bool:
        """Whether one of some cuts is better; simulates those that could be, by their bounds, until one is."""
        nonlocal best
        new = np.array([c for c in cuts if c not in seen], dtype=int).reshape(-1, group.num_stages + 1)
        bounds_s = partition_bounds_s(positions, group, new)
        before_s = best.step_s
        for k in np.argsort(bounds_s, kind="stable"):
            if bounds_s[k] >= before_s * (1 - CLOSE) or len(seen) > most_simulated:
                break
            starts = tuple(new[k].tolist())
            seen.add(starts)
            for stages in rematerialised_stages(context, group, positions, starts):
                arrangement = Arrangement(group.pipelines(stages))
                step_s = arrangement_step_s(context, arrangement, MOST_REPLICAS)
                if step_s < best.step_s * (1 - CLOSE):
                    best = dataclasses.replace(best, arrangement=arrangement, stages=stages, step_s=step_s)
            if best.step_s < before_s:
                return True
        return False

    for suggestion in suggestions:
        look([tuple(suggestion)])
    while look(_moved(_starts(best))):
        pass
    return best


def _starts(cut: StagePartition) -> tuple[int, ...]:
    """The first layer of each stage, and the number of layers."""
    return (*(s.start for s in cut.stages), cut.stages[-1].stop)


def _moved(starts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Cuts with some neighbouring boundaries moved by one layer, each stage keeping one at least."""
    num_stages = len(starts) - 1
    found = []
    for first in range(1, num_stages):
        for stop in range(first + 1, min(num_stages, first + MOST_MOVED) + 1):
            for by in (-1, 1):
                moved = (*starts[:first], *(x + by for x in starts[first:stop]), *starts[stop:])
                if moved[first - 1] < moved[first] and moved[stop - 1] < moved[stop]:
                    found.append(moved)
    return found
