"""What a search may spend: time by the clock, or counted work. The clock stands still while kernels are compiled.

With `SolverOptions.work_limit` the clock is not the wall's: it moves by counted work alone, so that every decision that
asks how much is left falls the same way in every run.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator

from numba.core import event

from autoshard.interrupts import StopRequest
from autoshard.solver.options import SolverOptions

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


class CompileTime(event.Listener):
    """Adds up how long numba compiles.

    Attributes:
      total_s: Seconds until now, without what is being compiled.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self._depth, self._began = 0, 0.0

    def on_start(self, event: event.Event) -> None:
        if self._depth == 0:
            self._began = time.perf_counter()
        self._depth += 1

    def on_end(self, event: event.Event) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.total_s += time.perf_counter() - self._began


@contextlib.contextmanager
def compile_time() -> Iterator[CompileTime]:
    """What numba compiles within this context."""
    with event.install_listener("numba:compile", CompileTime()) as found:
        yield found


class Budget:
    """Seconds, or units of work with a work limit; nothing is left once a stop is asked for."""

    def __init__(self, options: SolverOptions, stop: StopRequest, num_nodes: int, compiling: CompileTime) -> None:
        self.options, self._stop, self._num_nodes, self._compiling = options, stop, num_nodes, compiling
        self._began, self._work = time.perf_counter(), 0.0
        self._until, self._longest_s = math.inf, 0.0

    def wall_s(self) -> float:
        """Seconds since the search began, without those in which kernels were compiled; for reports only."""
        return time.perf_counter() - self._began - self._compiling.total_s

    def elapsed(self) -> float:
        """Seconds since the search began; with a work limit, units of work done."""
        return self.wall_s() if self.options.work_limit is None else self._work

    def remaining(self) -> float:
        """Seconds, or units of work, that are left; 0 once a stop is asked for."""
        if self._stop.requested:
            return 0.0
        limit = self.options.time_limit_s if self.options.work_limit is None else self.options.work_limit
        return min(limit, self._until) - self.elapsed()

    def has_time(self, wall_s: float) -> bool:
        """Whether something that takes so long by the clock would end in time; always true with a work limit."""
        wall_s += OFFER_S_PER_NODE * self._num_nodes + RESERVE * self.options.time_limit_s
        return self.options.work_limit is not None or self.remaining() >= wall_s

    def timekeeper(self, done: Callable[[], bool]) -> Callable[[], bool]:
        """A function to ask before each of several like steps: whether to stop, `done` or without time for another."""
        began = math.nan

        def stop() -> bool:
            nonlocal began
            now = self.wall_s()
            if not math.isnan(began):
                self._longest_s = max(self._longest_s, now - began)
            began = now
            return done() or not self.has_time(2 * self._longest_s)

        return stop

    @contextlib.contextmanager
    def at_most(self, share: float) -> Iterator[None]:
        """Within this context only a share of the time, or work, that is left counts as remaining."""
        before = self._until
        self._until = min(before, self.elapsed() + share * self.remaining())
        try:
            yield
        finally:
            self._until = before

    def milp_limits(self, limit_s: float, entries: int, node_limit: int | None) -> tuple[float | None, int | None]:
        """(seconds, branch-and-bound nodes) for a program that may take `limit_s` seconds, or units of work."""
        if self.options.work_limit is None:
            return limit_s, node_limit
        nodes = int(max(limit_s, 0.0) * ENTRIES_PER_UNIT / (NODE_ITERATIONS * max(entries, 1)))
        return None, max(min(nodes, nodes if node_limit is None else node_limit), 1)

    def affords_milp(self, entries: int) -> bool:
        """Whether a program of so many matrix entries may be begun; by the clock, always."""
        return self.options.work_limit is None or entries <= MILP_ENTRIES_PER_UNIT * self.remaining()

    def spend(self, entries: float) -> None:
        """Counts work: `entries` table entries (or matrix entries) were visited."""
        self._work += entries / ENTRIES_PER_UNIT
