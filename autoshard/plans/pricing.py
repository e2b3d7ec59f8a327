"""The best plan for a step whose collectives hide behind kernels: a problem is solved, what binds is priced, and again.

What is exposed of a plan's collectives is no sum over its choices, but a maximum of sums, one for each set of disjoint
stretches of kernels (`cost/exposure.py`). Weights of stretches make a problem that the solver takes, and whose bound
holds for the step as scheduled (`planner/overlap.py`). The best weights are those of

    max over weights w   min over plans x   least(x) + sum_I w_I waited_I(x)

which is sought with the plans and stretches known so far, each round adding a plan that is best at the last weights,
and the stretches that bind in it (Kelley, The cutting-plane method for solving convex programs, 1960). Only part of the
way is gone, from the weights that bounded best so far: the method alone swings from one extreme to another. At first a
small weight of the whole step keeps plans from sending for nothing; it goes once it is what the bound lacks. As long as
the fastest plan and the bound are far apart because of the weights, a problem is solved no more exactly than tells
where to go next. `as_scheduled.py` goes on from there.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import linprog

from autoshard.cost.exposure import Stretch
from autoshard.planner.build import Formulation, repriced
from autoshard.planner.overlap import StretchWeights
from autoshard.planner.timeline import asked_for
from autoshard.plans.primal_recovery import Known, Mixture, Series, Timed
from autoshard.solver.problem import Certificate, Solution

ROUNDS = 8
"""How many problems are solved at most."""

_FIRST_SHARE, _LATER_SHARE = 0.5, 0.5
"""In which share of the time that is left the first problem is solved, since without a solution there is no other; and
all others together."""

_FIRST_GAP, _GAP_SHARE = 0.02, 0.3
"""How exactly the first problem is solved, and each of the others, as a share of the gap that is left for the step; but
never more exactly than half of what is wanted, so that the other half is left to the weights."""

_UNSETTLED, _SETTLED = 0.5, 0.9
"""How much of the way to the best weights for the plans known so far is gone: more where the same set binds again."""

_STALLED = 0.02
"""Weights are good enough where a round moves their bound and the best mixture by less than this share of what lies
between the bound and the fastest plan."""

_WORTH_A_BYTE = 0.02
"""The weight of the whole step in the first rounds: what hides is not quite free, so that a plan does not send for
nothing. A choice of the search: bounds hold for all weights, and come out at most so much lower."""

_LOST = 0.5
"""Once that weight costs this share, or more, of what lies between the bound and the fastest plan, it is left out."""


@dataclasses.dataclass(frozen=True, slots=True)
class Priced:
    """What rounds of pricing have found.

    Attributes:
      formulation: The problem, priced with the weights that bounded best.
      bound: The certificate of the best bound. found: The last solution.
      best: The fastest plan; None if none was found. known: All plans.
      mixture: The best of the known plans; None if there are none.
    """

    formulation: Formulation
    bound: Certificate
    found: Solution
    best: Timed | None
    known: tuple[Known, ...]
    mixture: Mixture | None


def priced(
    formulation: Formulation,
    hint: Sequence[int] | None,
    relative_gap: float,
    series: Series,
    rounds: int = ROUNDS,
    *,
    known: Sequence[Known] = (),
    to_beat_s: float = math.inf,
    is_settled: Callable[[Mixture], bool] = lambda _: False,
) -> Priced:
    """Prices a problem whose collectives can hide, solves it, prices what binds, and so on.

    Args:
      formulation: The problem. hint: Choices to begin with.
      relative_gap: From which gap to the bound on a solution is optimal.
      series: Solves problems. rounds: How many prices are tried at most.
      known: Plans of the problem that are known. to_beat_s: The step of the fastest plan elsewhere.
      is_settled: Whether a mixture of plans is enough to know; asked from the third round on.
    """
    at = formulation
    centre = at.overlap.weights  # the weights that bounded best so far
    assert centre is not None, "nothing hides"
    bound, bounded, price, best, mixture = None, at, None, None, None
    end = len(at.program.graph.operations)
    whole = StretchWeights(((1.0, (0, end)),))
    plans = list(known)
    before, bound_stretches = None, None
    stretches = [stretch for _, stretch in (*centre.stretches, *whole.stretches)]
    stretches = list(dict.fromkeys([*stretches, *(s for plan in plans for s in plan.times.stretches)]))
    weights, enough, gap, is_free = centre, 0.5 * relative_gap, _FIRST_GAP, False
    for n in range(rounds + 1):
        share = _LATER_SHARE / max(rounds - n, 1) if n or plans else _FIRST_SHARE
        found = series.solve(at, hint=hint, relative_gap=max(gap, enough), share=share)
        if bound is None or found.certificate.bound > bound.bound:
            bound, bounded, centre = found.certificate, at, weights
        own = found.certificate.capacity_price  # some problems are solved without prices
        price = max((p for p in (price, own) if p is not None), key=lambda p: p.bound, default=None)
        if found.choices is None:
            break
        is_new = found.choices != hint
        hint = found.choices
        times = asked_for(at, found.chosen)
        # a plan to which hiding was free may send for nothing: it must be faster by what counts
        if best is None or times.step_s < best.step_s * (1 - relative_gap if is_free else 1):
            best = Timed(at, found, times.step_s)
            to_beat_s = min(to_beat_s, best.step_s)
        is_bound_again = times.stretches == bound_stretches
        bound_stretches = times.stretches
        plans.append(Known(found.choices, times))
        stretches = list(dict.fromkeys([*stretches, *times.stretches]))
        mixture = _best_mixture(plans, stretches)
        gap = _GAP_SHARE * max(1 - bound.bound / to_beat_s, 0.0) if is_new else _GAP_SHARE * gap
        enough_s = bound.bound + relative_gap * to_beat_s
        if n == rounds or to_beat_s <= enough_s or mixture.step_s <= enough_s:
            break
        now = mixture.step_s, bound.bound
        moved_s = math.inf if before is None else sum(abs(a - b) for a, b in zip(now, before, strict=True))
        is_stalled = math.isfinite(bound.bound) and moved_s < _STALLED * (to_beat_s - bound.bound)
        is_costly = -_WORTH_A_BYTE * float(times.waited_s([(0, end)])[0]) >= _LOST * (to_beat_s - bound.bound)
        is_over = n + 1 == rounds or (n > 1 and (is_stalled or is_settled(mixture)))
        if is_over and (is_free or not is_costly):
            break
        before, is_free = now, is_costly
        weights = _between(centre, mixture.weights, _SETTLED if is_bound_again or is_free else _UNSETTLED)
        at = repriced(at, weights if is_free else _between(weights, whole, _WORTH_A_BYTE))
    assert bound is not None, rounds
    bound = dataclasses.replace(bound, capacity_price=price)
    return Priced(bounded, bound, found, best, tuple(plans), mixture)


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
    return Mixture(tuple(plans), tuple((shares / shares.sum()).tolist()), weights, -float(found.fun * scale_s))


def _between(one: StretchWeights, other: StretchWeights, share: float) -> StretchWeights:
    """Weights on the way from one to the other, `share` of it."""
    found: dict[Stretch, float] = {}
    for weights, part in ((one, 1 - share), (other, share)):
        for w, stretch in weights.stretches:
            found[stretch] = found.get(stretch, 0.0) + part * w
    return StretchWeights(tuple((w, stretch) for stretch, w in found.items()))
