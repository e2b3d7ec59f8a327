"""Of the plans that the solver came by on the way to a mesh's best one, the one that its compiler schedules best.

The objective is the best schedule that there is (`cost/exposure.py`). Where links are busy nearly all the time, a
compiler that runs each collective to its end hides less of it, and a plan that sends less is faster, although the
solver counts more for it.
"""

import dataclasses
from collections.abc import Sequence

from autoshard.garbage import collection_paused
from autoshard.planner.decode import evaluate
from autoshard.planner.timeline import asked_for_by
from autoshard.plans.as_scheduled import as_scheduled
from autoshard.plans.found import WAITS, Found
from autoshard.plans.gaps import are_within
from autoshard.plans.known_plan import Made
from autoshard.solver.problem import Solution

MOST_OTHERS = 4
"""How many plans are scheduled at most."""


@collection_paused()
def best_scheduled(found: Found, others: Sequence[Made], relative_gap: float) -> Found:
    """The outcome of one mesh with the best of `others` as scheduled in the place of its best plan, if one is better.

    Args:
      found: The outcome. others: Plans of the same problem. relative_gap: From which on a plan is optimal.
    """
    if not others or not found.waits_longer:
        return found
    formulation, chosen = found.winner
    best, to_beat_s = found, found.step_s * (1 - WAITS)
    for other in others:
        if other.choices == chosen.choices:
            continue
        evaluation, capacity = evaluate(formulation, other.choices), formulation.problem.capacity
        if capacity is not None and evaluation.peak[0] > capacity:
            continue
        cost_s = asked_for_by(evaluation.reader).step_s
        certificate = as_scheduled(chosen.certificate, cost_s, relative_gap)
        made = dataclasses.replace(
            found, best=(formulation, Solution(other.choices, certificate)), evaluation=evaluation, fits=True
        )
        longer_s = max(made.cost_s - found.cost_s, 0.0)
        if made.step_s + longer_s >= to_beat_s:
            continue
        if capacity is None or are_within(evaluation.peak[0], evaluation.reserved_bytes, capacity):
            best, to_beat_s = made, made.step_s + longer_s
    if best is found:
        return found
    candidates = [dataclasses.replace(c, step_s=best.step_s) for c in best.candidates]
    return dataclasses.replace(best, candidates=tuple(candidates))
