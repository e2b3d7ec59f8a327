"""`autoshard.plan` for a training step that may be cut: layers, costs, search, and a plan of every stage.

TrainStep -> layers and their costs (pricing) -> arrangement (search) -> one plan a stage -> PipelinePlan
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.cluster import Cluster, LogicalMesh, Slice
from autoshard.errors import SolverError, StageError
from autoshard.garbage import collection_paused
from autoshard.pipelines.cost.interval_costs import IntervalCostTable
from autoshard.pipelines.cost.pricing import PricedLayers, layer_cost, optimizer_ratio, weight_total_bytes
from autoshard.pipelines.cost.stage import TracedStage, plan_stage, stage_cost, trace_stage
from autoshard.pipelines.cost.table import LayerCost
from autoshard.pipelines.cost.traced_model import TracedModel
from autoshard.pipelines.plan.arrange import Arranged, StagedTask, arrange
from autoshard.pipelines.plan.asked import obeyed_stages
from autoshard.pipelines.plan.parameter_owners import StageId, choose_owners
from autoshard.pipelines.plan.pipeline_plan import PipelinePlan, PlacedMesh, SliceSummary, StageCertificate
from autoshard.pipelines.schedule.durations import StageDurations, StepDurations
from autoshard.pipelines.schedule.orders import in_flight_bound
from autoshard.pipelines.search.arrangement import Arrangement, Pipeline, Submesh
from autoshard.pipelines.search.options import StageOptions
from autoshard.pipelines.split.counters import added_to_mutable
from autoshard.pipelines.split.forward import Forward
from autoshard.plans.gaps import fits
from autoshard.plans.mean_loss import why_no_mean_of
from autoshard.plans.options import PlanOptions
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.question import report
from autoshard.trace.walk import size_bytes
from autoshard.train_step import TrainStep


@dataclasses.dataclass(frozen=True, slots=True)
class _PlannedStage:
    """A stage with its plan and what it costs."""

    traced: TracedStage
    plan: ProgramPlan
    cost: LayerCost


def plan_staged(
    step: TrainStep,
    state: Any,
    batch: Any,
    cluster: Cluster,
    options: PlanOptions,
    stages: StageOptions,
    memory_budget_bytes: float | None = None,
    arrangement: Arrangement | None = None,
    *,
    donates_state: bool = False,
    configuration: str | None = None,
) -> PipelinePlan:
    """Plans a training step over all slices of a cluster.

    Args:
      arrangement: What to run where, if it is not to be searched; its mesh options count those of `pricing`.
      All others: See `StagedTask`.

    Raises:
      StageError: Nothing fits; names the slice or the layer, and what would help.
      MemoryBudgetError: A stage cannot be planned in its memory, or the limit is not positive.
      SolverError: A stage cannot be planned in time.
    """
    task = StagedTask(step, state, batch, cluster, options, stages, memory_budget_bytes, donates_state, configuration)
    return plan_arranged(arrange(task, arrangement))


@collection_paused()
def plan_arranged(arranged: Arranged) -> PipelinePlan:
    """Plans each distinct stage of an arrangement as a whole.

    Raises:
      StageError: Stages would share mutable state.
      MemoryBudgetError, SolverError: A stage cannot be planned in its memory, or not in time.
    """
    task, priced, arrangement, found = arranged.task, arranged.priced, arranged.arrangement, arranged.found
    state, batch, cluster, options = task.state, task.batch, task.cluster, task.options
    limits, started, by_layers = arranged.limits_bytes, arranged.started, arranged.durations
    for p, pipeline in enumerate(arrangement.pipelines):
        _check_mutable(priced.models[pipeline.micro_batch_size], p, pipeline)
    intervals = IntervalCostTable(priced.layers, priced.table)
    searched_s, bound_s = arranged.step_s, arranged.bound_s
    ratio = optimizer_ratio(state)
    planned: dict[tuple[Any, ...], _PlannedStage] = {}
    keys: list[list[tuple[Any, ...]]] = []
    for p, pipeline in enumerate(arrangement.pipelines):
        keys.append([])
        for s, stage in enumerate(pipeline.stages):
            submesh = pipeline.submeshes[s % len(pipeline.submeshes)]
            mesh = priced.table.options[submesh.option].mesh
            budget = _budget(intervals, arrangement, by_layers, StageId(p, s), limits[submesh.slice])
            key = (stage, pipeline.micro_batch_size, mesh)
            keys[-1].append(key)
            if key in planned:
                continue
            report(options, started, "plan", f"layers {stage.start} to {stage.stop - 1} on {mesh}")
            model = priced.models[pipeline.micro_batch_size]
            traced = trace_stage(model.forward, model.stages.program(stage.start, stage.stop), stage.rematerialise)
            plan = fitting_plan(traced, mesh, cluster.name, budget, options)
            cost = layer_cost(stage_cost(traced, plan), mesh, ratio, weight_total_bytes(traced))
            planned[key] = _PlannedStage(traced, plan, cost)
    distinct = list(planned)
    durations = _with_plans(by_layers, [[planned[k].cost for k in row] for row in keys], len(arrangement.pipelines))
    forward = next(iter(priced.models.values())).forward
    owners = _owners(forward, arrangement, [[planned[k].traced for k in row] for row in keys])
    slices = _slices(cluster, limits)
    cuts = next(iter(priced.models.values())).stages.cuts
    search_s = time.perf_counter() - started
    gap = (searched_s - bound_s) / searched_s if searched_s and bound_s else math.inf
    return PipelinePlan(
        cluster=cluster.name,
        slices=slices,
        batch_size=arrangement.batch_size,
        arrangement=arrangement,
        layers=priced.layers,
        starts=cuts.starts,
        stop=cuts.stop,
        meshes=tuple(
            tuple(_placed_mesh(submesh, priced, slices, cluster.slices()) for submesh in p.submeshes)
            for p in arrangement.pipelines
        ),
        programs=tuple(planned[k].plan for k in distinct),
        program_of=tuple(tuple(distinct.index(k) for k in row) for row in keys),
        parameters=forward.params.names,
        owners=owners,
        durations=durations,
        certificate=StageCertificate(searched_s, bound_s, gap, search_s),
        considered=() if found is None else found.considered,
        warnings=(
            *priced.warnings,
            *_other_loss(task, arrangement),
            *_same_in_pipelines(forward, arrangement),
            *_left_out(arrangement, slices),
        ),
        obeyed=obeyed_stages(forward.asked, arrangement, slices),
        donates_state=task.donates_state,
        configuration=task.configuration,
        shapes=jax.eval_shape(lambda *given: given, state, batch),
    )


BUDGETED_S = 10.0
"""How long the best plan of a stage under its memory limit is sought, where one that fits is known already."""


def fitting_plan(
    stage: TracedStage, mesh: LogicalMesh, cluster_name: str, budget_bytes: float, options: PlanOptions
) -> ProgramPlan:
    """The plan of a stage within its memory.

    Without a limit the problem is easy; so that is tried first, and then with every weight split. Only if the first
    does not fit, the limit itself is put to the solver, which takes long: not too long, if the second fits.

    Raises:
      MemoryBudgetError, SolverError: Nothing fits, or nothing was found in time.
    """
    fastest = plan_stage(stage, mesh, cluster_name, math.inf, options)
    if fits(fastest.estimate, budget_bytes):
        return fastest
    lean = plan_stage(stage, mesh, cluster_name, math.inf, options, shards_weights=True)
    if not fits(lean.estimate, budget_bytes):
        return plan_stage(stage, mesh, cluster_name, budget_bytes, options)
    shorter = dataclasses.replace(options, mesh_limit_s=min(options.mesh_limit_s, BUDGETED_S))
    try:
        limited = plan_stage(stage, mesh, cluster_name, budget_bytes, shorter)
    except SolverError:
        return lean
    return min(lean, limited, key=lambda p: p.estimate.step_s)


def _check_mutable(model: TracedModel, number: int, pipeline: Pipeline) -> None:
    """Refuses stages of which one reads mutable state that another changes: the next micro-batch is on its way in the
    first before this one has reached the second. Of counters the first knows how they go on.
    """
    added = added_to_mutable(model.forward)
    interfaces = [model.stages.program(stage.start, stage.stop).interface for stage in pipeline.stages]
    changed_by = {n: s for s, interface in enumerate(interfaces) for n in interface.mutable_out}
    for s, interface in enumerate(interfaces):
        for n in interface.mutable_in:
            if changed_by.get(n, s) != s and added[n] is None:
                raise StageError(
                    f"The mutable state `{model.forward.mutable.names[n]}` is read by {StageId(number, s)} and changed "
                    f"by {StageId(number, changed_by[n])}. Stages cannot share mutable state within a step; plan with "
                    "one stage (StageOptions(num_stages=1)), or let each part of the model keep its own."
                )


def _budget(
    intervals: IntervalCostTable, arrangement: Arrangement, durations: StepDurations, one: StageId, limit_bytes: float
) -> float:
    """Memory for one micro-batch of a stage: the limit, less what the submesh holds besides.

    That is the optimizer's state, the residuals of other micro-batches in flight, and other stages of the submesh.
    """
    own, pipeline = durations.pipelines[one.pipeline], arrangement.pipelines[one.pipeline]
    part, submesh = pipeline.stages[one.stage], pipeline.submeshes[one.stage % len(pipeline.submeshes)]
    costs = intervals.costs(submesh.option, pipeline.micro_batch_size)
    used = float(costs.optimizer_bytes[part.start, part.stop]) / len(arrangement.pipelines)
    for s, other in enumerate(own.stages):
        if own.schedule.submesh_of(s) == own.schedule.submesh_of(one.stage):
            is_other = s != one.stage
            used += max(0, in_flight_bound(own.schedule, s) - (not is_other)) * other.residual_bytes
            used += other.fixed_bytes * is_other
    return max(1.0, limit_bytes - used)


def _with_plans(durations: StepDurations, costs: Sequence[Sequence[LayerCost]], num_pipelines: int) -> StepDurations:
    """`durations` with the figures of the stages as planned in place of the sums over their layers."""
    pipelines = []
    for own, row in zip(durations.pipelines, costs, strict=True):
        stages = []
        for cost in row:
            stages.append(
                StageDurations(
                    forward_s=cost.forward_s,
                    backward_s=cost.backward_s,
                    weight_s=cost.weight_s,
                    residual_bytes=cost.residual_bytes,
                    weight_residual_bytes=cost.weight_residual_bytes,
                    fixed_bytes=cost.weight_bytes + cost.gradient_bytes + cost.optimizer_bytes / num_pipelines,
                    working_bytes=cost.working_bytes,
                )
            )
        update_s = tuple(cost.update_s / num_pipelines for cost in row)
        pipelines.append(dataclasses.replace(own, stages=tuple(stages), update_s=update_s))
    return StepDurations(tuple(pipelines))


def _owners(forward: Any, arrangement: Arrangement, traced: Sequence[Sequence[TracedStage]]) -> tuple[StageId, ...]:
    readers: list[list[StageId]] = [[] for _ in forward.params.names]
    for p, row in enumerate(traced):
        for s, stage in enumerate(row):
            for n in stage.program.interface.params:
                readers[n].append(StageId(p, s))
    sizes = [float(size_bytes(v)) for v in forward.param_vars]
    return choose_owners(sizes, readers, len(arrangement.pipelines))


def _slices(cluster: Cluster, limits: Sequence[float]) -> tuple[SliceSummary, ...]:
    found, first = [], 0
    for part, limit in zip(cluster.slices(), limits, strict=True):
        device = part.device_type
        found.append(
            SliceSummary(part.name, device.name, part.num_devices, first, device.memory_bytes, limit, part.torus)
        )
        first += part.num_devices
    return tuple(found)


def _placed_mesh(
    submesh: Submesh, priced: PricedLayers, slices: Sequence[SliceSummary], hardware: Sequence[Slice]
) -> PlacedMesh:
    mesh, own = priced.table.options[submesh.option].mesh, slices[submesh.slice]
    device_at = hardware[submesh.slice].order
    places = [submesh.first_device + n for n in mesh.device_numbers]
    order = tuple(own.first_device + (device_at[place] if device_at else place) for place in places)
    first = own.first_device + submesh.first_device
    if order == tuple(range(first, first + mesh.num_devices)):
        order = ()
    last = submesh.first_device + mesh.num_devices
    name = (
        f"{own.name}[{submesh.first_device}]" if mesh.num_devices == 1 else f"{own.name}[{submesh.first_device}:{last}]"
    )
    axes = tuple((axis.name, axis.size) for axis in mesh.axes)
    return PlacedMesh(first, axes, name, order)


def _other_loss(task: StagedTask, arrangement: Arrangement) -> tuple[str, ...]:
    """A warning where the mean over micro-batches may be another loss than that of the whole batch."""
    count = sum(pipeline.num_micro_batches for pipeline in arrangement.pipelines)
    is_as_written = count == 1 or bool(task.step.parts)
    why = None if is_as_written else why_no_mean_of(task.step, task.state, task.batch)
    if why is None:
        return ()
    return (
        f"The batch is run in {count} micro-batches, but the loss is not known to be a plain mean over examples, "
        f"because of {why}: the mean over micro-batches may be another loss. For the loss of the whole batch, ask for "
        "one micro-batch: StageOptions(num_pipelines=1, num_micro_batches=1) (plan.stages).",
    )


def _same_in_pipelines(forward: Forward, arrangement: Arrangement) -> tuple[str, ...]:
    """A warning where pipelines side by side begin with the same keys or whole numbers, which change in a way that is
    not known beforehand.
    """
    count = len(arrangement.pipelines)
    leaves = zip(forward.mutable.names, forward.mutable_vars, added_to_mutable(forward), strict=True)
    names = [
        f"`{name}`" for name, v, added in leaves if added is None and not jnp.issubdtype(v.aval.dtype, jnp.inexact)
    ]
    if count == 1 or not names:
        return ()
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"Each of {count} pipelines side by side begins a step with the same mutable state, and what the first makes "
        f"of {', '.join(names[:3])}{more} is kept: random numbers drawn by it are the same in all of them. Draw by the "
        "`rng` of the loss, or by a counter, or ask for one pipeline: StageOptions(num_pipelines=1) (plan.stages).",
    )


def _left_out(arrangement: Arrangement, slices: Sequence[SliceSummary]) -> tuple[str, ...]:
    used = {submesh.slice for p in arrangement.pipelines for submesh in p.submeshes}
    return tuple(
        f"Slice `{own.name}` ({own.num_devices} x {own.device}) is left out: with it the step would take longer."
        for n, own in enumerate(slices)
        if n not in used
    )
