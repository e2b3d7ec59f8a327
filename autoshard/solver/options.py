"""What a caller can ask of the solver, and what the solver tells while it works."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class SolverOptions:
    """How long and how far to search.

    Inner searches are bounded by work (passes, neighbourhoods, program sizes), so that equal problems and options give
    equal answers, unless `time_limit_s`, or a phase's share of it, strikes.

    Attributes:
      time_limit_s: Wall-clock limit. The solver stops at most a second or two after it.
      relative_gap: Stop when (objective - bound) <= relative_gap * |objective|; such a solution is called OPTIMAL.
      seed: Seed of the integer-programming codes and of random neighbourhoods.
      dual_passes: Most message-passing sweeps over the whole problem.
      ilp_entries: Largest integer program (non-zero matrix entries) that is built.
      neighbourhoods: Most integer programs over a part of the nodes, once the whole is too large or too slow.
    """

    time_limit_s: float = 60.0
    relative_gap: float = 1e-3
    seed: int = 0
    dual_passes: int = 2000
    ilp_entries: int = 400_000
    neighbourhoods: int = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """A line of the search's story.

    Attributes:
      elapsed_s: Seconds since `solve` was called.
      objective: Cost of the best solution so far; +inf if none.
      bound: Best proven lower bound so far; -inf if none.
      phase: What the solver is doing, in a word or two.
    """

    elapsed_s: float
    objective: float
    bound: float
    phase: str


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
