"""The best plan for a step whose collectives hide: rounds of pricing, in branches where one decision ties the layers.

Prices bound a mixture of plans (`pricing.py`). Where some layers may do as one plan of it and some as another, a plan
comes close to the mixture (`master_problem.py`). But some decisions hold for all layers at once, such as the layout of
what a loop carries; plans that differ there cannot be mixed, and the bound of their mixture is below what any plan can
reach. Then the problem is cut in two, one in which that decision is as in the fastest plan and one in which it is not,
and each is priced by itself (branch and bound; Land and Doig, An automatic method of solving discrete programming
problems, 1960). Most branches cannot win, as their first bound tells.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from autoshard.garbage import collection_paused
from autoshard.planner.build import Formulation, branched
from autoshard.planner.overlap import StretchWeights
from autoshard.planner.step_times import StepTimes
from autoshard.planner.ties import settle_ties
from autoshard.plans.known_plan import Made
from autoshard.plans.master_problem import MasterProblem, Mixture, tying_decision
from autoshard.plans.pricing import ROUNDS, Priced, Series, Timed, priced
from autoshard.solver.options import ROUNDING
from autoshard.solver.problem import Certificate, Solution, Status

_BRANCHINGS = 4
"""How often a problem is cut in two at most."""

_BRANCH_ROUNDS = 6
"""How many prices are tried at most in each branch."""

_WORTH_BRANCHING, _LITTLE = 0.2, 0.02
"""Where what is left to the best plan is little, no more than this share of its step, a problem is cut in two only if
that may raise the bound by a fifth of it. Else branches are also where better plans are found."""

_NEARLY_ALL, _TELLS = 0.97, 0.01
"""Gaps between buffers are looked at before a plan is improved if it has this share of the capacity alive at once, and
takes less than the best mixture and this share of it: those of another plan tell little of what is made."""

_PRICED_IN_LINE, _IN_LINE_GAP = 0.1, 0.01
"""Which share of what kernels wait in line for is priced where a problem is solved once more, and how exactly: layers
that are alike do all the same then, and soon too much. Of GPT-3 175B with 24 layers on data=128, tensor=8 the plan
found so takes 2.052 s as scheduled with 0.1, 2.115 with a quarter, 2.160 with a half (a script that is not kept)."""

_GAPS_GROW = 1.25
"""How much larger what a plan needs beyond what the solver counts may be than in the plan that is taken so far."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scheduled:
    """The best solution of a problem as scheduled.

    Attributes:
      formulation: The problem in whose branch, and at whose prices, it was found.
      solution: Has no choices if none was found.
      plans: All that are known; None where nothing hides.
      weights: Those that bound best; None where nothing hides.
      prices: Of instants, with which they do.
      is_left: Whether it was left for another problem.
    """

    formulation: Formulation
    solution: Solution
    plans: MasterProblem | None
    weights: StretchWeights | None
    prices: Mapping[int, float] = dataclasses.field(default_factory=dict)
    is_left: bool = False

    def others(
        self, count: int, most_s: float, chosen: Sequence[int], reserved_bytes: float, series: Series
    ) -> list[Made]:
        """So many other plans at most, whose steps take `most_s` at most, that a compiler may schedule better.

        Those come first of which kernels wait less in line (`InLine`), made of the known plans and of one more, which
        is best where some of that is priced.

        Args:
          count, most_s: See above.
          chosen: The plan that is taken so far. reserved_bytes: What it needs, gaps between buffers included.
          series: Solves the problem once more.
        """
        if self.plans is None or self.weights is None:
            return []
        budget_bytes = self.plans.budget_bytes
        if budget_bytes is not None:
            budget_bytes -= _GAPS_GROW * max(reserved_bytes - self.plans.peak_bytes(chosen), 0.0)
        plans, unbranched = self.plans.with_budget(budget_bytes), dataclasses.replace(self.formulation, branch={})
        plans.add(chosen)
        at = plans.times.priced(unbranched, self.weights, plans.in_line(chosen, _PRICED_IN_LINE))
        at = dataclasses.replace(at, problem=dataclasses.replace(at.problem, capacity=budget_bytes))
        series.price(self.prices)
        solved = series.solve(at, hint=chosen, relative_gap=_IN_LINE_GAP, share=1.0)
        if solved.choices is not None:
            plans.add(solved.choices)
        made = plans.less_in_line(chosen, most_s)
        made = (*made, *plans.promising(max(count - len(made), 0), most_s, than=chosen))
        return [_settled(plans, self.formulation, one) for one in made]


