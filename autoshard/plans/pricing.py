"""The best plan for a step whose collectives hide behind kernels: a problem is solved, what binds is priced, and again.

What is exposed of a plan's collectives is no sum over its choices, but a maximum of sums, one for each set of stretches
of kernels (`cost/exposure.py`). Weights of such sets make a problem that the solver takes, and whose bound holds for
the step as scheduled (`planner/overlap.py`). The best weights are those of

    max over weights theta   min over plans x   sum_s theta_s step_s(x)

which is sought with the plans and sets known so far, each round adding a plan that is best at the last weights, and
the set that binds in it (Kelley, The cutting-plane method for solving convex programs, 1960). Only part of the way is
gone, from the weights that bounded best so far: the method alone swings from one extreme to another. The plan taken is
the fastest of all rounds, the bound the best.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from scipy.optimize import linprog

from autoshard.cost.exposure import Stretch
from autoshard.planner.build import Formulation, repriced
from autoshard.planner.overlap import StretchWeights
from autoshard.planner.timeline import Timeline, asked_for
from autoshard.solver.problem import Certificate, Solution, Status

_ROUNDS = 6
"""How many problems are solved at most."""

_UNSETTLED, _SETTLED = 0.5, 0.9
"""How much of the way to the best weights for the plans known so far is gone: more where the same set binds again."""

_WORTH_A_BYTE = 0.02
"""The weight of the whole step in every round: what hides is not quite free, so that a plan does not send for nothing.
A choice of the search: bounds hold for all weights, and come out at most so much lower."""


class Solve(Protocol):
    """Solves a problem as it is priced. Its result has no choices if there are none, or none that can win."""

    def __call__(self, formulation: Formulation, *, hint: Sequence[int] | None) -> Solution: ...


def solved_as_scheduled(
    formulation: Formulation, hint: Sequence[int] | None, relative_gap: float, solve: Solve
) -> tuple[Formulation, Solution]:
    """The best solution of a problem as scheduled, and the problem with the prices at which it was found.

    Args:
      formulation: The problem. hint: Choices to begin with.
      relative_gap: From which gap to the bound on a solution is optimal.
      solve: Solves a problem as it is priced.
    """
    at, found = formulation, solve(formulation, hint=hint)
    if at.overlap.weights is None or found.choices is None:
        return at, found
    best, best_s, bound = (at, found), math.inf, found.certificate
    centre = at.overlap.weights  # the weights that bound best so far
    whole = StretchWeights(((1.0, ((0, len(at.program.graph.operations)),)),))
    known: list[Timeline] = []
    sets = [stretches for _, stretches in at.overlap.weights.sets]
    for n in range(_ROUNDS):
        known.append(asked_for(at, found.chosen))
        if known[-1].step_s < best_s:
            best, best_s = (at, found), known[-1].step_s
        binding = known[-1].stretches
        sets = list(dict.fromkeys([*sets, binding, *((s,) for s in binding)]))
        weights, most_s = _weights(known, sets)
        enough_s = bound.bound + relative_gap * best_s
        if n + 1 == _ROUNDS or best_s <= enough_s or most_s <= enough_s:
            break
        is_settled = n > 0 and binding == known[-2].stretches
        weights = _between(centre, weights, _SETTLED if is_settled else _UNSETTLED)
        at = repriced(at, _between(weights, whole, _WORTH_A_BYTE))
        found = solve(at, hint=found.choices)
        if found.certificate.bound > bound.bound:
            bound, centre = found.certificate, weights
        if found.choices is None:
            break
    return best[0], Solution(best[1].choices, as_scheduled(bound, best_s, relative_gap))


def as_scheduled(certificate: Certificate, step_s: float, relative_gap: float) -> Certificate:
    """A certificate of a problem as priced, for a plan whose step takes `step_s` as scheduled."""
    gap = max(step_s - certificate.bound, 0.0) / step_s if step_s else 0.0
    status = Status.OPTIMAL if gap <= relative_gap else Status.FEASIBLE
    return dataclasses.replace(certificate, status=status, objective=step_s, gap=gap)


def _weights(plans: Sequence[Timeline], sets: Sequence[tuple[Stretch, ...]]) -> tuple[StretchWeights, float]:
    """The weights that bound the plans known so far best, and that bound, which no weights of these sets exceed."""
    steps_s = np.array([[plan.at_least(stretches) for stretches in sets] for plan in plans])
    scale_s = steps_s.max() or 1.0
    # max v over theta >= 0 with sum 1, such that steps theta >= v for every plan
    found = linprog(
        np.array([*[0.0] * len(sets), -1.0]),
        A_ub=np.hstack([-steps_s / scale_s, np.ones((len(plans), 1))]),
        b_ub=np.zeros(len(plans)),
        A_eq=np.array([[*[1.0] * len(sets), 0.0]]),
        b_eq=np.ones(1),
        bounds=[(0, None)] * len(sets) + [(None, None)],
    )
    theta = np.clip(found.x[:-1], 0.0, None)
    pairs = zip((theta / theta.sum()).tolist(), sets, strict=True)
    return StretchWeights(tuple((w, s) for w, s in pairs if w > 0)), -found.fun * scale_s


def _between(one: StretchWeights, other: StretchWeights, share: float) -> StretchWeights:
    """Weights on the way from one to the other, `share` of it."""
    shares = {s: 0.0 for w in (one, other) for _, s in w.sets}
    for weights, part in ((one, 1 - share), (other, share)):
        for w, s in weights.sets:
            shares[s] += part * w
    return StretchWeights(tuple((w, s) for s, w in shares.items()))
