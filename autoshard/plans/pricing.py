"""Prices what kernels wait for: the best bound that prices prove, and the plans found on the way to it.

For all weights w of stretches in the set W (`overlap.py`) the optimum of the problem priced with w bounds the step of
every plan,

    bound(w) = min over plans x   least(x) + sum_I w_I waited_I(x),

with least(x) the step if all hides that can, and waited_I(x) what the schedule waits within stretch I at least. The
best bound is that of the problem convexified,

    max over w in W   bound(w)  =  min over mixtures of plans x   max over w in W   least + sum_I w_I waited_I .

It is sought by column generation (Dantzig and Wolfe, Decomposition principle for linear programs, 1960): each round
adds plans that are best at the last weights, and those of the best mixture of what each part of the known plans does
(`master_problem.py`) are the next. Only part of the way is gone, from the weights that bounded best so far: the method
alone swings from one extreme to another (Wentges, Weighted Dantzig-Wolfe decomposition, 1997). Rounds need plans that
are worth mixing, not plans that fit the memory: where layers are copies of one another, what message passing decodes is
enough, at the prices of memory that the mixture begins with. Plans that fit are made of the parts of all.
`as_scheduled.py` goes on from there.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from autoshard.cost.exposure import Stretch
from autoshard.planner.build import Formulation
from autoshard.planner.overlap import StretchWeights, first_weights
from autoshard.plans.master_problem import Made, MasterProblem, Mixture
from autoshard.solver.problem import Certificate, Solution

ROUNDS = 12
"""How many problems are solved at most."""

_KNOWN = ((1, 0.25), (2, 0.2))
"""What plans are like may be known after so many problems more, from one that is so close to the bound."""

_FIRST_SHARE, _LATER_SHARE = 0.5, 0.25
"""In which share of the time that is left a problem is solved as long as there is no bound, since without one nothing
tells what to price; and each of the others. Few take as long: what is found should not go by the clock."""

_FIRST_GAP, _GAP_SHARE = 0.02, 0.3
"""How exactly the first problem is solved, and each of the others, as a share of the gap that is left for the step; but
never more exactly than half of what is wanted, so that the other half is left to the weights."""

_UNSETTLED, _SETTLED = 0.6, 0.8
"""How much of the way to the weights of the best mixture is gone: more where the plans found last were known."""

_NEAR, _NEAR_ROUNDS = 0.3, 2
"""The same in so many first rounds that begin with the weights that bounded best on another mesh: these are near the
best, and a mixture of the few plans that are known by then tells little (with 0.6 GPT-3 took 1.6 times as long)."""

_SLIGHT = 0.02
"""Prices of memory below this share of the highest are left out: each instant that counts takes time."""

_SLIGHT_WEIGHT = 0.01
"""Weights below this are left out: each tells layers apart that are alike, and time goes with what differs."""

_LEAST_WHOLE = 0.05
"""The weight of the whole step at least, in shares of the gap wanted: so much counts of what hides, so that plans do
not send for nothing. It takes as much of the bound."""

_STALLED, _PATIENCE = 0.02, 3
"""Weights are good enough where so many rounds one after another move the best bound and the best mixture by less than
this share of what lies between the bound and the fastest plan."""

_MIXED, _MIXED_ROUNDS = 0.2, 3
"""What better weights can still gain is no more than what lies between the bound and the best mixture: where that is
less than this share of what lies between the bound and the fastest plan, only better plans help, which are made of
those that are known; asked after so many rounds. The plan that is made at the end is likely to be within the wanted gap
of the mixture, whatever is known by then."""

_MADE_GAP = 0.3
"""How far from the fastest plan that is made of known ones the one found may be, as a share of the gap wanted."""

_HARDLY = 5e-4
"""Where no faster plan could be made of the known ones, none is sought again before their mixture is faster by this
share."""


_Key = TypeVar("_Key")


class Series(Protocol):
    """Solves problems one after another, each within a share of the time that is left for all.

    Results have no choices if there are none, or none that can win.
    """

    def solve(
        self,
        formulation: Formulation,
        *,
        hint: Sequence[int] | None,
        relative_gap: float,
        share: float,
        is_bound_enough: bool = False,
        to_beat_s: float = math.inf,
        useful_s: float = -math.inf,
    ) -> Solution:
        """Solves a problem as it is priced, to a relative gap, or until a bound reaches `to_beat_s`; see
        `SolverOptions.is_bound_enough`, and `useful_bound` for what bounds are of use from `useful_s` on."""
        ...

    def price(self, prices: Mapping[int, float]) -> None:
        """Takes the prices of instants that the next problem begins with."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Timed:
    """A plan of a problem that fits, and the time of its step as scheduled."""

    formulation: Formulation
    choices: tuple[int, ...]
    step_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Priced:
    """What rounds of pricing have found.

    Attributes:
      formulation: The problem, priced with the weights that bounded best.
      prices: Of instants, with which it did.
      bound: The certificate of the best bound. found: The last solution.
      best: The fastest plan; None if none was found.
      master: All plans. mixture: The best of them; None if there are none.
      is_left: Whether it was left for another problem.
    """

    formulation: Formulation
    prices: Mapping[int, float]
    bound: Certificate
    found: Solution
    best: Timed | None
    master: MasterProblem
    mixture: Mixture | None
    is_left: bool = False