@collection_paused()
def solved_as_scheduled(
    formulation: Formulation,
    hint: Sequence[int] | None,
    relative_gap: float,
    series: Series,
    rounds: int = ROUNDS,
    to_beat_s: float = math.inf,
    is_left: Callable[[Timed, Mixture], bool] = lambda *_: False,
    limit_bytes: Callable[[Timed], float] | None = None,
    branches: bool = True,
) -> Scheduled:
    """The best solution of a problem, by the time of its step as scheduled.

    Args:
      formulation: The problem. hint: Choices to begin with.
      relative_gap: From which gap to the bound on a solution is optimal.
      series: Solves problems. rounds: How many prices are tried at most before the first branching.
      to_beat_s: The step of the fastest plan elsewhere; where a bound comes within the gap of it, none is sought.
      is_left: Whether a plan and a mixture tell that another problem is to be solved instead; then what is known so far
        is returned.
      limit_bytes: How much a plan like this one may have alive at once for its gaps to fit; None: the capacity.
      branches: Whether to branch.
    """
    if formulation.overlap.weights is None:
        found = series.solve(formulation, hint=hint, relative_gap=relative_gap, share=1.0)
        return Scheduled(formulation, with_ties_settled(formulation, found), None, None)
    master = MasterProblem(StepTimes(formulation), formulation.problem.capacity)
    return _solved(formulation, hint, relative_gap, series, master, rounds, to_beat_s, is_left, limit_bytes, branches)


def solved_with_less(
    before: Scheduled, formulation: Formulation, hint: Sequence[int], relative_gap: float, series: Series, rounds: int
) -> Scheduled:
    """Solves a problem again with less memory, where nothing of what is known comes close enough to the bound it has.

    Args:
      before: How it was solved. formulation: It with less memory.
      hint, relative_gap, series, rounds: As for `solved_as_scheduled`.
    """
    if before.plans is None:
        return solved_as_scheduled(formulation, hint, relative_gap, series, rounds)
    master = before.plans.with_budget(formulation.problem.capacity)
    master.add(hint)  # it takes little more than there is: most of its parts can stay
    known = master.fastest_known()
    enough_s = before.solution.certificate.objective  # with more memory
    made = master.improved(hint, math.inf if known is None else known.step_s, enough_s) or known
    if made is not None:
        certificate = as_scheduled(before.solution.certificate, made.step_s, relative_gap)
        if certificate.status is Status.OPTIMAL:
            return Scheduled(formulation, Solution(made.choices, certificate), master, before.weights)
        hint = made.choices
    return _solved(formulation, hint, relative_gap, series, master, rounds)


def _solved(
    formulation: Formulation,
    hint: Sequence[int] | None,
    relative_gap: float,
    series: Series,
    master: MasterProblem,
    rounds: int,
    to_beat_s: float = math.inf,
    is_left: Callable[[Timed, Mixture], bool] = lambda *_: False,
    limit_bytes: Callable[[Timed], float] | None = None,
    branches: bool = True,
) -> Scheduled:
    """`solved_as_scheduled` of what can hide; `master` has the plans that are known."""
    ties = lambda mixture: tying_decision(master.tabulated, mixture.undecided) is not None
    root = priced(
        formulation, hint, relative_gap, series, master, rounds, to_beat_s=to_beat_s, is_settled=ties, is_left=is_left
    )
    if root.best is None or root.bound.bound >= to_beat_s * (1 - relative_gap):  # none, or none that is of use
        return Scheduled(root.formulation, root.found, master, root.formulation.overlap.weights)
    if root.is_left:
        certificate = as_scheduled(root.bound, root.best.step_s, relative_gap)
        left = Solution(root.best.choices, certificate)
        return Scheduled(
            root.best.formulation, left, master, root.formulation.overlap.weights, root.prices, is_left=True
        )
    best, least = _improved(root, master, root.best, relative_gap, limit_bytes), root
    if branches:  # takes longer than to improve a plan, which may be enough
        best, least = _branch_and_bound(root, best, relative_gap, series)
    if least is not root:
        best = _improved(least, master, best, relative_gap, limit_bytes)
    made = _settled(master, best.formulation, Made(best.choices, best.step_s))
    certificate = as_scheduled(least.bound, made.step_s, relative_gap)
    # with more memory another branch may be the one that bounds least
    certificate = dataclasses.replace(certificate, capacity_price=root.bound.capacity_price)
    solution, weights = Solution(made.choices, certificate), least.formulation.overlap.weights
    return Scheduled(best.formulation, solution, master, weights, least.prices)


def _settled(master: MasterProblem, formulation: Formulation, plan: Made) -> Made:
    """A plan with ties between layouts of arguments settled, where its step is no longer so: what costs the same at
    prices need not take the same time."""
    settled = settle_ties(formulation, plan.choices)
    settled_s = plan.step_s if settled == plan.choices else master.step_s(settled)
    return Made(settled, min(settled_s, plan.step_s)) if settled_s <= plan.step_s * (1 + ROUNDING) else plan


def _enough_s(certificate: Certificate, relative_gap: float) -> float:
    """The longest step that is within the gap of a bound."""
    return certificate.bound / max(1 - relative_gap, ROUNDING)


