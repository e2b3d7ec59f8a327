"""The plan of one program: trace, formulate, solve, decode; over one mesh or over all logical meshes of a cluster."""

import dataclasses
import glob
import math
import numbers
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from jax.sharding import PartitionSpec

from autoshard.cluster import Cluster, DeviceType, LogicalMesh, Slice
from autoshard.errors import ClusterError, ConfigError, MemoryBudgetError, MeshError, NotFasterError
from autoshard.garbage import collection_paused
from autoshard.graph.layout import spec_entries
from autoshard.interrupts import stop_on_signals
from autoshard.planner.asked import Asked
from autoshard.planner.build import Formulation
from autoshard.planner.close import close_choices
from autoshard.planner.decode import Evaluation, decode, evaluate
from autoshard.planner.obeyed import obeyed
from autoshard.planner.profile import step_profile
from autoshard.planner.program import Program, prepare
from autoshard.plans.annotated import asked_on, refuse_stages
from autoshard.plans.found import NO_MEMORY, NOT_FASTER, Found
from autoshard.plans.gaps import excess
from autoshard.plans.host_memory import host_warnings, require_host_link
from autoshard.plans.indivisible import indivisible, not_held
from autoshard.plans.large_constants import large_constants
from autoshard.plans.logical_meshes import logical_meshes, searched_and_further, several_meshes
from autoshard.plans.no_plan import no_plan_error
from autoshard.plans.options import PlanOptions
from autoshard.plans.placing import placement_summary
from autoshard.plans.program_plan import CloseChoice, MeshCandidate, PlannedTensor, ProgramPlan
from autoshard.plans.question import Question, Restrict, report, until_s
from autoshard.plans.search import search
from autoshard.plans.unaligned import unaligned
from autoshard.solver.problem import Certificate
from autoshard.trace.flatten import TraceOptions
from autoshard.trace.trace import KeptTrace, Trace, trace


class Request(TypedDict, total=False):
    """What `autoshard.plan` and the baselines hand on as it is; see `autoshard.plan`."""

    mesh: Mapping[str, int] | None
    memory_budget_bytes: float | None
    pins: Mapping[str, PartitionSpec] | None
    solution: str | os.PathLike[str] | None
    configuration: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """What a plan tells of where it comes from; see `ProgramPlan` for the fields."""

    name: str
    cluster: str
    donate_argnums: tuple[int, ...] = ()
    configuration: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Posed:
    """A question, and what its answer needs besides.

    Attributes:
      question: What is to be planned. meshes: The logical meshes that are searched. origin: Of the plan.
      solution: A file that solves the problem of the only mesh; None to solve the problem here.
      further: The meshes that the search may come by after these.
    """

    question: Question
    meshes: Sequence[LogicalMesh]
    origin: Origin
    solution: str | os.PathLike[str] | None = None
    further: Sequence[LogicalMesh] = ()

    def on(self, mesh: LogicalMesh) -> "Posed":
        """The same on one mesh alone."""
        return dataclasses.replace(self, meshes=[mesh], further=())


def best_of(posed: Posed) -> Found:
    """The outcome of the search for a plan, which has one.

    Raises:
      MemoryBudgetError, SolverError: There is none.
      NotFasterError: There is none that costs less than what it had to beat.
    """
    with stop_on_signals() as stop:
        found = search(posed.question, posed.meshes, posed.solution, stop, posed.further)
    if found.best is None:
        if stop.requested:
            raise KeyboardInterrupt
        verdicts = {c.verdict for c in found.candidates}
        if NOT_FASTER in verdicts and verdicts <= {NOT_FASTER, NO_MEMORY}:
            raise NotFasterError(
                f"No plan costs less than {posed.question.to_beat_s:.4g} s, which it had to beat, on any of the "
                f"{len(posed.meshes)} meshes that were searched. Keep the plan that takes so long."
            )
        schedule = posed.question.schedules(posed.meshes[0])[-1]
        raise no_plan_error(dataclasses.replace(posed.question, schedule=schedule), posed.meshes)
    return found


