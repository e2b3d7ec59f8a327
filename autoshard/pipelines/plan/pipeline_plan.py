"""A plan in stages as data: what runs where and when, how each stage is sharded, and what it will take.

`autoshard.StagedPlan` is this with all that can be done with it as methods.
"""

import dataclasses
import math
from typing import Any

from autoshard.pipelines.cost.layers import Layers
from autoshard.pipelines.plan.parameter_owners import StageId
from autoshard.pipelines.schedule.durations import StepDurations
from autoshard.pipelines.schedule.simulate import simulate, step_time
from autoshard.pipelines.schedule.timeline import Timeline
from autoshard.pipelines.search.alternative import Alternative
from autoshard.pipelines.search.arrangement import Arrangement, Pipeline
from autoshard.plans.program_plan import ProgramPlan


@dataclasses.dataclass(frozen=True, slots=True)
class SliceSummary:
    """A homogeneous part of the cluster: its devices count from `first_device` on in the order of the cluster."""

    name: str
    device: str
    num_devices: int
    first_device: int
    memory_bytes: float
    limit_bytes: float
    torus: tuple[int, ...] = ()
    """The shape of the torus whose chips they are, by their coordinates; empty for none."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedMesh:
    """The devices of a submesh, counted over the whole cluster, and the axes that are laid over them.

    Its places count from `first_device` on; `order` tells the device at each coordinate of the mesh, and is empty where
    that is the place.
    """

    first_device: int
    axes: tuple[tuple[str, int], ...]
    name: str
    order: tuple[int, ...] = ()

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return math.prod(size for _, size in self.axes)

    @property
    def devices(self) -> tuple[int, ...]:
        """The device at each coordinate of the mesh, row-major."""
        return self.order or tuple(range(self.first_device, self.first_device + self.num_devices))


@dataclasses.dataclass(frozen=True, slots=True)
class StageCertificate:
    """How good the arrangement is.

    Attributes:
      searched_s: Step time of the arrangement by the costs of single layers, which the search compared.
      bound_s: No arrangement of the search's space takes less, by the same costs. gap: Of the two.
      search_s: How long planning took.
    """

    searched_s: float
    bound_s: float
    gap: float
    search_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class ObeyedStage:
    """What became of a block that asks for pipelines or a stage: what it asks for, where it stands, what it got."""

    asked: str
    line: str
    got: str


@dataclasses.dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A plan of a training step over several meshes.

    Attributes:
      cluster: Name of the cluster. slices: Its parts.
      batch_size: Examples of a step.
      arrangement: Which layers run where, and with which share of the batch.
      layers: The layers that it speaks of. starts, stop: Where they begin in the traced loss.
      meshes: For each pipeline and submesh, its devices.
      programs: The distinct plans of stages. program_of: For each pipeline and stage, which is its.
      parameters: Paths of the parameters. owners: Where each lives.
      durations: What everything in a step takes. certificate: How good it is. considered: What else was looked at.
      warnings: What the user should know.
      obeyed: What became of annotations that ask for pipelines and stages; of those inside stages, the programs tell.
      donates_state: Whether a step may reuse the buffers of the state that it is given.
      configuration: The training configuration that it was made from, as JSON; None for a function of one's own.
      shapes: State and batch that it was made for, by shape; None in a plan read from a file.
    """

    cluster: str
    slices: tuple[SliceSummary, ...]
    batch_size: int
    arrangement: Arrangement
    layers: Layers
    starts: tuple[int, ...]
    stop: int
    meshes: tuple[tuple[PlacedMesh, ...], ...]
    programs: tuple[ProgramPlan, ...]
    program_of: tuple[tuple[int, ...], ...]
    parameters: tuple[str, ...]
    owners: tuple[StageId, ...]
    durations: StepDurations
    certificate: StageCertificate
    considered: tuple[Alternative, ...] = ()
    warnings: tuple[str, ...] = ()
    obeyed: tuple[ObeyedStage, ...] = ()
    donates_state: bool = False
    configuration: str | None = None
    shapes: Any = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def step_s(self) -> float:
        """Predicted time of a step."""
        return step_time(self.durations)

    @property
    def timeline(self) -> Timeline:
        """The step as simulated."""
        limits = [[self.slices[p.slice].limit_bytes for p in one.submeshes] for one in self.arrangement.pipelines]
        return simulate(self.durations, limits, [[m.name for m in meshes] for meshes in self.meshes])

    @property
    def parts(self) -> tuple[int, ...]:
        """The micro-batches of a step, in order, by their examples: `step.in_parts(plan.parts)` computes the same."""
        return tuple(p.micro_batch_size for p in self.arrangement.pipelines for _ in range(p.num_micro_batches))

    @property
    def num_devices(self) -> int:
        """Devices of the cluster, also those that are left out."""
        return sum(s.num_devices for s in self.slices)

    @property
    def device_types(self) -> tuple[str, ...]:
        """The kind of devices of each slice."""
        return tuple(s.device for s in self.slices)

    @property
    def device_flops(self) -> float:
        """Floating-point operations of a device in a step, on average of all devices."""
        total = 0.0
        for one in self.stage_ids:
            program, count = self.plan_of(one), self.pipeline(one.pipeline).num_micro_batches
            total += program.estimate.flops * program.num_devices * count
        return total / self.num_devices

    def mesh_of(self, one: StageId) -> PlacedMesh:
        """Where a stage runs."""
        meshes = self.meshes[one.pipeline]
        return meshes[one.stage % len(meshes)]

    def plan_of(self, one: StageId) -> ProgramPlan:
        """How a stage is sharded."""
        return self.programs[self.program_of[one.pipeline][one.stage]]

    def pipeline(self, number: int) -> Pipeline:
        """A pipeline of the arrangement."""
        return self.arrangement.pipelines[number]

    @property
    def stage_ids(self) -> tuple[StageId, ...]:
        """All stages."""
        return tuple(StageId(p, s) for p, one in enumerate(self.arrangement.pipelines) for s in range(len(one.stages)))
