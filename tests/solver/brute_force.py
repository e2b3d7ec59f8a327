"""Exhaustive enumeration: the reference that every faster path is tested against. Tiny problems only."""

import itertools
import math

from autoshard.errors import SolverError
from autoshard.solver.evaluate import evaluate
from autoshard.solver.problem import Problem


def brute_force(problem: Problem, limit: int = 2_000_000) -> tuple[float, tuple[int, ...] | None]:
    """Returns the least cost of a feasible vector of choices and the first such vector; (+inf, None) if none exists.

    Raises:
      SolverError: if there are more than `limit` vectors.
    """
    count = math.prod(len(node.costs) for node in problem.nodes)
    if count > limit:
        raise SolverError(f"brute force enumerates at most {limit} vectors of choices; this problem has {count}")
    best, best_choices = math.inf, None
    for choices in itertools.product(*(range(len(node.costs)) for node in problem.nodes)):
        result = evaluate(problem, choices)
        if result.feasible and result.objective < best:
            best, best_choices = result.objective, choices
    return best, best_choices