def priced(
    formulation: Formulation,
    hint: Sequence[int] | None,
    relative_gap: float,
    series: Series,
    master: MasterProblem,
    rounds: int = ROUNDS,
    *,
    to_beat_s: float = math.inf,
    is_settled: Callable[[Mixture], bool] = lambda _: False,
    is_left: Callable[[Timed, Mixture], bool] = lambda *_: False,
) -> Priced:
    """Prices a problem whose collectives can hide, solves it, prices what binds, and so on.

    Args:
      formulation: The problem. hint: Choices to begin with.
      relative_gap: From which gap to the bound on a solution is optimal.
      series: Solves problems. master: Plans of the problem that are known; takes those that are found.
      rounds: How many prices are tried at most.
      to_beat_s: The step of the fastest plan elsewhere; with a bound that reaches it, the problem is settled.
      is_settled: Whether a mixture of plans is enough to know; asked from the third round on, once it hardly falls.
      is_left: Whether the best plan and mixture so far tell that another problem is to be solved instead; asked when it
        may be known what plans are like, and once more when it is.
    """
    at = formulation
    centre = at.overlap.weights  # the weights that bounded best so far
    assert centre is not None, "nothing hides"
    fastest = master.fastest_known()
    best = None if fastest is None else Timed(at, fastest.choices, fastest.step_s)
    is_near = best is None and hint is None and centre != first_weights(master.times.num_operations)
    bound, bounded, price, mixture, before, prices = None, at, None, None, None, {}
    enough, gap, stalled, to_ask, is_made = 0.5 * relative_gap, _FIRST_GAP, 0, list(_KNOWN), False
    elsewhere_s, in_vain_s = to_beat_s, math.inf  # the mixture of which no faster plan could be made
    for n in range(rounds + 1):
        bound_s = -math.inf if bound is None else bound.bound
        is_bounded = math.isfinite(bound_s)
        share = _LATER_SHARE if is_bounded else _FIRST_SHARE
        start, gap = hint if best is None else best.choices, max(gap, enough)
        found = series.solve(
            at,
            hint=start,
            relative_gap=gap,
            share=share,
            is_bound_enough=True,
            to_beat_s=elsewhere_s,
            useful_s=bound_s,
        )
        if found.certificate.bound >= elsewhere_s < math.inf:  # no plan of this problem is of use
            bound, bounded, mixture = found.certificate, at, None
            break
        if n == 0 and hint is not None:  # all of the problem is priced to time a plan
            master.add(hint)
            fastest = master.fastest_known()
            best = None if fastest is None else Timed(at, fastest.choices, fastest.step_s)
        plans = () if found.choices is None else (found.choices,)
        plans = plans if found.relaxed is None else found.relaxed.choices
        is_new = any([master.add(plan) for plan in plans])
        mixture = master.mixture() if plans else None
        made, is_made = None, best is None or mixture is None or bool(to_ask)
        if mixture is not None:  # a plan may be enough
            is_made |= mixture.step_s * (1 - relative_gap) <= max(found.certificate.bound, bound_s)
        if is_made and (best is None or mixture is None or mixture.step_s <= in_vain_s * (1 - _HARDLY)):
            made = master.fastest(math.inf if best is None else best.step_s, _MADE_GAP * relative_gap)
            in_vain_s = mixture.step_s if made is None and mixture is not None else math.inf
        if best is None and made is None and found.relaxed is not None:  # memory is tight: it takes a search to fit it
            found = series.solve(at, hint=start, relative_gap=gap, share=share)
            is_new = found.choices is not None and master.add(found.choices)
            mixture = master.mixture() if is_new else mixture
        made = _faster(made, master.fastest_known(), best, _MADE_GAP * relative_gap)
        if made is not None:
            best = Timed(at, made.choices, made.step_s)
        if bound is None or found.certificate.bound > bound.bound:
            bound, bounded, centre = found.certificate, at, at.overlap.weights
            prices = {} if found.relaxed is None else found.relaxed.prices
        own = found.certificate.capacity_price  # some problems are solved without prices
        price = max((p for p in (price, own) if p is not None), key=lambda p: p.bound, default=None)
        if mixture is None or best is None:
            mixture = None
            break
        to_beat_s = min(to_beat_s, best.step_s)
        enough_s = bound.bound + relative_gap * to_beat_s
        if n == rounds or to_beat_s <= enough_s or mixture.step_s <= enough_s - 0.5 * relative_gap * to_beat_s:
            break
        now = mixture.step_s, bound.bound
        moved_s = math.inf if before is None else sum(abs(a - b) for a, b in zip(now, before, strict=True))
        has_moved = not math.isfinite(bound.bound) or moved_s >= _STALLED * (to_beat_s - bound.bound)
        stalled = 0 if has_moved else stalled + 1
        likely_s = min(to_beat_s, mixture.step_s * (1 + relative_gap))
        is_mixed = n >= _MIXED_ROUNDS and mixture.step_s - bound.bound <= _MIXED * (likely_s - bound.bound)
        falls = before is None or before[0] - mixture.step_s >= _STALLED * (to_beat_s - bound.bound)
        if n > 1 and (is_mixed or stalled == _PATIENCE or not falls and is_settled(mixture)):
            break
        if to_ask and n >= to_ask[0][0] and bound.bound >= (1 - to_ask[0][1]) * best.step_s:
            to_ask.pop(0)
            if is_left(best, mixture):
                return Priced(bounded, prices, bound, found, best, master, mixture, True)
        before = now
        gap = _GAP_SHARE * max(1 - bound.bound / to_beat_s, 0.0) if math.isfinite(bound.bound) else _FIRST_GAP
        way = _UNSETTLED if is_new else _SETTLED
        if is_near and n < _NEAR_ROUNDS:
            way = _NEAR
        following = _between(prices, mixture.prices, way)
        highest = max(following.values(), default=0.0)
        series.price({instant: p for instant, p in following.items() if p >= _SLIGHT * highest})
        assert centre is not None, "nothing hides"
        following = _between(_by_stretch(centre), _by_stretch(mixture.weights), way)
        at = master.times.priced(at, _even(following, (0, master.times.num_operations), _LEAST_WHOLE * relative_gap))
    assert bound is not None, rounds
    if mixture is not None and best is not None and not is_made and bound.bound < (1 - relative_gap) * best.step_s:
        made = master.fastest(best.step_s, _MADE_GAP * relative_gap)
        best = best if made is None else Timed(at, made.choices, made.step_s)
    bound = dataclasses.replace(bound, capacity_price=price)
    return Priced(bounded, prices, bound, found, best, master, mixture)


