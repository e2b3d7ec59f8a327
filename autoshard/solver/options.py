"""What a caller can ask of the solver, and what the solver tells while it works."""

import dataclasses
import math
import time

ROUNDING = 1e-9
"""A relative gap below this is rounding, whatever smaller gap was asked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class SolverOptions:
    """How long and how far to search.

    By default the clock decides when to stop, and how long each phase may take: two runs of the same problem may end
    with different answers. With `work_limit` no clock is read: the same problem, options and hint give the same
    choices, objective and bound on the same versions of the libraries, however fast or busy the machine is.

    Attributes:
      time_limit_s: Wall-clock limit. The solver stops at most a second or two after it. Not used with `work_limit`.
      relative_gap: Stop when (objective - bound) <= relative_gap * |objective|; such a solution is called OPTIMAL.
      seed: Seed of the integer-programming codes and of random neighbourhoods.
      dual_passes: Most message-passing sweeps over the whole problem.
      ilp_entries: Largest integer program (non-zero matrix entries) that is built.
      neighbourhoods: Most integer programs over a part of the nodes, once the whole is too large or too slow.
      is_bound_enough: Whether to stop once folding copies has proven a bound. The choices that come with it
        (`Solution.relaxed`) are then all that is found. Where little is repeated, this changes nothing.
      useful_bound: A bound below this is of no use: where one is enough, and messages gain too little to reach it, no
        more time goes to them than choices need. -inf: every bound is.
      work_limit: Limit in units of counted work, or None to go by the clock. A unit is 1e8 visited table entries, in
        the order of a second of one core; phases end when their share of it is used up.
    """

    time_limit_s: float = 60.0
    relative_gap: float = 1e-3
    seed: int = 0
    dual_passes: int = 2000
    ilp_entries: int = 400_000
    neighbourhoods: int = 200
    is_bound_enough: bool = False
    useful_bound: float = -math.inf
    work_limit: float | None = None

    @property
    def wanted_gap(self) -> float:
        """The relative gap from which on a solution is optimal."""
        return max(self.relative_gap, ROUNDING)

    def part(self, share: float) -> "SolverOptions":
        """The same with a share of the time, or of the work."""
        work_limit = None if self.work_limit is None else share * self.work_limit
        return dataclasses.replace(self, time_limit_s=share * self.time_limit_s, work_limit=work_limit)

    def deadline(self) -> float:
        """Value of `time.perf_counter` at which a search that begins now has to end; +inf with a work limit."""
        return math.inf if self.work_limit is not None else time.perf_counter() + self.time_limit_s


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """A line of the search's story.

    Attributes:
      elapsed_s: Seconds since `solve` was called.
      objective: Cost of the best solution so far; +inf if none.
      bound: Best proven lower bound so far; -inf if none.
      phase: What the solver is doing, in a word or two.
      choices: The best solution so far; None if there is none, or where it is not told.
    """

    elapsed_s: float
    objective: float
    bound: float
    phase: str
    choices: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """What a vector of choices costs and takes.

    Attributes:
      objective: Sum of all node and edge costs; +inf if a forbidden entry is used.
      peak_usage: Largest usage at any instant; 0 if nothing uses capacity.
      peak_instant: The earliest instant of that peak; None if nothing uses capacity.
      feasible: Objective finite and peak within the capacity (up to `CAPACITY_TOLERANCE` of it).
    """

    objective: float
    peak_usage: float
    peak_instant: int | None
    feasible: bool