def plan_found(posed: Posed, found: Found) -> ProgramPlan:
    """The plan that a search has found."""
    question = posed.question
    report(question.options, question.started, "decode", "")
    formulation, chosen = found.winner
    plan = plan_of_choices(
        question.traced,
        formulation,
        chosen.chosen,
        origin=posed.origin,
        certificate=found.certificate(question.options, time.perf_counter() - question.started),
        budget_bytes=None if math.isinf(question.budget_bytes) else question.budget_bytes,
        candidates=found.candidates,
        warnings=found.warnings,
        hardware=question.hardware,
        asked=question.asked,
        evaluation=found.evaluated,
    )
    own = tuple(host_warnings(question.options, formulation, plan.estimate))
    return dataclasses.replace(plan, warnings=(*plan.warnings, *own))


def plan_posed(posed: Posed) -> ProgramPlan:
    """The best plan on any of the meshes."""
    return plan_found(posed, best_of(posed))


def plan_function(
    fn: Callable[..., Any],
    args: Sequence[Any],
    cluster: Cluster,
    *,
    start: ProgramPlan | Mapping[str, PartitionSpec] | None = None,
    donate_argnums: tuple[int, ...] = (),
    options: PlanOptions,
    answer: Callable[[Posed], ProgramPlan] = plan_posed,
    **request: Unpack[Request],
) -> ProgramPlan:
    """Plans `fn` as one program; arguments and errors are those of `autoshard.plan` and `plan_program`."""
    started = time.perf_counter()
    traced, program = traced_program(fn, args, donate_argnums, options, started)
    plan = plan_program(
        traced,
        program,
        cluster,
        start=starting_layouts(start),
        donate_argnums=donate_argnums,
        options=options,
        started=started,
        answer=answer,
        **request,
    )
    return dataclasses.replace(plan, kept_trace=KeptTrace(fn, args, traced))


def traced_program(
    fn: Callable[..., Any], args: Sequence[Any], donate_argnums: tuple[int, ...], options: PlanOptions, started: float
) -> tuple[Trace, Program]:
    """`fn` as the planner takes it; `started`: when planning began, by `time.perf_counter`."""
    report(options, started, "trace", getattr(fn, "__name__", "the function"))
    traced = trace(fn, args, donate_argnums, TraceOptions(options.while_trips))
    report(options, started, "group", f"{len(traced.graph.equations)} equations")
    return traced, prepare(traced.graph)


def starting_layouts(start: ProgramPlan | Mapping[str, PartitionSpec] | None) -> Mapping[str, PartitionSpec] | None:
    """What to start from as layouts by path pattern.

    Raises:
      ConfigError: It is neither a plan nor layouts.
    """
    if isinstance(start, ProgramPlan):
        return {glob.escape(a.name): PartitionSpec(*a.entries) for a in start.arguments}
    if start is not None and not isinstance(start, Mapping):
        raise ConfigError(
            "start= is a plan, or path patterns with their PartitionSpecs, as pins are; received "
            f"{type(start).__name__}. Read a plan file by autoshard.load(path)."
        )
    return start


def load_cluster(cluster: Cluster | str | os.PathLike[str] | None) -> Cluster:
    """A cluster from whatever `plan` accepts.

    Raises:
      ClusterError: It is neither a cluster nor a path.
    """
    if cluster is None:
        return Cluster.detect()
    if not isinstance(cluster, Cluster | str | os.PathLike):
        raise ClusterError(
            f"cluster= is an autoshard.Cluster, the path of a cluster file, or None for the devices that JAX sees; "
            f"received {type(cluster).__name__}. Which live devices run a plan is told by devices= of `plan.jit`."
        )
    return cluster if isinstance(cluster, Cluster) else Cluster.from_file(cluster)


def homogeneous_slice(cluster: Cluster) -> Slice:
    """The one slice of a homogeneous cluster.

    Raises:
      ClusterError: If the cluster holds devices of several kinds.
    """
    slices = cluster.slices()
    if len(slices) != 1:
        kinds = ", ".join(f"{s.num_devices} x {s.device_type.name}" for s in slices)
        raise ClusterError(
            f"A plan of one program covers devices of one kind, but cluster `{cluster.name}` has {kinds}. "
            "Write the training step as autoshard.TrainStep(loss_fn, optimizer), which can be cut into stages, or plan "
            "for one of the slices: write that group of nodes into a cluster file of its own."
        )
    return slices[0]


