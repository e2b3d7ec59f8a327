"""The best plan for a step whose collectives hide behind kernels: a problem is solved, what binds is priced, and again.

What is exposed of a plan's collectives is no sum over its choices, but a maximum of sums, one for each set of disjoint
stretches of kernels (`cost/exposure.py`). Weights of stretches make a problem that the solver takes, and whose bound
holds for the step as scheduled (`planner/overlap.py`). The best weights are those of

    max over weights w   min over plans x   least(x) + sum_I w_I waited_I(x)

which is sought with the plans and stretches known so far, each round adding a plan that is best at the last weights,
and the stretches that bind in it (Kelley, The cutting-plane method for solving convex programs, 1960). Only part of the
way is gone, from the weights that bounded best so far: the method alone swings from one extreme to another. The plan
taken is the fastest of all rounds, or one that is then made of what they found (`primal_recovery.py`); the bound is the
best. As long as the two are far apart because of the weights, a problem is solved no more exactly than tells where to
go next.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog

from autoshard.cost.exposure import Stretch
from autoshard.planner.build import Formulation, repriced
from autoshard.planner.overlap import StretchWeights
from autoshard.planner.timeline import asked_for
from autoshard.plans.primal_recovery import Known, Mixture, Series, Timed, fastest_like
from autoshard.solver.problem import Certificate, Solution, Status

ROUNDS = 8
"""How many problems are solved at most."""

_FIRST_SHARE = 0.5
"""In which share of the time the first problem is solved: without a solution there is no other."""

_FIRST_GAP, _GAP_SHARE = 0.02, 0.3
"""How exactly the first problem is solved, and each of the others, as a share of the gap that is left for the step; but
never more exactly than half of what is wanted, so that the other half is left to the weights."""

_UNSETTLED, _SETTLED = 0.5, 0.9
"""How much of the way to the best weights for the plans known so far is gone: more where the same set binds again."""

_WORTH_A_BYTE = 0.02
"""The weight of the whole step in every round: what hides is not quite free, so that a plan does not send for nothing.
A choice of the search: bounds hold for all weights, and come out at most so much lower."""


def solved_as_scheduled(
    formulation: Formulation, hint: Sequence[int] | None, relative_gap: float, series: Series, rounds: int = ROUNDS
) -> tuple[Formulation, Solution]:
    """The best solution of a problem as scheduled, and the problem with the prices at which it was found.

    Args:
      formulation: The problem. hint: Choices to begin with.
      relative_gap: From which gap to the bound on a solution is optimal.
      series: Solves problems. rounds: How many prices are tried at most.
    """
    at, centre = formulation, formulation.overlap.weights  # the weights that bound best so far
    if centre is None:
        return at, series.solve(at, hint=hint, relative_gap=relative_gap, share=1.0)
    best, bound, mixture = None, None, None
    whole = StretchWeights(((1.0, (0, len(at.program.graph.operations))),))
    known: list[Known] = []
    stretches = [stretch for _, stretch in (*centre.stretches, *whole.stretches)]
    weights, enough, gap = centre, 0.5 * relative_gap, _FIRST_GAP
    for n in range(rounds):
        found = series.solve(
            at, hint=hint, relative_gap=max(gap, enough), share=1 / (rounds - n) if n else _FIRST_SHARE
        )
        if bound is None or found.certificate.bound > bound.bound:
            bound, centre = found.certificate, weights
        if found.choices is None:
            break
        is_new = found.choices != hint
        hint = found.choices
        times = asked_for(at, found.chosen)
        if best is None or times.step_s < best.step_s:
            best = Timed(at, found, times.step_s)
        is_settled = bool(known) and times.stretches == known[-1].times.stretches
        known.append(Known(found.choices, times))
        stretches = list(dict.fromkeys([*stretches, *times.stretches]))
        mixture = _best_mixture(known, stretches)
        gap = _GAP_SHARE * (1 - bound.bound / best.step_s if is_new else gap)
        enough_s = bound.bound + relative_gap * best.step_s
        if n + 1 == rounds or best.step_s <= enough_s or mixture.step_s <= enough_s:
            break
        weights = _between(centre, mixture.weights, _SETTLED if is_settled else _UNSETTLED)
        at = repriced(at, _between(weights, whole, _WORTH_A_BYTE))
    if best is None or bound is None or mixture is None:  # the first problem has no solution
        return at, found
    best = fastest_like(mixture, at, best, bound.bound, relative_gap, series)
    certificate = as_scheduled(bound, best.step_s, relative_gap)
    return best.formulation, Solution(best.solution.choices, certificate)


def as_scheduled(certificate: Certificate, step_s: float, relative_gap: float) -> Certificate:
    """A certificate of a problem as priced, for a plan whose step takes `step_s` as scheduled."""
    gap = max(step_s - certificate.bound, 0.0) / step_s if step_s else 0.0
    status = Status.OPTIMAL if gap <= relative_gap else Status.FEASIBLE
    return dataclasses.replace(certificate, status=status, objective=step_s, gap=gap)


def _best_mixture(plans: Sequence[Known], stretches: Sequence[Stretch]) -> Mixture:
    """The mixture of plans that takes least, and the weights of stretches that prove it."""
    waited_s = np.array([plan.times.waited_s(stretches) for plan in plans])
    least_s = np.array([plan.times.least_s for plan in plans])
    scale_s = max(np.abs(waited_s).max(), least_s.max()) or 1.0
    starts, stops = np.array(stretches).T
    ends = np.unique(starts)  # where stretches overlap most, one begins
    together = (starts <= ends[:, None]) & (ends[:, None] < stops)
    # max v over w >= 0, such that least + waited w >= v for every plan, and at most 1 of w at any operation
    found = linprog(
        np.array([*[0.0] * len(stretches), -1.0]),
        A_ub=np.block([[-waited_s / scale_s, np.ones((len(plans), 1))], [together, np.zeros((len(ends), 1))]]),
        b_ub=np.concatenate([least_s / scale_s, np.ones(len(ends))]),
        bounds=[(0, None)] * len(stretches) + [(None, None)],
    )
    shares = np.clip(-found.ineqlin.marginals[: len(plans)], 0.0, None)
    w = np.clip(found.x[:-1], 0.0, None)
    w /= max(1.0, (together @ w).max())  # rounding
    weights = StretchWeights(tuple(pair for pair in zip(w.tolist(), stretches, strict=True) if pair[0] > 0))
    return Mixture(tuple(plans), tuple((shares / shares.sum()).tolist()), weights, -found.fun * scale_s)


def _between(one: StretchWeights, other: StretchWeights, share: float) -> StretchWeights:
    """Weights on the way from one to the other, `share` of it."""
    found: dict[Stretch, float] = {}
    for weights, part in ((one, 1 - share), (other, share)):
        for w, stretch in weights.stretches:
            found[stretch] = found.get(stretch, 0.0) + part * w
    return StretchWeights(tuple((w, stretch) for stretch, w in found.items()))