def _faster(made: Made | None, known: Made | None, best: Timed | None, least_gain: float) -> Made | None:
    """The faster of a plan that was made of known ones and of one that was solved for, which may be faster than any
    that is made of others; that one counts only if it is worth it. None if there is none.

    Args:
      best: The fastest before. least_gain: The share of its step that a known plan saves at least.
    """
    if known is None or best is not None and known.step_s > best.step_s * (1 - least_gain):
        return made
    return known if made is None or known.step_s < made.step_s else made


def _even(weights: Mapping[Stretch, float], whole: Stretch, least: float) -> StretchWeights:
    """Weights without the slight ones, and with at least a little for the whole step."""
    kept = {stretch: (1 - least) * w for stretch, w in weights.items() if w >= _SLIGHT_WEIGHT}
    kept[whole] = (1 - least) * weights.get(whole, 0.0) + least
    return StretchWeights(tuple((w, stretch) for stretch, w in kept.items()))


def _by_stretch(weights: StretchWeights) -> dict[Stretch, float]:
    return {stretch: w for w, stretch in weights.stretches}


def _between(one: Mapping[_Key, float], other: Mapping[_Key, float], share: float) -> dict[_Key, float]:
    """Amounts on the way from one to the other, `share` of it; what is missing is 0."""
    found: dict[_Key, float] = {}
    for amounts, part in ((one, 1 - share), (other, share)):
        for key, amount in amounts.items():
            found[key] = found.get(key, 0.0) + part * amount
    return found
