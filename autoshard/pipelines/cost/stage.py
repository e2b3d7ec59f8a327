"""One stage on one mesh: planned as a program of its own, and what each of its phases costs."""

import bisect
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from autoshard.cluster.mesh import LogicalMesh
from autoshard.compiler.schedule import Schedule
from autoshard.errors import AnnotationError
from autoshard.graph.layout import Layout, all_layouts, shard_bytes, spec_shard_bytes
from autoshard.pipelines.split.forward import Forward
from autoshard.pipelines.split.joint_function import JointFunction, joint_arguments, joint_function
from autoshard.pipelines.split.phase_partition import PhasePartition, partition_phases
from autoshard.pipelines.split.residual_layouts import residual_layouts
from autoshard.pipelines.split.stage_program import StageProgram
from autoshard.planner.allowed import Restrictions
from autoshard.planner.asked import Asked, asked_of, refusals
from autoshard.planner.estimate import Estimate
from autoshard.planner.program import Program, prepare
from autoshard.plans.apply import check
from autoshard.plans.make import Origin, Posed, plan_posed
from autoshard.plans.options import PlanOptions
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.question import Question, Restrict, until_s
from autoshard.trace.trace import Trace, trace
from autoshard.trace.walk import equation_numbers, size_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class LeafPositions:
    """Positions of a joint program's flat arguments and results, by what they are; see `JointFunction`."""

    sums: range
    params: range
    mutable: range
    batch: range
    key: range
    inputs: range
    factor: int
    gradients: range
    new_sums: range
    outputs: range
    input_gradients: range
    new_mutable: range
    metrics: range


@dataclasses.dataclass(frozen=True, slots=True)
class TracedStage:
    """A stage ready to be planned on any mesh.

    Attributes:
      program: The layers. function, arguments: The joint function, and the shapes that it takes.
      trace: Its trace. slots: Where its leaves are. prepared: Its graph, grouped.
      asked: What annotated blocks ask for in it; None for nothing.
      fused_backward, split_backward: Its phases, with the gradients of weights in the backward phase, and apart.
    """

    program: StageProgram
    function: JointFunction
    arguments: tuple[Any, ...] = dataclasses.field(repr=False)
    trace: Trace = dataclasses.field(repr=False)
    slots: LeafPositions = dataclasses.field(repr=False)
    prepared: Program = dataclasses.field(repr=False)
    fused_backward: PhasePartition = dataclasses.field(repr=False)
    split_backward: PhasePartition = dataclasses.field(repr=False)
    asked: Asked | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class StageCost:
    """What a planned stage costs: see `LayerCost`, of which this is the sum, for the fields."""

    forward_s: float
    backward_s: float
    weight_s: float
    weight_bytes: float
    gradient_bytes: float
    residual_bytes: float
    weight_residual_bytes: float
    input_bytes: float
    working_bytes: float
    peak_bytes: float


def trace_stage(forward: Forward, program: StageProgram, rematerialise: bool = False) -> TracedStage:
    """Traces forward and backward pass of a stage."""
    function = joint_function(forward, program, rematerialise)
    arguments = joint_arguments(forward, program)
    traced = trace(function, arguments, (0,))
    return _traced_stage(program, function, arguments, traced, forward.micro_batch_size)


def _traced_stage(
    program: StageProgram,
    function: JointFunction,
    arguments: tuple[Any, ...],
    traced: Trace,
    micro_batch_size: int,
) -> TracedStage:
    slots = _slots(arguments, jax.eval_shape(function, *arguments))
    parts = [parts_of(traced, slots, splits_backward) for splits_backward in (False, True)]
    prepared = prepare(traced.graph)
    asked = asked_of(prepared, _of_examples(traced, slots, micro_batch_size))
    return TracedStage(program, function, arguments, traced, slots, prepared, *parts, asked=asked)


def _of_examples(traced: Trace, slots: LeafPositions, micro_batch_size: int) -> list[int]:
    """The arguments whose first dimension is the examples, or is made of them and others: the batch, and of the values
    that cross the stage's borders all but those of another length.
    """
    shapes = [traced.graph.values[a.value].shape for a in traced.graph.arguments]
    crossing = [n for n in (*slots.inputs, *slots.gradients) if shapes[n] and shapes[n][0] % micro_batch_size == 0]
    return [*slots.batch, *crossing]


def check_stage(forward: Forward, program: StageProgram, rematerialise: bool, plan: ProgramPlan) -> TracedStage:
    """A stage traced to be run by `plan`.

    Raises:
      PlanMismatchError: It is not the stage that was planned.
    """
    function = joint_function(forward, program, rematerialise)
    arguments = joint_arguments(forward, program)
    traced = check(plan, function, arguments)
    return _traced_stage(program, function, arguments, traced, forward.micro_batch_size)


def parts_of(traced: Trace, slots: LeafPositions, splits_backward: bool) -> PhasePartition:
    """The parts of a traced joint function."""
    return partition_phases(
        traced.jaxpr.jaxpr,
        forward_outs=[*slots.outputs, *slots.new_mutable, *slots.metrics],
        input_outs=slots.input_gradients,
        sum_outs=slots.new_sums,
        saved_inputs=slots.inputs,
        splits_backward=splits_backward,
    )


