"""Which blocks of devices the submeshes of an arrangement take: stages that send to each other, and replicas of one
stage, should be near.

The search lays the submeshes of a pipeline side by side, and replicas one after another. Submeshes with equally many
devices of a slice can change places, at no other cost than what is sent between them; so the step is simulated with
them in other places, and the arrangement kept that takes least (`placement/arrange.py`).
"""

import dataclasses
from collections.abc import Sequence

from autoshard.pipelines.search.arrangement import Arrangement, Submesh
from autoshard.pipelines.search.replica_group import SearchContext, arrangement_step_s
from autoshard.placement.arrange import best_arrangement

MOST_SIMULATED = 400
"""Steps that are simulated at most for the submeshes of one kind."""
MOST_TASKS = 5_000_000
"""Forward and backward tasks in these, at most: fewer steps are simulated where one has many."""
_WORTH = 1e-6
"""The share of a step that a change of places must save."""


def placed_submeshes(context: SearchContext, arrangement: Arrangement) -> Arrangement:
    """The arrangement with its submeshes in the places where the step takes least."""
    num_tasks = sum(2 * len(p.stages) * p.num_micro_batches for p in arrangement.pipelines)
    most = max(1, min(MOST_SIMULATED, MOST_TASKS // num_tasks))
    for own in _interchangeable(arrangement):
        places = tuple(_at(arrangement, position).first_device for position in own)
        if len(places) < 2 or not _differ(context, arrangement, own):
            continue
        base = arrangement

        def step_s(order: Sequence[int], base: Arrangement = base, own: Sequence[tuple[int, int]] = own) -> float:
            return arrangement_step_s(context, _with_places(base, own, order))

        before_s = step_s(places)
        found = best_arrangement(None, [places], step_s, most, most)
        if found.cost < (1 - _WORTH) * before_s:
            arrangement = _with_places(base, own, found.arrangement)
    return arrangement


def _interchangeable(arrangement: Arrangement) -> list[list[tuple[int, int]]]:
    """(pipeline, submesh) of those that are of one slice and mesh option."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for p, pipeline in enumerate(arrangement.pipelines):
        for k, submesh in enumerate(pipeline.submeshes):
            found.setdefault((submesh.slice, submesh.option), []).append((p, k))
    return list(found.values())


def _at(arrangement: Arrangement, position: tuple[int, int]) -> Submesh:
    return arrangement.pipelines[position[0]].submeshes[position[1]]


def _differ(context: SearchContext, arrangement: Arrangement, own: Sequence[tuple[int, int]]) -> bool:
    """Whether some of these submeshes are further from each other than others."""
    submeshes = [_at(arrangement, position) for position in own]
    speeds = {context.topology.speed(a, b) for i, a in enumerate(submeshes) for b in submeshes[:i]}
    return len(speeds) > 1


def _with_places(arrangement: Arrangement, own: Sequence[tuple[int, int]], places: Sequence[int]) -> Arrangement:
    """The arrangement with some submeshes beginning at other devices."""
    place_of = dict(zip(own, places, strict=True))
    pipelines = []
    for p, pipeline in enumerate(arrangement.pipelines):
        submeshes = tuple(
            dataclasses.replace(submesh, first_device=place_of.get((p, k), submesh.first_device))
            for k, submesh in enumerate(pipeline.submeshes)
        )
        pipelines.append(dataclasses.replace(pipeline, submeshes=submeshes))
    return Arrangement(tuple(pipelines))