def plan_program(
    traced: Trace,
    program: Program,
    cluster: Cluster,
    *,
    mesh: Mapping[str, int] | None = None,
    donate_argnums: tuple[int, ...] = (),
    memory_budget_bytes: float | None = None,
    pins: Mapping[str, PartitionSpec] | None = None,
    options: PlanOptions | None = None,
    restrict: Restrict | None = None,
    name: str = "autoshard",
    started: float | None = None,
    solution: str | os.PathLike[str] | None = None,
    start: Mapping[str, PartitionSpec] | None = None,
    configuration: str | None = None,
    answer: Callable[[Posed], ProgramPlan] = plan_posed,
) -> ProgramPlan:
    """Plans a traced program; what `autoshard.plan` and the baselines share.

    Args:
      traced, program: The program. restrict: Of a baseline. name: Of the plan.
      started: When planning began, by `time.perf_counter`.
      answer: Makes the plan of the question that is posed; it may ask more than the solver, such as a compiler.
      All others as for `autoshard.plan`.
    """
    posed = pose(
        traced,
        program,
        cluster,
        mesh=mesh,
        donate_argnums=donate_argnums,
        memory_budget_bytes=memory_budget_bytes,
        pins=pins,
        options=options,
        restrict=restrict,
        name=name,
        started=started,
        solution=solution,
        start=start,
        configuration=configuration,
    )
    return answer(posed)


def pose(
    traced: Trace,
    program: Program,
    cluster: Cluster,
    *,
    mesh: Mapping[str, int] | None = None,
    donate_argnums: tuple[int, ...] = (),
    memory_budget_bytes: float | None = None,
    pins: Mapping[str, PartitionSpec] | None = None,
    options: PlanOptions | None = None,
    restrict: Restrict | None = None,
    name: str = "autoshard",
    started: float | None = None,
    solution: str | os.PathLike[str] | None = None,
    start: Mapping[str, PartitionSpec] | None = None,
    configuration: str | None = None,
) -> Posed:
    """The question of a plan for a traced program; arguments are those of `plan_program`."""
    options = options or PlanOptions()
    started = time.perf_counter() if started is None else started
    hardware = homogeneous_slice(cluster)
    require_host_link(options, hardware, cluster.name)
    budget_bytes = budget_of(hardware.device_type, memory_budget_bytes, options)
    meshes, asked = logical_meshes(traced.graph, hardware, mesh, pins, options), None
    if restrict is None:  # a baseline does what its own strategy says
        refuse_stages(traced.graph)
        asked, meshes = asked_on(program, meshes, mesh)
    meshes, further = searched_and_further(meshes, options)
    if solution is not None and len(meshes) > 1:
        raise MeshError(several_meshes("A solution", meshes))
    placed = hardware if options.device_order == "sought" else None
    question = Question(
        traced,
        program,
        budget_bytes,
        pins,
        options,
        restrict,
        started,
        start,
        hardware=placed,
        asked=asked,
        until_s=until_s(options, started),
    )
    if restrict is not None or solution is not None:
        further = ()
    return Posed(question, meshes, Origin(name, cluster.name, donate_argnums, configuration), solution, further)


def budget_of(device: DeviceType, memory_budget_bytes: float | None, options: PlanOptions) -> float:
    """The memory limit per device, in bytes; +inf for none.

    Raises:
      ConfigError: If it is no number.
      MemoryBudgetError: If it is not positive.
    """
    budget_bytes = memory_budget_bytes
    if budget_bytes is None:
        budget_bytes = device.memory_bytes * (1 - options.memory_reserve)
    if not isinstance(budget_bytes, numbers.Real):
        raise ConfigError(
            f"memory_budget_bytes is a number of bytes per device; received {budget_bytes!r:.60}. For 24 GB, give 24e9."
        )
    if not budget_bytes > 0:
        raise MemoryBudgetError(
            f"memory_budget_bytes must be a positive number of bytes per device, but got {budget_bytes}."
        )
    return budget_bytes