def _slots(arguments: Sequence[Any], results: Sequence[Any]) -> LeafPositions:
    def ranges(trees: Sequence[Any]) -> list[range]:
        ends = np.cumsum([0, *(len(jax.tree.leaves(t)) for t in trees)]).tolist()
        return [range(a, b) for a, b in zip(ends, ends[1:], strict=False)]

    sums, params, mutable, batch, key, inputs, factor, gradients = ranges(arguments)
    return LeafPositions(
        sums, params, mutable, batch, key, inputs, factor.start, gradients, *ranges(results)
    )  # fmt: skip


def plan_stage(
    stage: TracedStage,
    mesh: LogicalMesh,
    cluster_name: str,
    budget_bytes: float,
    options: PlanOptions,
    shards_weights: bool = False,
    branches: bool = True,
) -> ProgramPlan:
    """The plan of a stage on one mesh, in the order of least memory, in which its phases are compiled: times add up.

    Args:
      budget_bytes: Memory per device for one micro-batch at a time; inf for no limit.
      shards_weights: Whether every weight must be split over as many devices as can be.
      branches: See `Question`.

    Raises:
      MemoryBudgetError, SolverError: As for `autoshard.plan`.
    """
    restrict = _weights_split(stage) if shards_weights else None
    if stage.asked is not None and (reason := next(refusals(stage.prepared, mesh, stage.asked), None)) is not None:
        raise AnnotationError(f"Every product inside an annotation must obey it, but {reason}, on {mesh}.")
    started = time.perf_counter()
    question = Question(
        traced=stage.trace,
        program=stage.prepared,
        budget_bytes=budget_bytes,
        pins=None,
        options=dataclasses.replace(options, schedule=Schedule.LEAST_MEMORY),
        restrict=restrict,
        started=started,
        until_s=until_s(options, started),
        asked=stage.asked,
        branches=branches,
    )
    return plan_posed(Posed(question, [mesh], Origin(stage.function.__name__, cluster_name, (0,))))


def _weights_split(stage: TracedStage) -> Restrict:
    """Allows only the layouts of weights that leave least on each device."""
    params, arguments, values = set(stage.slots.params), stage.trace.graph.arguments, stage.trace.graph.values

    def restrict(program: Program, mesh: LogicalMesh) -> Restrictions:
        share = lambda layout: shard_bytes(1.0, layout, mesh.shape)

        @functools.cache
        def least(shape: tuple[int, ...]) -> float:
            return min(map(share, all_layouts(shape, mesh.shape)))

        def is_allowed(i: int, layout: Layout) -> bool:
            return i not in params or share(layout) == least(values[arguments[i].value].shape)

        return Restrictions(argument=is_allowed)

    return restrict


def stage_cost(stage: TracedStage, plan: ProgramPlan) -> StageCost:
    """What each phase of a planned stage takes, and what it holds."""
    jaxpr, slots, parts = stage.trace.jaxpr.jaxpr, stage.slots, stage.split_backward
    forward_s, backward_s, weight_s = _phase_times(jaxpr, parts, plan.estimate)
    sizes = dict(plan.axes)
    local = lambda n: spec_shard_bytes(size_bytes(jaxpr.invars[n]), plan.arguments[n].entries, sizes)
    total = lambda positions: float(sum(map(local, positions)))
    later = {*stage.fused_backward.backward.given}
    held_inputs = total([n for n in (*slots.inputs, *slots.mutable) if n in later])
    residual = _residual_bytes(jaxpr, plan, stage.fused_backward.residuals) + held_inputs
    weights, sums, inputs = total(slots.params), total(slots.sums), total(slots.inputs)
    resident = weights + sums + total(slots.batch) + total([n for n in slots.mutable if n not in later])
    peak = plan.estimate.peak_bytes
    return StageCost(
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=weight_s,
        weight_bytes=weights,
        gradient_bytes=sums,
        residual_bytes=residual,
        weight_residual_bytes=_residual_bytes(jaxpr, plan, (*parts.weight_residuals, *parts.kept_residuals)),
        input_bytes=inputs,
        working_bytes=max(0.0, peak - resident - residual),
        peak_bytes=peak,
    )


def _residual_bytes(jaxpr: Any, plan: ProgramPlan, held: Sequence[Any]) -> float:
    """Bytes on one device of variables in the layouts that the plan gives them; whole where it gives none."""
    layouts, sizes = residual_layouts(jaxpr, plan.interface, held), dict(plan.axes)
    return float(
        sum(
            size_bytes(v) if e is None else spec_shard_bytes(size_bytes(v), e, sizes)
            for v, e in zip(held, layouts, strict=True)
        )
    )


def _phase_times(jaxpr: Any, parts: PhasePartition, estimate: Estimate) -> tuple[float, float, float]:
    """Time of the forward and backward pass, and of the gradients of weights.

    Where an equation serves several, it counts for the first. Collectives behind the last equation belong to the sums.
    """
    numbers = equation_numbers(jaxpr)
    forward, backward = set(parts.forward.equations), set(parts.backward.equations)
    times = [0.0, 0.0, 0.0]

    def add(equation: int | None, time_s: float) -> None:
        i = None if equation is None else bisect.bisect_right(numbers, equation) - 1
        phase = 2 if i is None else 0 if i in forward else 1 if i in backward else 2
        times[phase] += time_s

    for item in estimate.compute:
        add(item.equation, item.compute_s)
    for item in estimate.communication:
        add(item.equation, item.time_s)
    return times[0], times[1], times[2]
