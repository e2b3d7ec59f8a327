"""The plan that is best on average when a device is slow now and then: `PlanOptions(adaptive=True)`.

The plan that is best while nothing is slow comes first. Then, on each mesh in turn, one axis inside a node must split
features alone, as in Megatron, and the planner decides all else: in such plans work can move between devices. The best
by `expected_s` is taken; a plan that could not be that is not sought, since no step is shorter than its objective.
"""

import dataclasses
from collections.abc import Callable, Iterator

from autoshard.cluster import LogicalMesh
from autoshard.errors import LayoutError, MemoryBudgetError, SolverError
from autoshard.planner.roles import roles_of
from autoshard.plans.adaptivity import expected_s, slack_of, with_slack
from autoshard.plans.make import Posed, plan_posed
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.question import report
from autoshard.plans.slack import Slack
from autoshard.strategies.restrict import tensor_restrictions

_ROUNDS = 3
"""How often a plan is made with less memory, where its places do not fit."""
_ENOUGH = 1.01
"""A plan whose step is so near on average to the best one without slow devices is taken as it is."""


def plan_adaptive(posed: Posed, answer: Callable[[Posed], ProgramPlan] = plan_posed) -> ProgramPlan:
    """The plan that is best on average.

    Args:
      posed: The question. answer: Makes the plan of a question.

    Raises:
      MemoryBudgetError, SolverError: There is no plan at all.
    """
    question = posed.question
    plain = answer(posed)
    best, slack = _with_places(posed, plain, answer)
    if expected_s(best, slack) > _ENOUGH * plain.estimate.step_s:
        for mesh, axis in _candidates(posed):
            report(question.options, question.started, "adaptive", f"weights split along {axis} of {mesh}")
            narrowed = dataclasses.replace(
                posed,
                question=dataclasses.replace(
                    question,
                    restrict=lambda program, logical, axis=axis: tensor_restrictions(
                        program, roles_of(program), logical, axis
                    ),
                    hardware=None,
                ),
                meshes=(mesh,),
            )
            try:
                found, own = _with_places(narrowed, answer(narrowed), answer)
            except (LayoutError, MemoryBudgetError, SolverError):
                continue  # the sizes do not divide, or nothing fits the memory so
            if own is not None and expected_s(found, own) < expected_s(best, slack):
                best, slack = dataclasses.replace(found, candidates=plain.candidates), own
    return with_slack(best, slack)


def _with_places(
    posed: Posed, plan: ProgramPlan, answer: Callable[[Posed], ProgramPlan]
) -> tuple[ProgramPlan, Slack | None]:
    """A plan that has memory for its places as well, and what it can even out; made again with less where it has not.

    Raises:
      MemoryBudgetError, SolverError: None fits with its places.
    """
    question, graph = posed.question, posed.question.traced.graph
    for _ in range(_ROUNDS):
        slack = slack_of(plan, graph)
        if slack is None or plan.estimate.peak_bytes + slack.places_bytes <= question.budget_bytes:
            return plan, slack
        less = dataclasses.replace(question, budget_bytes=question.budget_bytes - slack.places_bytes)
        plan = answer(dataclasses.replace(posed, question=less))
        plan = dataclasses.replace(plan, budget_bytes=question.budget_bytes)
    return plan, None


def _candidates(posed: Posed) -> Iterator[tuple[LogicalMesh, str]]:
    """Meshes, each with an axis inside a node."""
    for mesh in posed.meshes:
        for axis in mesh.axes:
            if axis.size > 1 and all(level.link.level == 0 for level in axis.levels):
                yield mesh, axis.name
