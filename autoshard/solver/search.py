"""What a search has found so far: the best solution, the best bound, and the clock.

With `SolverOptions.work_limit` the clock is not the wall's: it moves by counted work alone, so that every decision that
asks how much time is left falls the same way in every run.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence

from autoshard.interrupts import StopRequest
from autoshard.solver.evaluate import evaluate
from autoshard.solver.exact.mathopt_runner import MathOptRunner
from autoshard.solver.options import Progress, SolverOptions
from autoshard.solver.problem import CapacityPrice, Certificate, Problem, Solution, Status

ROUNDING = 1e-9
"""A relative gap below this is rounding, whatever smaller gap was asked for."""
ENTRIES_PER_UNIT = 1e8
"""Table entries that one unit of work visits: roughly what a kernel does in a second on one core."""


NODE_ITERATIONS = 150
"""Visits of all matrix entries that a branch-and-bound node is reckoned to cost, to limit the work of programs."""
MILP_ENTRIES_PER_UNIT = 4_000
"""Matrix entries of the largest program that a unit of work affords: the root of a larger one alone takes longer."""


OFFER_S_PER_NODE = 2e-5
"""How long it may take to complete and price a solution, for each node."""

RESERVE = 0.01
"""Share of the time limit that is kept free for what a busy machine delays."""


class Search:
    """Gathers solutions and bounds; every solution is priced by `evaluate` on the original problem.

    Attributes:
      objective, choices: Best solution (+inf and None if none). bound: Best proven lower bound (-inf if none).
      capacity_price: See `Certificate`; None while unknown.
      infeasible: True once no solution can exist.
      runner: Where integer programs run; its `stop` asks the search to end with what it has.
    """

    def __init__(
        self,
        problem: Problem,
        options: SolverOptions,
        on_progress: Callable[[Progress], None] | None,
        runner: MathOptRunner | None = None,
    ) -> None:
        self.problem, self.options, self.runner = problem, options, runner or MathOptRunner(StopRequest())
        self.objective, self.choices = math.inf, None
        self.bound, self.infeasible = -math.inf, False
        self.capacity_price: CapacityPrice | None = None
        self._on_progress = on_progress
        self._began, self._work = time.perf_counter(), 0.0
        self._until, self._longest_s = math.inf, 0.0

    def wall_s(self) -> float:
        """Seconds since the search began; for reports only."""
        return time.perf_counter() - self._began

    def elapsed_s(self) -> float:
        """Seconds since the search began; with a work limit, units of work done."""
        return self.wall_s() if self.options.work_limit is None else self._work

    def remaining_s(self) -> float:
        """Seconds, or units of work, that are left; 0 once a stop is asked for."""
        if self.runner.stop.requested:
            return 0.0
        limit = self.options.time_limit_s if self.options.work_limit is None else self.options.work_limit
        return min(limit, self._until) - self.elapsed_s()

    def has_time(self, wall_s: float) -> bool:
        """Whether something that takes so long by the clock would end in time; always true with a work limit."""
        wall_s += OFFER_S_PER_NODE * len(self.problem.nodes) + RESERVE * self.options.time_limit_s
        return self.options.work_limit is not None or self.remaining_s() >= wall_s

    def timekeeper(self) -> Callable[[], bool]:
        """A function to ask before each of several like steps: whether to stop, as the next would not end in time."""
        began = math.nan

        def stop() -> bool:
            nonlocal began
            now = self.wall_s()
            if not math.isnan(began):
                self._longest_s = max(self._longest_s, now - began)
            began = now
            return self.done() or not self.has_time(2 * self._longest_s)

        return stop

    @contextlib.contextmanager
    def at_most(self, share: float) -> Iterator[None]:
        """Within this context only a share of the time, or work, that is left counts as remaining."""
        before = self._until
        self._until = min(before, self.elapsed_s() + share * self.remaining_s())
        try:
            yield
        finally:
            self._until = before

    def share(self, share: float) -> SolverOptions:
        """The options for a search within this one, which may take a share of what is left; counted as spent."""
        if self.options.work_limit is None:
            return dataclasses.replace(self.options, time_limit_s=max(share * self.remaining_s(), 0.1))
        units = share * self.remaining_s()
        self._work += units
        return dataclasses.replace(self.options, work_limit=units)

    def milp_limits(self, limit_s: float, entries: int, node_limit: int | None) -> tuple[float | None, int | None]:
        """(seconds, branch-and-bound nodes) for a program that may take `limit_s` seconds, or units of work."""
        if self.options.work_limit is None:
            return limit_s, node_limit
        nodes = int(max(limit_s, 0.0) * ENTRIES_PER_UNIT / (NODE_ITERATIONS * max(entries, 1)))
        return None, max(min(nodes, nodes if node_limit is None else node_limit), 1)

    def affords_milp(self, entries: int) -> bool:
        """Whether a program of so many matrix entries may be begun; by the clock, always."""
        return self.options.work_limit is None or entries <= MILP_ENTRIES_PER_UNIT * self.remaining_s()

    def spend(self, entries: float) -> None:
        """Counts work: `entries` table entries (or matrix entries) were visited."""
        self._work += entries / ENTRIES_PER_UNIT

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
            self._on_progress(Progress(self.wall_s(), self.objective, bound, phase, self.choices))

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
            return Solution(None, Certificate(status, math.inf, bound, math.inf, self.wall_s()))
        bound = min(self.bound, self.objective)
        gap = relative_gap(self.objective, bound)
        status = Status.OPTIMAL if gap <= self.wanted_gap() else Status.FEASIBLE
        price = CapacityPrice(bound, 0.0) if self.problem.capacity is None else self.capacity_price
        return Solution(self.choices, Certificate(status, self.objective, bound, gap, self.wall_s(), price))


def relative_gap(objective: float, bound: float) -> float:
    """(objective - bound) / |objective|; 0 where the bound reaches the objective; +inf without either."""
    if math.isinf(objective) or math.isinf(bound):
        return math.inf
    if bound >= objective:
        return 0.0
    return math.inf if objective == 0 else (objective - bound) / abs(objective)
