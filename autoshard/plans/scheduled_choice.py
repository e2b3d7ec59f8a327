"""Of the plans that the solver came by on the way, the one that its compiler schedules best.

The objective is the best schedule that there is (`cost/exposure.py`). Where links are busy nearly all the time, a
compiler that runs each collective to its end hides less of it, and a plan that sends less is faster, although the
solver counts more for it.
"""

import dataclasses
import time

from autoshard.garbage import collection_paused
from autoshard.planner.decode import evaluate
from autoshard.planner.ties import settle_ties
from autoshard.planner.timeline import asked_for_by
from autoshard.plans.as_scheduled import as_scheduled
from autoshard.plans.found import Found
from autoshard.plans.gaps import are_within
from autoshard.plans.question import Question
from autoshard.solver.problem import Solution

WAITS = 0.02
"""A plan waits longer than the solver counts, if by more than this share of its step. Another is better if it is faster
by more than this and what the solver counts more for it: the model of a compiler's schedule is no more exact."""

MOST_OTHERS = 4
"""How many plans are scheduled at most."""

_FARTHEST = 0.05
"""By which share of its step the solver may count more for a plan than for its own best. What is expected of plans that
are farther away is off by more, and the best of many is one of which too much is expected: of GPT-3 175B on 1,024 H100
as data=256, tensor=4, one that is 10 % away was expected to take 1.92 s with 24 layers, and takes 2.48 by replay; with
six layers one that is 14 % away 528 and 579 ms, but one that is 1 % away, on data=512, tensor=2, 513 and 487."""

_SHARE_OF_TIME = 0.1
"""For which share of the time until then."""


def waits_longer(found: Found) -> bool:
    """Whether the best plan waits longer for collectives than the solver counts."""
    return found.best is not None and found.step_s - found.cost_s > WAITS * found.step_s


def most_cost_s(least_s: float) -> float:
    """The step as the solver counts it of the farthest plan that is taken, if its own best takes `least_s`."""
    return (1 + _FARTHEST) * least_s


@collection_paused()
def best_scheduled(question: Question, found: Found) -> Found:
    """The outcome with the best of `found.others` as scheduled in the place of the best plan, if one is better."""
    if not found.others or not found.is_done or not waits_longer(found):
        return found
    formulation, chosen = found.winner
    until_s = question.worthwhile_until_s(_SHARE_OF_TIME)
    best, to_beat_s = found, found.step_s * (1 - WAITS)
    for other in found.others:
        if time.perf_counter() >= until_s:
            break
        choices = settle_ties(formulation, other.choices)
        if choices == chosen.choices:
            continue
        evaluation, capacity = evaluate(formulation, choices), formulation.problem.capacity
        if capacity is not None and evaluation.peak[0] > capacity:
            continue
        cost_s = asked_for_by(evaluation.reader).step_s
        certificate = as_scheduled(chosen.certificate, cost_s, question.options.relative_gap)
        made = dataclasses.replace(
            found, best=(formulation, Solution(choices, certificate)), evaluation=evaluation, fits=True, others=()
        )
        longer_s = max(made.cost_s - found.cost_s, 0.0)
        if made.step_s + longer_s >= to_beat_s:
            continue
        if capacity is None or are_within(evaluation.peak[0], evaluation.reserved_bytes, capacity):
            best, to_beat_s = made, made.step_s + longer_s
    if best is found:
        return found
    own = str(formulation.mesh)
    candidates = [dataclasses.replace(c, step_s=best.step_s) if c.hardware == own else c for c in found.candidates]
    return dataclasses.replace(best, candidates=tuple(candidates))
