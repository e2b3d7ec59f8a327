"""What is to be planned, whatever the mesh, and how the caller hears of it."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping

from jax.sharding import PartitionSpec

from autoshard.cluster import LogicalMesh, Slice
from autoshard.compiler.backends import schedules_of
from autoshard.compiler.schedule import Schedule
from autoshard.planner.allowed import Restrictions
from autoshard.planner.asked import Asked
from autoshard.planner.build import Formulation, formulate
from autoshard.planner.mesh_prices import PricesOfMeshes
from autoshard.planner.overlap import StretchWeights
from autoshard.planner.program import Program
from autoshard.plans.effort import Effort
from autoshard.plans.options import PlanOptions, PlanProgress
from autoshard.plans.pins import resolve_pins
from autoshard.trace.trace import Trace

Axes = tuple[tuple[str, int], ...]
"""The axes (name, size) of a mesh, major to minor."""

Restrict = Callable[[Program, LogicalMesh], Restrictions]
"""Makes the restrictions of a baseline for a program on a mesh."""


_SHARE_OF_LEFT, _LEAST_S = 0.5, 5.0
"""Which share of the time that is left the search on a mesh may take, and how long it may take anyway: choices."""


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned, whatever the mesh.

    Attributes:
      budget_bytes: Memory per device; +inf for no limit.
      pins, options: As for `plan`. restrict: Of a baseline. started: When planning began, by `time.perf_counter`.
      start: Layouts to start from, as for `plan`.
      schedule: What the compiler is asked for.
      to_beat_s: A plan of at least this step is of no use; +inf if any is.
      asked: What annotated blocks of the program ask for; None for nothing.
      lowered_bytes: Lower budgets of single meshes, by their axes (name, size), each under one schedule: where a
        compiled plan took more than
        was predicted.
      prices: On the meshes of several questions; None where each is asked alone.
      hardware: The slice whose devices are put in order; None to keep the order of each mesh.
      branches: Whether a problem is cut in two where one decision ties all others (`as_scheduled.py`). Of single layers
        nearly all are tied by one, and no plan found so was faster.
      until_s: When (`time.perf_counter`) the best plan so far is taken; +inf for no such time.
      effort: What was done so far, for this question and others that share it.
    """

    traced: Trace
    program: Program
    budget_bytes: float
    pins: Mapping[str, PartitionSpec] | None
    options: PlanOptions
    restrict: Restrict | None
    started: float
    start: Mapping[str, PartitionSpec] | None = None
    schedule: Schedule = Schedule.LEAST_MEMORY
    to_beat_s: float = math.inf
    lowered_bytes: Mapping[tuple[Schedule, Axes], float] = dataclasses.field(default_factory=dict)
    hardware: Slice | None = None
    asked: Asked | None = None
    branches: bool = True
    until_s: float = math.inf
    prices: PricesOfMeshes | None = dataclasses.field(default=None, repr=False, compare=False)
    effort: Effort = dataclasses.field(default_factory=Effort, repr=False, compare=False)

    def budget_on(self, axes: Axes) -> float:
        """Memory per device of a plan on the mesh with these axes (name, size); +inf for no limit."""
        return min(self.budget_bytes, self.lowered_bytes.get((self.schedule, axes), math.inf))

    def renewed(self) -> "Question":
        """The same, asked now, with as much time as there was at first."""
        return dataclasses.replace(self, until_s=until_s(self.options, time.perf_counter()))

    def mesh_limit_s(self, num_left: int) -> float:
        """How long the search on the next of so many meshes may take, which has half of the time that is left."""
        if math.isinf(self.until_s):
            return self.options.mesh_limit_s
        left_s = (self.until_s - time.perf_counter()) * max(_SHARE_OF_LEFT, 1 / num_left)
        return min(self.options.mesh_limit_s, max(left_s, _LEAST_S))

    def schedules(self, mesh: LogicalMesh) -> tuple[Schedule, ...]:
        """What the compiler may be asked for on a mesh, the fastest first, that for least memory last."""
        wanted = self.options.schedule
        return schedules_of(mesh.device_type, mesh.num_devices) if wanted is None else (wanted,)

    def formulation(
        self, mesh: LogicalMesh, starting: bool = False, weights: StretchWeights | None = None
    ) -> Formulation:
        """The problem on one mesh.

        Args:
          mesh: The mesh. starting: Whether only plans are wanted that have the layouts of `start`.
          weights: What counts of collectives that can hide; None for those to begin with.
        """
        axes = {axis.name: axis.size for axis in mesh.axes}
        layouts = resolve_pins(self.traced.graph, self.pins, axes)
        if starting:
            wanted = resolve_pins(self.traced.graph, self.start, axes)
            layouts = tuple(l if w is None else w for w, l in zip(wanted, layouts, strict=True))
        restrictions = self.restrict(self.program, mesh) if self.restrict else Restrictions()
        restrictions = dataclasses.replace(restrictions, asked=self.asked)
        budget_bytes = self.budget_on(axes_of(mesh))
        limit_bytes = None if math.isinf(budget_bytes) else budget_bytes
        formulation = formulate(
            self.program,
            mesh,
            limit_bytes,
            layouts,
            restrictions,
            self.schedule,
            self.options.overlap,
            weights,
            self.options.lookups,
            self.options.offload or "never",
            self.options.decompose,
            None if self.prices is None else self.prices.on(mesh),
        )
        self.effort.count(formulation.problem)
        return formulation


def until_s(options: PlanOptions, started: float) -> float:
    """When (`time.perf_counter`) a search that began at `started` takes the best plan so far; +inf for no such time."""
    if options.time_limit_s is None or options.work_limit is not None:
        return math.inf
    return started + options.time_limit_s


def axes_of(mesh: LogicalMesh) -> Axes:
    """(name, size) of the axes of a mesh."""
    return tuple((axis.name, axis.size) for axis in mesh.axes)


def axes_text(axes: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name}={size}" for name, size in axes)


def report(
    options: PlanOptions,
    started: float,
    stage: str,
    detail: str,
    objective: float | None = None,
    bound: float | None = None,
) -> None:
    """Tells the caller how far planning is."""
    if options.on_progress is not None:
        options.on_progress(PlanProgress(stage, detail, time.perf_counter() - started, objective, bound))
