"""The best cut of the layers over given places, with a bound on how good any cut could be.

The cuts that are best by their bounds (`cut_bounds`) go through the simulator. Where there are few cuts, all are looked
at, in the order of their bounds, until no bound is below the best time: then the best is exact.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from autoshard.pipeline.schedule.orders import make_schedule
from autoshard.pipeline.search.arrangement import Arrangement, Stage
from autoshard.pipeline.search.cut_bounds import CLOSE, cut_bounds_s, good_cuts
from autoshard.pipeline.search.positions import Position, positions_of
from autoshard.pipeline.search.stage_memory import fits
from autoshard.pipeline.search.step_durations import stage_durations
from autoshard.pipeline.search.team import Scene, Team, arrangement_step_s

MOST_REPLICAS = 4
"""Of more equal replicas the simulator sees the first and the last."""
MOST_REMATS = 64
"""Where stages share places, ways to choose those computed again that are simulated; of more, one is."""


@dataclasses.dataclass(frozen=True, slots=True)
class CutEffort:
    """How long to look.

    Attributes:
      most_enumerated: Look at all cuts if there are no more than this.
      most_simulated: Cuts to run through the simulator at most.
    """

    most_enumerated: int = 20_000
    most_simulated: int = 1_000


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """A team's best cut.

    Attributes:
      arrangement: The team alone. stages: What each of its pipelines runs.
      step_s: Its step time. bound_s: No cut of this team is faster.
    """

    arrangement: Arrangement
    stages: tuple[Stage, ...]
    step_s: float
    bound_s: float


def bounded_cut(
    scene: Scene,
    team: Team,
    effort: CutEffort | None = None,
    suggestions: Sequence[Sequence[int]] = (),
    cutoff_s: float = math.inf,
) -> tuple[Cut | None, float]:
    """Cuts the layers over the places of a team.

    Args:
      scene: Costs, cluster, memory.
      team: The replicas and their places.
      effort: How long to look.
      suggestions: Other cuts to look at, as the first layer of each stage and the number of layers.
      cutoff_s: Only cuts that are faster are of interest.

    Returns:
      The best cut, None if no cut of interest fits the memory; and a bound for all cuts, inf if none fits.
    """
    effort = effort or CutEffort()
    num_layers, num_stages = scene.runs.layers.num_layers, team.num_stages
    if num_stages > num_layers:
        return None, math.inf
    num_cuts = math.comb(num_layers - 1, num_stages - 1)
    is_complete = num_cuts <= effort.most_enumerated
    positions = positions_of(scene, team, shares_memory=False)
    if is_complete:
        inner = itertools.combinations(range(1, num_layers), num_stages - 1)
        cuts = np.array([(0, *c, num_layers) for c in inner], dtype=int).reshape(num_cuts, num_stages + 1)
        bound_s = -math.inf
    else:
        found, bound_s = good_cuts(positions, team)
        if num_stages > len(team.places[0]):
            positions = positions_of(scene, team, shares_memory=True)
            found, _ = good_cuts(positions, team)
        cuts = np.array([*found, *suggestions], dtype=int).reshape(-1, num_stages + 1)
    bounds_s = cut_bounds_s(positions, team, cuts)
    order = [k for k in np.argsort(bounds_s, kind="stable") if np.isfinite(bounds_s[k])]
    best: Cut | None = None
    num_simulated, rest_s = 0, math.inf
    seen = set()
    for k in order:
        limit_s = cutoff_s if best is None else min(cutoff_s, best.step_s)
        if bounds_s[k] >= limit_s * (1 - CLOSE) or num_simulated >= effort.most_simulated:
            rest_s = float(bounds_s[k])
            break
        key = tuple(cuts[k])
        if key in seen:
            continue
        seen.add(key)
        num_simulated += 1
        for stages in with_remat(scene, team, positions, [int(c) for c in key]):
            arrangement = Arrangement(team.pipelines(stages))
            step_s = arrangement_step_s(scene, arrangement, MOST_REPLICAS)
            if best is None or step_s < best.step_s * (1 - CLOSE):
                best = Cut(arrangement, stages, step_s, 0.0)
    if is_complete:
        bound_s = rest_s
    if best is None:
        return None, bound_s
    bound_s = min(best.step_s, max(bound_s, 0.0))
    return dataclasses.replace(best, bound_s=bound_s), bound_s


def with_remat(scene: Scene, team: Team, positions: list[Position], cut: Sequence[int]) -> list[tuple[Stage, ...]]:
    """The stages of a cut, those computed again that must be: all ways to choose them where stages share places."""
    runs = list(itertools.pairwise(cut))
    num_places = len(team.places[0])
    if team.num_stages == num_places:
        again = [
            bool(p.needs_remat[i - s, j - s - 1]) for s, ((i, j), p) in enumerate(zip(runs, positions, strict=True))
        ]
        return [tuple(Stage(*r, a) for r, a in zip(runs, again, strict=True))]
    limits = tuple(scene.limits_bytes[place.slice] for place in team.places[0])
    schedule = make_schedule(team.schedule, num_places, team.num_stages, team.num_micro_batches[0])
    chosen: list[list[tuple[bool, ...]]] = [[] for _ in range(num_places)]
    for option in sorted(itertools.product((False, True), repeat=team.num_stages // num_places), key=sum):
        stages = tuple(Stage(*r, option[s // num_places]) for s, r in enumerate(runs))
        pipeline = team.pipelines(stages)[0]
        parts = tuple(stage_durations(scene.runs, pipeline, s, team.num_pipelines) for s in range(team.num_stages))
        for place, fit in enumerate(fits(schedule, parts, limits)):
            if fit and not any(all(o >= k for o, k in zip(option, kept, strict=True)) for kept in chosen[place]):
                chosen[place].append(option)
    if math.prod(len(c) for c in chosen) > MOST_REMATS:
        chosen = [c[:1] for c in chosen]
    return [
        tuple(Stage(*r, ways[s % num_places][s // num_places]) for s, r in enumerate(runs))
        for ways in itertools.product(*chosen)
    ]
