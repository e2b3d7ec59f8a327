"""Plans that fit with the gaps between their buffers.

The solver limits what is alive at once. What a device must have is more: the gaps that stay between buffers with fixed
places depend on all choices together, and are known only once a plan is there. Where a plan's gaps exceed the budget,
its problem is solved again with so much less, beginning with that plan.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from autoshard.garbage import collection_paused
from autoshard.planner.build import Formulation
from autoshard.planner.decode import Evaluation, evaluate
from autoshard.planner.estimate import Estimate
from autoshard.solver.problem import Solution, Status

NEGLIGIBLE_BYTES = 2**21
"""Excess that is none: CUDA hands out memory in pages of 2 MiB."""

TRIES = 3
"""How often a problem is solved again. What exceeds the budget is taken off; twice as much after the first time, since
gaps have grown meanwhile then."""


@collection_paused()
def with_gaps(
    formulation: Formulation,
    first: Solution,
    relative_gap: float,
    solve: Callable[[Formulation, Sequence[int]], Solution] | None,
) -> tuple[Solution, bool, Evaluation | None]:
    """`first`, or a solution found under a tighter limit whose gaps fit as well; whether they do; and the solution as
    the compiler has it, None where there is no limit.

    Its bound stays that of the problem as it was: no plan whose peak fits costs less, and so none with gaps either. If
    no solution fits, the one that exceeds the budget least is taken.

    Args:
      formulation: The problem, with the budget as its capacity. first: Its solution.
      relative_gap: From which gap to the bound on a solution is optimal.
      solve: Solves a problem, beginning with choices, which may not fit; its result has none if there are none. None:
        only `first` is looked at.
    """
    budget_bytes = formulation.problem.capacity
    if budget_bytes is None:
        return first, True, None
    found, best, of_best = first, first, None
    fits = False
    limit_bytes, least_bytes = budget_bytes, math.inf
    for tried in range(TRIES + 1):
        evaluation = evaluate(formulation, found.chosen)
        reserved_bytes = evaluation.reserved_bytes
        if reserved_bytes < least_bytes:
            best, of_best, least_bytes = found, evaluation, reserved_bytes
        fits = reserved_bytes <= budget_bytes + NEGLIGIBLE_BYTES
        if fits or solve is None:
            break
        limit_bytes = tighter_bytes(evaluation, budget_bytes, limit_bytes, 2.0 if tried else 1.0)
        if limit_bytes <= 0:
            break
        tighter = dataclasses.replace(formulation.problem, capacity=limit_bytes)
        found = solve(dataclasses.replace(formulation, problem=tighter), found.chosen)
        if found.choices is None:
            break
    if best is first:
        return first, fits, of_best
    cost, bound = best.certificate.objective, first.certificate.bound
    gap = (cost - bound) / abs(cost) if cost else 0.0
    status = Status.OPTIMAL if gap <= relative_gap else Status.FEASIBLE
    certificate = dataclasses.replace(first.certificate, status=status, objective=cost, gap=gap)
    return Solution(best.choices, certificate), fits, of_best


def tighter_bytes(evaluation: Evaluation, budget_bytes: float, limit_bytes: float, times_excess: float = 1.0) -> float:
    """What a plan may have alive at once, at most `limit_bytes`, if its gaps are to fit as well; as far as a plan tells
    that has its own, if so many times what it exceeds the budget by is taken off."""
    over_bytes = evaluation.reserved_bytes - budget_bytes
    if over_bytes <= NEGLIGIBLE_BYTES:
        return limit_bytes
    return min(limit_bytes, evaluation.peak[0]) - times_excess * over_bytes


def fits(estimate: Estimate, budget_bytes: float) -> bool:
    """Whether a plan fits the budget with its gaps."""
    return are_within(estimate.peak_bytes, estimate.reserved_bytes, budget_bytes)


def are_within(peak_bytes: float, reserved_bytes: float | None, budget_bytes: float) -> bool:
    """Whether a plan that needs so much fits the budget with its gaps.

    Args:
      peak_bytes: What is alive at once. reserved_bytes: What must be there, gaps included; None if that is not known.
      budget_bytes: What is allowed. All for each device.
    """
    return peak_bytes <= budget_bytes and (reserved_bytes or peak_bytes) <= budget_bytes + NEGLIGIBLE_BYTES


def excess(estimate: Estimate, budget_bytes: float) -> str:
    """What to tell of a plan that fits the budget only without its gaps; empty if it fits."""
    reserved_bytes = estimate.reserved_bytes or estimate.peak_bytes
    if reserved_bytes <= budget_bytes + NEGLIGIBLE_BYTES or estimate.peak_bytes > budget_bytes + NEGLIGIBLE_BYTES:
        return ""
    return (
        f"With the gaps between its buffers the plan needs {reserved_bytes / 1e9:.4g} GB per device, although no more "
        f"than {estimate.peak_bytes / 1e9:.4g} GB are alive at once and {budget_bytes / 1e9:.4g} GB are allowed; none "
        "whose gaps fit was found. Raise memory_budget_bytes if the device has more, use micro-batches or "
        "jax.checkpoint, or see what a compiler reserves: `autoshard verify`."
    )