def _improved(
    priced_as: Priced,
    master: MasterProblem,
    best: Timed,
    relative_gap: float,
    limit_bytes: Callable[[Timed], float] | None,
) -> Timed:
    """The fastest plan of those that known ones make, as far as a search from the best finds it.

    Args:
      priced_as: What bounds the problem; a plan that is within the gap of that is not improved any more.
      master: All plans that are known. best: The fastest.
      relative_gap: How much slower one may be whose gaps fit the memory, if those of the best do not.
      limit_bytes: As for `solved_as_scheduled`; asked where the best plan takes nearly all of the memory.
    """
    if (enough_s := _enough_s(priced_as.bound, relative_gap)) >= best.step_s:
        return best
    capacity, within, to_beat_s = best.formulation.problem.capacity, master, best.step_s
    mixture_s = math.inf if priced_as.mixture is None else priced_as.mixture.step_s
    if limit_bytes is not None and capacity is not None and best.step_s <= (1 + _TELLS) * mixture_s:
        takes_all = master.peak_bytes(best.choices) >= _NEARLY_ALL * capacity
        limit = limit_bytes(best) if takes_all else capacity
        if limit < capacity:
            within, to_beat_s = master.with_budget(limit), best.step_s * (1 + relative_gap)
    made = within.improved(best.choices, to_beat_s, enough_s)
    return best if made is None else Timed(best.formulation, made.choices, made.step_s)


def with_ties_settled(formulation: Formulation, found: Solution) -> Solution:
    """A solution, if it is one, with ties between layouts of arguments settled; for times that add up."""
    if found.choices is None:
        return found
    return dataclasses.replace(found, choices=settle_ties(formulation, found.choices))


def as_scheduled(certificate: Certificate, step_s: float, relative_gap: float) -> Certificate:
    """A certificate of a problem as priced, for a plan whose step takes `step_s` as scheduled."""
    gap = max(step_s - certificate.bound, 0.0) / step_s if step_s else 0.0
    status = Status.OPTIMAL if gap <= relative_gap else Status.FEASIBLE
    return dataclasses.replace(certificate, status=status, objective=step_s, gap=gap)


def _branch_and_bound(root: Priced, best: Timed, relative_gap: float, series: Series) -> tuple[Timed, Priced]:
    """The fastest plan of all branches, and the branch that bounds least."""
    leaves = [root]
    for branching in range(_BRANCHINGS + 1):
        least = min(leaves, key=lambda leaf: leaf.bound.bound)
        decision = None
        if least.mixture is not None and least.bound.bound < best.step_s * (1 - relative_gap):
            decision = tying_decision(least.master.tabulated, least.mixture.undecided)
        if decision is None or branching == _BRANCHINGS:
            break
        halves = [(choices, least.master.within(decision, choices)) for choices in _halves(least, decision)]
        if not _is_worth_branching(halves, least.bound.bound, best.step_s):
            break
        leaves = [leaf for leaf in leaves if leaf is not least]
        for choices, master in halves:
            leaf = _leaf(least, decision, choices, master, best.step_s, relative_gap, series)
            if leaf.best is not None and leaf.best.step_s < best.step_s:
                best = leaf.best
            root.master.take(leaf.master)
            leaves.append(leaf)
    return best, least


def _is_worth_branching(halves: Sequence[tuple[Sequence[int], MasterProblem]], bound_s: float, best_s: float) -> bool:
    """Whether much is left to the best plan, or two branches may bound better than both together: no bound is higher
    than the mixture of known plans.
    """
    if best_s - bound_s > _LITTLE * best_s:
        return True
    mixtures = [master.mixture() for _, master in halves]
    most_s = min(math.inf if mixture is None else mixture.step_s for mixture in mixtures)
    return most_s - bound_s >= _WORTH_BRANCHING * (best_s - bound_s)


def _leaf(
    parent: Priced,
    decision: int,
    choices: Sequence[int],
    master: MasterProblem,
    to_beat_s: float,
    relative_gap: float,
    series: Series,
) -> Priced:
    """The part of a problem with these choices of a decision, priced; `master` has the plans of it that are known."""
    branch = branched(parent.formulation, decision, choices)
    leaf = priced(branch, None, relative_gap, series, master, _BRANCH_ROUNDS, to_beat_s=to_beat_s)
    return leaf if leaf.bound.bound > parent.bound.bound else dataclasses.replace(leaf, bound=parent.bound)


def _halves(parent: Priced, decision: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The choice of a decision in the fastest plan, and all others."""
    assert parent.best is not None
    own = parent.best.choices[decision]
    left = parent.formulation.branch.get(decision, range(len(parent.formulation.problem.nodes[decision].costs)))
    return (own,), tuple(choice for choice in left if choice != own)
