"""The plan of one program as data: what was decided for it on a mesh, and how good that is.

`apply.py` runs it, `explain.py` tells it, `files.py` keeps it; `autoshard.Plan` is this with all of them as methods.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from autoshard.cluster import LogicalMesh
from autoshard.compiler.candidates import Candidate
from autoshard.compiler.orders import Order
from autoshard.compiler.schedule import Schedule
from autoshard.execution.candidates import Choosing
from autoshard.execution.jit import Interface
from autoshard.execution.placement import partition_spec
from autoshard.graph.equation_plan import EquationPlan
from autoshard.graph.layout import SpecEntries
from autoshard.planner.estimate import Estimate
from autoshard.planner.obeyed import Obeyed
from autoshard.planner.profile import StepProfile
from autoshard.plans.confirmation import Confirmation
from autoshard.plans.placement_summary import PlacementSummary
from autoshard.plans.slack import Slack
from autoshard.plans.step_variant import VariantChoice
from autoshard.solver.problem import Certificate
from autoshard.trace.trace import KeptTrace


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedTensor:
    """An argument or output leaf: its path, shape, dtype and planned layout (mesh axes per dimension).

    `is_weak` tells of an argument whether its dtype gives way to that of others (JAX's weak types). Python numbers in
    a state are such, and cease to be when it is restored from a file; the program is always traced as it was planned.
    `in_host`: whether it lies in the memory of the host (`PlanOptions.offload`).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    entries: SpecEntries
    is_weak: bool = False
    in_host: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class CloseChoice:
    """A decision that could have gone another way for little: with everything else held fixed, it costs `extra_s`
    more.
    """

    name: str
    chosen: str
    alternative: str
    extra_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class MeshCandidate:
    """One logical mesh that was considered: its axes, the best step time found on it, and the proven bound.

    `step_s` is None where the bound alone ruled the mesh out, or where nothing fits the memory. `hardware`: the mesh
    with the links that its axes cross, as text; those of one mesh differ by the order of its devices.
    """

    axes: tuple[tuple[str, int], ...]
    step_s: float | None
    bound_s: float
    verdict: str
    hardware: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramPlan:
    """A sharding plan of one function on one logical mesh.

    Attributes:
      name: What produced it (`autoshard`, or a baseline's name).
      cluster: Name of the cluster. device: Name of its device type.
      axes: (name, size) of the mesh axes, major to minor.
      logical_mesh: The same axes with the links that they cross, the kind of device, and which device is at which
        coordinate: what prices the plan.
      arguments, outputs: The planned leaves, flattened.
      output_steps: For each output, the layouts that it passes through at the end; empty if it is made in its own.
      shardings: What each equation enforces, by equation number: layouts, and what must be ordered or kept.
      orders: What must be ordered or kept, one by one, for people.
      timed: What equations enforce instead where there is memory to spare: the same layouts, in orders that follow the
        times of the plan's own schedule.
      equations: Signature of every traced equation: identifies the function.
      donate_argnums: Positional arguments whose buffers are reused.
      schedule: What the compiler is asked for.
      budget_bytes: The memory limit that was obeyed, per device; None for none.
      estimate: Predicted time, traffic and memory. certificate: How near the optimum the plan is proven to be.
      close_choices: Decisions that were nearly ties. candidates: The logical meshes considered.
      warnings: What was kept whole for want of knowledge, and the like.
      configuration: The training configuration that the plan was made from, as JSON; None for a function of one's own.
      confirmation: What the compiler made of it; None where it was not asked (`PlanOptions.compile_check`).
      placement: What the order of its devices gains; None where nothing is sent, or where the order was not sought.
      profile: The step over time: what runs, and what is in memory, with lines of code; None if it was left out.
      choice: The form of the step: what its layers recompute, and its micro-batches; None where that was not searched.
      slack: What it can even out when one device is slow; None where that was not asked (`PlanOptions.adaptive`).
      on_hosts: What tables in host memory would give instead, for people; empty where that was not asked.
      obeyed: What became of the annotated blocks of the program, outer ones first.
      in_tree, out_tree: Pytree definitions; None in a plan read from a file, until it is applied to a function.
      kept_trace: The trace that it was made from, so that running the function need not trace it again; None in a plan
        read from a file.
    """

    name: str
    cluster: str
    device: str
    axes: tuple[tuple[str, int], ...]
    logical_mesh: LogicalMesh
    arguments: tuple[PlannedTensor, ...]
    outputs: tuple[PlannedTensor, ...]
    output_steps: tuple[tuple[SpecEntries, ...], ...]
    shardings: tuple[tuple[int, EquationPlan], ...]
    orders: tuple[Order, ...]
    equations: tuple[str, ...]
    donate_argnums: tuple[int, ...]
    schedule: Schedule
    budget_bytes: float | None
    estimate: Estimate
    certificate: Certificate
    close_choices: tuple[CloseChoice, ...] = ()
    candidates: tuple[MeshCandidate, ...] = ()
    warnings: tuple[str, ...] = ()
    configuration: str | None = None
    confirmation: Confirmation | None = None
    profile: StepProfile | None = dataclasses.field(default=None, repr=False)
    choice: VariantChoice | None = None
    placement: PlacementSummary | None = None
    slack: Slack | None = None
    timed: tuple[tuple[int, EquationPlan], ...] = ()
    obeyed: tuple[Obeyed, ...] = ()
    on_hosts: str = ""
    in_tree: Any = dataclasses.field(default=None, compare=False, repr=False)
    out_tree: Any = dataclasses.field(default=None, compare=False, repr=False)
    kept_trace: KeptTrace | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Axis name to size, major to minor."""
        return dict(self.axes)

    @property
    def num_devices(self) -> int:
        """Devices that the plan needs."""
        return math.prod(n for _, n in self.axes)

    @property
    def devices_per_node(self) -> int:
        """How many of the devices the fastest links join."""
        return math.prod(l.size for axis in self.logical_mesh.axes for l in axis.levels if l.link.level == 0)

    @property
    def figures(self) -> str:
        """Where the figures of the hardware come from, in a few words."""
        return self.logical_mesh.device_type.provenance

    @property
    def programs(self) -> "tuple[ProgramPlan, ...]":
        """The plans of all distinct programs: this one."""
        return (self,)

    @property
    def device_types(self) -> tuple[str, ...]:
        """The kinds of devices that it is for."""
        return (self.device,)

    @property
    def device_flops(self) -> float:
        """Floating-point operations of a device in a step."""
        return self.estimate.flops

    @property
    def in_specs(self) -> Any:
        """PartitionSpecs of the positional arguments: a tuple of pytrees like the arguments.

        In a plan read from a file, which does not know the pytree types, a mapping from path to PartitionSpec.
        """
        return _unflatten(self.in_tree, self.arguments)

    @property
    def out_specs(self) -> Any:
        """PartitionSpecs of the result: a pytree like it; see `in_specs` for a plan read from a file."""
        return _unflatten(self.out_tree, self.outputs)

    @property
    def interface(self) -> Interface:
        """What execution must know of the plan."""
        return Interface(
            self.axes,
            self.shardings,
            tuple(a.entries for a in self.arguments),
            tuple(o.entries for o in self.outputs),
            self.output_steps,
            self.donate_argnums,
            self.schedule,
            Choosing(self.compile_candidates, self.logical_mesh, self.budget_bytes),
            self.timed,
            frozenset(n for n, a in enumerate(self.arguments) if a.in_host),
            frozenset(n for n, o in enumerate(self.outputs) if o.in_host),
        )

    @property
    def compile_candidates(self) -> tuple[Candidate, ...]:
        """How to schedule its program on GPUs, beside the way of least memory; the fastest that fits runs.

        Nothing else for a plan for the least memory; on one device, which sends nothing, what no order hinders; after
        a compile check, the way that was the fastest in the orders that bound its memory, and those in other orders.
        What queues collectives comes last: it is made of those before.
        """
        if self.schedule is Schedule.LEAST_MEMORY:
            return ()
        if self.num_devices == 1:
            return (Candidate.UNORDERED,)
        chosen = self.confirmation.chosen if self.confirmation is not None else None
        in_orders = Candidate.PLAN_COSTS, Candidate.PLAN_COSTS_AT_ONCE, Candidate.PIPELINED_LOOPS
        bounded = in_orders if chosen is None else (chosen.candidate, Candidate.PLAN_COSTS_AT_ONCE)
        by_time = (Candidate.BY_TIME, Candidate.BY_TIME_AT_ONCE) if self.timed else ()
        freed = tuple(c for c in Candidate if c.keeps_gathers and not c.is_queued)
        tried = *bounded, *by_time, *freed
        orders = {c.ordered_as for c in tried}
        return *tried, *(c for c in Candidate if c.is_queued and c.ordered_as in orders)


def _unflatten(tree: Any, tensors: Sequence[PlannedTensor]) -> Any:
    specs = [partition_spec(t.entries) for t in tensors]
    if tree is None:
        return {t.name: s for t, s in zip(tensors, specs, strict=True)}
    return jax.tree_util.tree_unflatten(tree, specs)