@collection_paused()
def plan_of_choices(
    traced: Trace,
    formulation: Formulation,
    choices: Sequence[int],
    *,
    origin: Origin,
    certificate: Certificate,
    budget_bytes: float | None = None,
    candidates: tuple[MeshCandidate, ...] = (),
    warnings: tuple[str, ...] = (),
    hardware: Slice | None = None,
    asked: Asked | None = None,
    evaluation: Evaluation | None = None,
) -> ProgramPlan:
    """The plan that a vector of choices says.

    Args:
      traced: The program. formulation: Its problem on one mesh. choices: One of each node of the problem.
      hardware: The slice whose devices were put in order; None where they were not.
      asked: What annotated blocks ask for.
      evaluation: The choices as the compiler has them, where that is known already.
      All others: What the plan tells besides; see `ProgramPlan`.
    """
    graph, logical = traced.graph, formulation.mesh
    names = logical.axis_names
    decoded = decode(formulation, choices)
    values = graph.values

    def planned(label, value, layout):
        return PlannedTensor(
            label, values[value].shape, values[value].dtype, spec_entries(layout, len(values[value].shape), names)
        )

    arguments = tuple(
        dataclasses.replace(
            planned(a.name, a.value, l), is_weak=getattr(v.aval, "weak_type", False), in_host=n in decoded.in_host
        )
        for n, (a, l, v) in enumerate(
            zip(graph.arguments, decoded.argument_layouts, traced.jaxpr.jaxpr.invars, strict=True)
        )
    )
    outputs = tuple(
        PlannedTensor(o.name, (), "literal", ())
        if o.value is None
        else dataclasses.replace(planned(o.name, o.value, l), in_host=o.successor_of in decoded.in_host)
        for o, l in zip(graph.outputs, decoded.output_layouts, strict=True)
    )
    warnings += tuple(
        f"No sharding rule is known for {u}; its operands and results are kept whole." for u in graph.unknown
    )
    warnings += tuple(
        f"The copy to or from the memory of the host at {line} is not made: plans keep all that a function computes on "
        "the devices, and the memory and the step predicted are those without it. Drop the offloading from the policy "
        "of jax.checkpoint, or let the plan choose what is recomputed and what lies on the host "
        '(PlanOptions(remat="search", offload="all")).'
        for line in graph.host_copies
    )
    warnings += indivisible(graph, logical)
    warnings += not_held(graph, logical)
    warnings += large_constants(graph, logical.device_type)
    evaluation = evaluation or evaluate(formulation, choices)
    figures = evaluation.estimate
    warnings += unaligned(graph, logical.device_type, logical.num_devices, figures.compute_s)
    if budget_bytes is not None:
        warnings += tuple(filter(None, [excess(figures, budget_bytes)]))
    near = tuple(CloseChoice(c.name, c.chosen, c.alternative, c.extra_s) for c in close_choices(formulation, choices))
    return ProgramPlan(
        name=origin.name,
        cluster=origin.cluster,
        device=logical.device_type.name,
        axes=tuple((axis.name, axis.size) for axis in logical.axes),
        logical_mesh=logical,
        arguments=arguments,
        outputs=outputs,
        output_steps=decoded.output_steps,
        shardings=decoded.shardings,
        orders=decoded.orders,
        timed=decoded.timed,
        equations=graph.equations,
        donate_argnums=origin.donate_argnums,
        schedule=formulation.schedule,
        budget_bytes=budget_bytes,
        estimate=figures,
        profile=step_profile(evaluation),
        certificate=certificate,
        close_choices=near,
        candidates=candidates,
        warnings=warnings,
        configuration=origin.configuration,
        placement=placement_summary(hardware, figures, logical),
        obeyed=() if asked is None else obeyed(formulation, decoded.choices, asked),
        in_tree=traced.in_tree,
        out_tree=traced.out_tree,
    )
