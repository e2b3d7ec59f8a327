"""What a search has found so far: the best solution, the best bound, and the clock."""

import math
import time
from collections.abc import Callable, Sequence

from autoshard.solver.evaluate import evaluate
from autoshard.solver.options import Progress, SolverOptions
from autoshard.solver.problem import Certificate, Problem, Solution, Status

ROUNDING = 1e-9
"""A relative gap below this is rounding, whatever smaller gap was asked for."""


class Search:
    """Gathers solutions and bounds; every solution is priced by `evaluate` on the original problem.

    Attributes:
      objective, choices: Best solution (+inf and None if none). bound: Best proven lower bound (-inf if none).
      infeasible: True once no solution can exist.
    """

    def __init__(
        self, problem: Problem, options: SolverOptions, on_progress: Callable[[Progress], None] | None
    ) -> None:
        self.problem, self.options = problem, options
        self.objective, self.choices = math.inf, None
        self.bound, self.infeasible = -math.inf, False
        self._on_progress = on_progress
        self._began = time.perf_counter()

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began

    def remaining_s(self) -> float:
        return self.options.time_limit_s - self.elapsed_s()

    def offer(self, choices: Sequence[int], phase: str) -> bool:
        """Takes a candidate; returns whether it is the new best."""
        result = evaluate(self.problem, choices)
        if not result.feasible or result.objective >= self.objective:
            return False
        self.objective, self.choices = result.objective, tuple(int(choice) for choice in choices)
        self.tell(phase)
        return True

    def prove(self, bound: float, phase: str) -> None:
        """Takes a proven lower bound."""
        if bound > self.bound:
            self.bound = bound
            self.tell(phase)

    def tell(self, phase: str) -> None:
        if self._on_progress is not None:
            self._on_progress(Progress(self.elapsed_s(), self.objective, min(self.bound, self.objective), phase))

    def gap(self) -> float:
        return relative_gap(self.objective, self.bound)

    def wanted_gap(self) -> float:
        return max(self.options.relative_gap, ROUNDING)

    def done(self) -> bool:
        """Whether the gap is closed, infeasibility is proven or time is up."""
        return self.infeasible or self.gap() <= self.wanted_gap() or self.remaining_s() <= 0

    def solution(self) -> Solution:
        if self.choices is None:
            status = Status.INFEASIBLE if self.infeasible else Status.UNKNOWN
            bound = math.inf if self.infeasible else self.bound
            return Solution(None, Certificate(status, math.inf, bound, math.inf, self.elapsed_s()))
        bound = min(self.bound, self.objective)
        gap = relative_gap(self.objective, bound)
        status = Status.OPTIMAL if gap <= self.wanted_gap() else Status.FEASIBLE
        return Solution(self.choices, Certificate(status, self.objective, bound, gap, self.elapsed_s()))


def relative_gap(objective: float, bound: float) -> float:
    """(objective - bound) / |objective|; 0 where the bound reaches the objective; +inf without either."""
    if math.isinf(objective) or math.isinf(bound):
        return math.inf
    if bound >= objective:
        return 0.0
    return math.inf if objective == 0 else (objective - bound) / abs(objective)
