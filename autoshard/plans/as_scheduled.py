"""The best plan for a step whose collectives hide: rounds of pricing, in branches where one decision ties the layers.

Prices bound a mixture of plans (`pricing.py`). Where some layers may do as one plan of it and some as another, a plan
comes close to the mixture (`primal_recovery.py`). But some decisions hold for all layers at once, such as the layout of
the activations between them; plans that differ there cannot be mixed, and the bound of their mixture is below what any
plan can reach. Then the problem is cut in two, one in which that decision is as in the fastest plan and one in which it
is not, and each is priced by itself (branch and bound; Land and Doig, An automatic method of solving discrete
programming problems, 1960). Most branches cannot win, as their first bound tells.
"""

import collections
import dataclasses
from collections.abc import Sequence

from autoshard.planner.build import Formulation, branched
from autoshard.planner.ties import settle_ties
from autoshard.planner.timeline import asked_for
from autoshard.plans.pricing import ROUNDS, Priced, priced
from autoshard.plans.primal_recovery import Mixture, Series, Timed, fastest_like
from autoshard.solver.options import ROUNDING
from autoshard.solver.problem import Certificate, Problem, Solution, Status

_BRANCHINGS = 4
"""How often a problem is cut in two at most."""

_BRANCH_ROUNDS = 6
"""How many prices are tried at most in each branch."""

_SHARED = 0.02
"""Plans with less of a mixture do not count."""

_TIED = 0.02
"""A decision ties the layers if this share of all edges, or more, hang on it."""


def solved_as_scheduled(
    formulation: Formulation, hint: Sequence[int] | None, relative_gap: float, series: Series, rounds: int = ROUNDS
) -> tuple[Formulation, Solution]:
    """The best solution of a problem as scheduled, and the problem in whose branch, and at whose prices, it was found.

    Args:
      formulation: The problem. hint: Choices to begin with.
      relative_gap: From which gap to the bound on a solution is optimal.
      series: Solves problems. rounds: How many prices are tried at most before the first branching.
    """
    if formulation.overlap.weights is None:
        found = series.solve(formulation, hint=hint, relative_gap=relative_gap, share=1.0)
        return formulation, with_ties_settled(formulation, found)
    ties = lambda mixture: _tying(formulation.problem, mixture) is not None
    root = priced(formulation, hint, relative_gap, series, rounds, is_settled=ties)
    if root.best is None:  # the first problem has no solution
        return root.formulation, root.found
    best, least = _branch_and_bound(root, root.best, relative_gap, series)
    if least.mixture is not None:
        best = fastest_like(least.mixture, least.formulation, best, least.bound.bound, relative_gap, series)
    choices, step_s = best.solution.chosen, best.step_s
    settled = settle_ties(best.formulation, choices)
    settled_s = asked_for(best.formulation, settled).step_s
    if settled_s <= step_s * (1 + ROUNDING):  # what costs the same at prices need not take the same time
        choices, step_s = settled, min(settled_s, step_s)
    certificate = as_scheduled(least.bound, step_s, relative_gap)
    # with more memory another branch may be the one that bounds least
    certificate = dataclasses.replace(certificate, capacity_price=root.bound.capacity_price)
    return best.formulation, Solution(choices, certificate)


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
            decision = _tying(least.formulation.problem, least.mixture)
        if decision is None or branching == _BRANCHINGS:
            break
        leaves = [leaf for leaf in leaves if leaf is not least]
        for choices in _halves(least, decision):
            leaf = _leaf(least, decision, choices, best.step_s, relative_gap, series)
            if leaf.best is not None and leaf.best.step_s < best.step_s:
                best = leaf.best
            leaves.append(leaf)
    return best, least


def _leaf(
    parent: Priced, decision: int, choices: Sequence[int], to_beat_s: float, relative_gap: float, series: Series
) -> Priced:
    """The part of a problem with these choices of a decision, priced."""
    known = [plan for plan in parent.known if plan.choices[decision] in choices]
    fastest = min(known, key=lambda plan: plan.times.step_s, default=None)
    leaf = priced(
        branched(parent.formulation, decision, choices),
        None if fastest is None else fastest.choices,
        relative_gap,
        series,
        _BRANCH_ROUNDS,
        known=known,
        to_beat_s=to_beat_s,
    )
    return leaf if leaf.bound.bound > parent.bound.bound else dataclasses.replace(leaf, bound=parent.bound)


def _halves(parent: Priced, decision: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The choice of a decision in the fastest plan of a mixture, and all others."""
    assert parent.mixture is not None
    fastest = min(parent.mixture.mixed, key=lambda plan: plan.times.step_s)
    own = fastest.choices[decision]
    left = parent.formulation.branch.get(decision, range(len(parent.formulation.problem.nodes[decision].costs)))
    return (own,), tuple(choice for choice in left if choice != own)


def _tying(problem: Problem, mixture: Mixture) -> int | None:
    """The decision that ties most, of those in which the plans of a mixture differ; None if none ties much."""
    mixed = [plan.choices for share, plan in zip(mixture.shares, mixture.plans, strict=True) if share >= _SHARED]
    differ = {node for node, column in enumerate(zip(*mixed, strict=True)) if len(set(column)) > 1}
    ends = (end for edge in problem.edges for end in (edge.source, edge.target) if end in differ)
    [(decision, number)] = collections.Counter(ends).most_common(1) or [(None, 0)]
    return decision if number >= max(_TIED * len(problem.edges), 2) else None
