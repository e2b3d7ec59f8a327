"""All stages of a plan, each on its devices, and what belongs to which of them."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.errors import PlanMismatchError, StageError
from autoshard.pipelines.cost.stage import TracedStage, check_stage
from autoshard.pipelines.cost.traced_model import TracedModel, trace_model
from autoshard.pipelines.plan.parameter_owners import StageId
from autoshard.pipelines.plan.pipeline_plan import PipelinePlan
from autoshard.pipelines.run.device_meshes import DeviceMeshes
from autoshard.pipelines.run.stage_runner import Leaf, StageRunner
from autoshard.pipelines.run.update import LeafPlacement
from autoshard.pipelines.schedule.tasks import ScheduleKind
from autoshard.pipelines.search.arrangement import Pipeline, Stage
from autoshard.pipelines.split.counters import added_to_mutable
from autoshard.pipelines.split.forward import Forward
from autoshard.pipelines.split.layer_boundaries import LayerBoundaries
from autoshard.train_step import TrainStep


class StageRunners:
    """The stages of a plan as they run.

    Args:
      plan: What to do. step: The training step that was planned. device_meshes: The devices.
      state, batch: Arrays or shapes.

    Attributes:
      plan, device_meshes: As given. mutable_names: Paths of the leaves of the mutable state. metric_types: The type of
        each metric's mean, by name. shapes: Of the parameters, by path.

    Raises:
      PlanMismatchError: The step is not what was planned.
    """

    def __init__(self, plan: PipelinePlan, step: TrainStep, device_meshes: DeviceMeshes, state: Any, batch: Any):
        self.plan, self.device_meshes = plan, device_meshes
        models = _models(plan, step, state, batch)
        self._runners: dict[StageId, StageRunner] = {}
        traced: dict[tuple[Stage, int, int], TracedStage] = {}  # pipelines that are alike share their programs
        for one in plan.stage_ids:
            pipeline = plan.pipeline(one.pipeline)
            part, model = pipeline.stages[one.stage], models[pipeline.micro_batch_size]
            key = part, pipeline.micro_batch_size, plan.program_of[one.pipeline][one.stage]
            if key not in traced:
                program = model.stages.program(part.start, part.stop)
                traced[key] = check_stage(model.forward, program, part.rematerialise, plan.plan_of(one))
            splits = pipeline.schedule is ScheduleKind.ZERO_BUBBLE
            self._runners[one] = StageRunner(traced[key], plan.plan_of(one), device_meshes.mesh_of(one), splits)
        forward: Forward = next(iter(models.values())).forward
        self.mutable_names = forward.mutable.names
        self._added = {
            size: dict(zip(self.mutable_names, added_to_mutable(model.forward), strict=True))
            for size, model in models.items()
        }
        self.metric_types = dict(zip(forward.metrics.names, map(self._mean_type, forward.metric_dtypes), strict=True))
        self.shapes = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype)
            for name, x in zip(plan.parameters, jax.tree.leaves(state.params), strict=True)
        }

    def __iter__(self) -> Iterator[tuple[StageId, StageRunner]]:
        return iter(self._runners.items())

    def __getitem__(self, one: StageId) -> StageRunner:
        return self._runners[one]

    def _mean_type(self, dtype: Any) -> Any:
        """The type of a metric's mean: of several whole numbers it is no whole number."""
        return dtype if jnp.issubdtype(dtype, jnp.inexact) or len(self.plan.parts) == 1 else jnp.dtype(jnp.float32)

    def parameter_owners(self) -> tuple[dict[str, LeafPlacement], dict[str, LeafPlacement]]:
        """Where each parameter lives, and its sum of gradients, by path."""
        parameters, sums = {}, {}
        for name, owner in zip(self.plan.parameters, self.plan.owners, strict=True):
            runner, submesh = self[owner], self.device_meshes.submesh_of(owner)
            parameters[name] = LeafPlacement(submesh, _sharding(runner.params.get(name), runner.whole))
            sums[name] = LeafPlacement(submesh, _sharding(runner.new_sums.get(name), parameters[name].sharding))
        return parameters, sums

    def mutable_owner(self, name: str) -> LeafPlacement:
        """Where a leaf of the mutable state lives; everywhere, if no stage touches it."""
        one = self.mutable_stage(name)
        if one is None:
            return LeafPlacement(None, self.device_meshes.everywhere)
        runner = self[one]
        return LeafPlacement(
            self.device_meshes.submesh_of(one), (runner.new_mutable.get(name) or runner.mutable[name]).sharding
        )

    def mutable_stage(self, name: str) -> StageId | None:
        """The stage of the first pipeline that changes or reads a leaf of the mutable state."""
        first = [o for o, _ in self if o.pipeline == 0]
        changing = [o for o in first if name in self[o].new_mutable]
        return next(iter(changing or [o for o in first if name in self[o].mutable]), None)

    def is_changed(self, name: str) -> bool:
        """Whether any stage changes a leaf of the mutable state."""
        return any(name in runner.new_mutable for _, runner in self)

    def added(self, name: str, pipeline: Pipeline) -> int | None:
        """What a micro-batch of a pipeline adds to a leaf of the mutable state; None if it is no counter."""
        return self._added[pipeline.micro_batch_size][name]

    def counted(self, name: str, pipelines: Sequence[Pipeline]) -> int | None:
        """What pipelines add to a leaf of the mutable state in a step; None if it is no counter in all of the plan."""
        if any(self.added(name, p) is None for p in self.plan.arrangement.pipelines):
            return None
        return sum((self.added(name, p) or 0) * p.num_micro_batches for p in pipelines)

    def metric_stage(self, name: str) -> StageId:
        """The first stage that makes a metric."""
        return next(one for one, runner in self if name in runner.metrics)

    def readers(self, one: StageId, name: str) -> Iterator[tuple[StageId, Leaf]]:
        """The later stages of a pipeline that read an output of one, and how."""
        for later in range(one.stage + 1, len(self.plan.pipeline(one.pipeline).stages)):
            reader = StageId(one.pipeline, later)
            if name in self[reader].inputs:
                yield reader, self[reader].inputs[name]

    def source(self, one: StageId, name: str) -> StageId:
        """The stage that makes an input of another.

        Raises:
          StageError: There is none.
        """
        for earlier in range(one.stage):
            source = StageId(one.pipeline, earlier)
            if name in self[source].outputs:
                return source
        raise StageError(f"No stage before {one} makes {name}; the plan contradicts itself. Plan again.")


def _models(plan: PipelinePlan, step: TrainStep, state: Any, batch: Any) -> dict[int, TracedModel]:
    """The model as traced for each size of micro-batch."""
    cuts = LayerBoundaries(plan.starts, plan.stop, plan.layers.names)
    models: dict[int, TracedModel] = {}
    for size in dict.fromkeys(p.micro_batch_size for p in plan.arrangement.pipelines):
        models[size] = model = trace_model(step, state, batch, size, cuts)
        if model.forward.params.names != plan.parameters or model.stages.cuts.starts != plan.starts:
            raise PlanMismatchError(
                "The training step is no longer the one that was planned: its loss has other parameters or other "
                "layers. Plan again."
            )
    return models


def _sharding(leaf: Leaf | None, otherwise: Any) -> Any:
    return otherwise if leaf is None else leaf.sharding
