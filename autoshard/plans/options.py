"""What a caller may tune about planning."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True)
class PlanProgress:
    """A line of the planning's story: what is being done, and the solver's figures where it is solving."""

    stage: str
    detail: str
    elapsed_s: float
    objective_s: float | None = None
    bound_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of `autoshard.plan`.

    Attributes:
      time_limit_s: Wall-clock limit of each solve.
      relative_gap: A plan is called optimal when it is proven to be within this share of the optimum.
      max_mesh_axes: With `mesh=None`, logical meshes of up to this many axes are searched (at most 3).
      memory_reserve: Share of the device's memory that the default budget leaves to the runtime: its context,
        collective buffers and fragmentation.
      overlap: Share of the time of weight gathers and gradient reductions that hides behind computation.
        0 (the default) adds all times up; see docs/cost_model.md.
      while_trips: How often the body of a `while` loop is assumed to run, which a program does not state.
      seed: Seed of the solver. Equal inputs and options give equal plans unless the time limit strikes.
      on_progress: Called as the work goes on.
    """

    time_limit_s: float = 300.0
    relative_gap: float = 5e-3
    max_mesh_axes: int = 2
    memory_reserve: float = 0.1
    overlap: float = 0.0
    while_trips: float = 1.0
    seed: int = 0
    on_progress: Callable[[PlanProgress], None] | None = None
