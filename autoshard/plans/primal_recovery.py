"""A plan that does in each layer what suits the weights of stretches as a whole, where all that is known is extreme.

Layers that are copies of one another all choose alike at given weights: at one weight all send more than hides, at
another hardly any of them sends, and the plan wanted lies between, some layers doing this and some that. At the best
weights of `pricing.py` several plans cost the same, and the linear program that they solve has as its dual the shares
lambda_k of these plans in a mixture, whose step is what the weights bound:

    sum_k lambda_k least(x_k) + what it waits,   waiting sum_k lambda_k waited_I(x_k) within a stretch I

No plan is a mixture, but some come close: those in which some layers do as one plan of it and the others as another
(`relinking.py`); and those that wait no more than it does within the stretches that count, and otherwise take least
time. These are asked for with limits on waiting (`planner/hidden.py`), and found by what the solver does for memory,
where each node chooses among what the plans of the mixture choose. (Primal recovery for Lagrangian relaxation;
Geoffrion, Lagrangean relaxation for integer programming, 1974.)
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from autoshard.cost.exposure import Stretch
from autoshard.planner.build import Formulation, repriced
from autoshard.planner.hidden import hidden
from autoshard.planner.overlap import StretchWeights
from autoshard.planner.timeline import Timeline, asked_for
from autoshard.plans.relinking import relinked
from autoshard.solver.among import among
from autoshard.solver.problem import Problem, Solution

_WHOLE = 0.99
"""A plan with this share is the mixture."""

_RELINKED = 3
"""Of so many plans of a mixture, those with the largest shares, every two are relinked."""

_ROUNDS = 2
"""How many problems with limits are solved at most, each with the stretches that bind in the plan found last."""

_WAITED = 0.2
"""What kernels may wait more than in the mixture, as a share of the gap that is wanted."""

_LIKE = 0.5
"""A plan is like the mixture if it takes no more than this share of the gap that is wanted longer."""

_GAP, _SHARE = 5e-3, 0.125
"""How exactly each problem is solved, and in which share of the time that is left."""


class Series(Protocol):
    """Solves problems one after another, each within a share of the time that is left for all.

    Results have no choices if there are none, or none that can win.
    """

    def solve(
        self, formulation: Formulation, *, hint: Sequence[int] | None, relative_gap: float, share: float
    ) -> Solution:
        """Solves a problem as it is priced, to a relative gap."""
        ...

    def solve_part(self, problem: Problem, *, relative_gap: float, share: float) -> Solution:
        """Solves a problem whose bound says nothing of others, to a relative gap."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Timed:
    """A solution of a problem as priced, and the time of its step as scheduled."""

    formulation: Formulation
    solution: Solution
    step_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """A solution of the problem, and what it takes."""

    choices: tuple[int, ...]
    times: Timeline


@dataclasses.dataclass(frozen=True, slots=True)
class Mixture:
    """The mixture of plans that takes least time.

    Attributes:
      plans: That are known. shares: Of each plan, >= 0 and with the sum 1.
      weights: Of stretches, at which no plan known takes less than the mixture.
      step_s: What it takes.
    """

    plans: tuple[Known, ...]
    shares: tuple[float, ...]
    weights: StretchWeights
    step_s: float

    def waited_s(self, stretches: Sequence[Stretch]) -> list[float]:
        """What the mixture waits within each of some stretches."""
        return (np.array(self.shares) @ [plan.times.waited_s(stretches) for plan in self.plans]).tolist()

    @property
    def mixed(self) -> list[Known]:
        """The plans that have a share, the largest first."""
        shared = [pair for pair in zip(self.shares, self.plans, strict=True) if pair[0] > 0]
        return [plan for _, plan in sorted(shared, key=lambda pair: -pair[0])]


def fastest_like(
    mixture: Mixture, formulation: Formulation, best: Timed, bound_s: float, relative_gap: float, series: Series
) -> Timed:
    """The fastest of `best` and of plans that are made of those of a mixture.

    Args:
      mixture: Of plans. formulation: The problem, at any prices.
      best: The fastest plan so far. bound_s: What no plan is faster than.
      relative_gap: Nothing is sought for a plan with at most this gap.
      series: Solves problems.
    """
    is_enough = lambda: best.step_s * (1 - relative_gap) <= bound_s
    is_like = lambda: best.step_s * (1 - _LIKE * relative_gap) <= mixture.step_s
    if is_enough() or max(mixture.shares) >= _WHOLE:
        return best
    at = repriced(formulation, StretchWeights(()))
    for one, other in itertools.permutations(mixture.mixed[:_RELINKED], 2):
        way = relinked(at, one.choices, other.choices)
        if way is not None and way.step_s < best.step_s:
            best = Timed(at, dataclasses.replace(best.solution, choices=way.choices), way.step_s)
        if is_enough() or is_like():
            return best
    stretches = [stretch for _, stretch in mixture.weights.stretches]
    for _ in range(_ROUNDS if stretches else 0):
        more_s = _WAITED * relative_gap * best.step_s
        limits_s = [max(waited_s, 0.0) + more_s for waited_s in mixture.waited_s(stretches)]
        limited = hidden(at, dict(zip(stretches, limits_s, strict=True)))
        if limited is None:
            break
        part = among(limited, [plan.choices for plan in mixture.mixed])
        found = series.solve_part(part.problem, relative_gap=max(relative_gap, _GAP), share=_SHARE)
        if found.choices is None:
            break
        choices = part.whole(found.choices)
        times = asked_for(at, choices)
        if times.step_s < best.step_s:
            best = Timed(at, Solution(choices, found.certificate), times.step_s)
        if is_enough():
            break
        stretches = list(dict.fromkeys([*stretches, *times.stretches]))
    return best
