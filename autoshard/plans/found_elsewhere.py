"""From what was found to what is told of it, and back: the problem of a plan is made anew where it is needed."""

import math
from collections.abc import Sequence

from autoshard.errors import SolverError
from autoshard.planner.decode import evaluate
from autoshard.plans.found import Found
from autoshard.plans.outcome import Best, Outcome
from autoshard.plans.question import Question
from autoshard.solver.problem import Problem, Solution


def without_problem(found: Found) -> Outcome:
    """What `found` says without the problem of its best plan."""
    best = None
    if found.best is not None:
        formulation, solution = found.winner
        # plans of the linear program belong to the problem
        solution = Solution(solution.choices, solution.certificate)
        best = Best(
            formulation.mesh,
            formulation.overlap.weights,
            _own_cost_s(formulation.problem, solution.chosen),
            solution,
            _step_s(found),
            found.weights,
            found.prices,
            found.fits,
            found.others,
        )
    return Outcome(best, found.candidates, found.warnings)


def with_problem(question: Question, outcome: Outcome) -> Found:
    """The outcome with the problem of its best plan, which is made anew.

    Args:
      question: What was asked. outcome: What was found.

    Raises:
      SolverError: The problem is another one than that which was solved.
    """
    best = outcome.best
    if best is None:
        return Found(None, outcome.candidates, outcome.warnings)
    formulation = question.formulation(best.mesh, weights=best.priced_with)
    problem, chosen = formulation.problem, best.solution.chosen
    if len(problem.nodes) != len(chosen) or not math.isclose(_own_cost_s(problem, chosen), best.own_cost_s):
        raise SolverError(
            f"What another process found on the mesh {best.mesh} is for another problem than the one made here. "
            "Plan with PlanOptions(processes=1), and report this."
        )
    return Found(
        (formulation, best.solution),
        outcome.candidates,
        outcome.warnings,
        evaluate(formulation, chosen),
        best.weights,
        best.prices,
        best.fits,
        best.others,
    )


def _own_cost_s(problem: Problem, choices: Sequence[int]) -> float:
    return sum(float(node.costs[choice]) for node, choice in zip(problem.nodes, choices, strict=False))


def _step_s(found: Found) -> float:
    """The step of the best plan, which is that of its mesh."""
    own = [c.step_s for c in found.candidates if c.hardware == str(found.winner[0].mesh)]
    return next((step_s for step_s in own if step_s is not None), math.inf)
