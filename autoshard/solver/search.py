"""What a search has found so far: the incumbent, the best bound, and what is left of its budget."""

import math
from collections.abc import Callable, Sequence

from autoshard.interrupts import StopRequest
from autoshard.solver.budget import Budget, CompileTime
from autoshard.solver.evaluate import evaluate
from autoshard.solver.exact.mathopt_runner import MathOptRunner
from autoshard.solver.options import Progress, SolverOptions
from autoshard.solver.problem import CapacityPrice, Certificate, Problem, Solution, Status, relative_gap


class Search:
    """Gathers solutions and bounds; every solution is priced by `evaluate` on the original problem.

    Attributes:
      objective, choices: Best solution (+inf and None if none). bound: Best proven lower bound (-inf if none).
      capacity_price: See `Certificate`; None while unknown.
      infeasible: True once no solution can exist.
      budget: Time or work that is left.
      runner: Where integer programs run; its `stop` asks the search to end with what it has.
    """

    def __init__(
        self,
        problem: Problem,
        options: SolverOptions,
        on_progress: Callable[[Progress], None] | None,
        runner: MathOptRunner | None = None,
        compiling: CompileTime | None = None,
    ) -> None:
        self.problem, self.options, self.runner = problem, options, runner or MathOptRunner(StopRequest())
        self.objective, self.choices = math.inf, None
        self.bound, self.infeasible = -math.inf, False
        self.capacity_price: CapacityPrice | None = None
        self._on_progress = on_progress
        self.budget = Budget(options, self.runner.stop, len(problem.nodes), compiling or CompileTime())

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

    def price_capacity(self, price: float, bound: float) -> None:
        """Takes the sum of capacity prices that prove `bound` under any capacity; those of the best bound are kept."""
        if self.capacity_price is None or bound > self.capacity_price.bound:
            self.capacity_price = CapacityPrice(bound, price)

    def tell(self, phase: str) -> None:
        if self._on_progress is not None:
            bound = min(self.bound, self.objective)
            self._on_progress(Progress(self.budget.wall_s(), self.objective, bound, phase, self.choices))

    def gap(self) -> float:
        return relative_gap(self.objective, self.bound)

    def done(self) -> bool:
        """Whether the gap is closed, infeasibility is proven or time is up."""
        return self.infeasible or self.gap() <= self.options.wanted_gap or self.budget.remaining() <= 0

    def goes_on(self, steps: int) -> bool:
        """Whether to go on towards a bound after so many steps: if none is proven yet, the first is taken anyway."""
        return not self.done() or steps == 0 and not math.isfinite(self.bound)

    def solution(self) -> Solution:
        bound = min(self.bound, self.objective)
        price = CapacityPrice(bound, 0.0) if self.problem.capacity is None else self.capacity_price
        if self.choices is None:
            status = Status.INFEASIBLE if self.infeasible else Status.UNKNOWN
            bound, price = (math.inf, None) if self.infeasible else (bound, price if math.isfinite(bound) else None)
            return Solution(None, Certificate(status, math.inf, bound, math.inf, self.budget.wall_s(), price))
        gap = relative_gap(self.objective, bound)
        status = Status.OPTIMAL if gap <= self.options.wanted_gap else Status.FEASIBLE
        return Solution(self.choices, Certificate(status, self.objective, bound, gap, self.budget.wall_s(), price))
