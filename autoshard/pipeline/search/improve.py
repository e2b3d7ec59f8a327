"""A cut made better by moving its boundaries, layer by layer."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from autoshard.pipeline.search.arrangement import Arrangement
from autoshard.pipeline.search.cut import MOST_REPLICAS, Cut, with_remat
from autoshard.pipeline.search.cut_bounds import CLOSE, cut_bounds_s
from autoshard.pipeline.search.positions import positions_of
from autoshard.pipeline.search.team import Scene, Team, arrangement_step_s

MOST_MOVED = 16
"""Neighbouring boundaries that are moved at once."""


def improved_cut(
    scene: Scene, team: Team, cut: Cut, suggestions: Sequence[Sequence[int]] = (), most_simulated: int = 40
) -> Cut:
    """A cut after its boundaries were moved by single layers, as long as the simulator says that this helps.

    Neighbouring boundaries also move together, so that a stage can give a layer to any other.

    Args:
      scene: Costs, cluster, memory.
      team: The replicas and their places.
      cut: Where to begin. suggestions: Other cuts to look at first, as for `bounded_cut`.
      most_simulated: Cuts to run through the simulator at most.
    """
    positions = positions_of(scene, team, shares_memory=team.num_stages > len(team.places[0]))
    best, seen = cut, {_starts(cut)}

    def look(cuts: Iterable[tuple[int, ...]]) -> bool:
        """Whether one of some cuts is better; simulates those that could be, by their bounds, until one is."""
        nonlocal best
        new = np.array([c for c in cuts if c not in seen], dtype=int).reshape(-1, team.num_stages + 1)
        bounds_s = cut_bounds_s(positions, team, new)
        before_s = best.step_s
        for k in np.argsort(bounds_s, kind="stable"):
            if bounds_s[k] >= before_s * (1 - CLOSE) or len(seen) > most_simulated:
                break
            starts = tuple(new[k].tolist())
            seen.add(starts)
            for stages in with_remat(scene, team, positions, starts):
                arrangement = Arrangement(team.pipelines(stages))
                step_s = arrangement_step_s(scene, arrangement, MOST_REPLICAS)
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


def _starts(cut: Cut) -> tuple[int, ...]:
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
