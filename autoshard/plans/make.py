"""`autoshard.plan`: trace, formulate, solve, decode; over one mesh or over all logical meshes of a cluster."""

import dataclasses
import glob
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from autoshard.cluster import Cluster, DeviceType, LogicalMesh, Slice
from autoshard.errors import ClusterError, MemoryBudgetError, MeshError
from autoshard.garbage import collection_paused
from autoshard.graph.layout import spec_entries
from autoshard.interrupts import stop_on_signals
from autoshard.planner.build import Formulation
from autoshard.planner.close import close_choices
from autoshard.planner.decode import decode, estimate
from autoshard.planner.program import Program, prepare
from autoshard.plans.gaps import excess
from autoshard.plans.indivisible import indivisible
from autoshard.plans.no_plan import no_plan_error
from autoshard.plans.options import PlanOptions
from autoshard.plans.plan import CloseChoice, Plan, PlannedTensor
from autoshard.plans.question import Question, Restrict, report
from autoshard.plans.search import logical_meshes, search_meshes, several_meshes
from autoshard.solver.problem import Certificate, Solution
from autoshard.trace.flatten import TraceOptions
from autoshard.trace.trace import Trace, trace


def plan(
    fn: Callable[..., Any],
    *args: Any,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    mesh: Mapping[str, int] | None = None,
    donate_argnums: int | Sequence[int] = (),
    memory_budget_bytes: float | None = None,
    pins: Mapping[str, PartitionSpec] | None = None,
    start: Plan | Mapping[str, PartitionSpec] | None = None,
    options: PlanOptions | None = None,
    solution: str | os.PathLike[str] | None = None,
) -> Plan:
    """Chooses how `fn` is sharded over a cluster.

    Args:
      fn: Any traceable JAX function, such as a whole training step.
      *args: Its positional arguments: pytrees of arrays or `jax.ShapeDtypeStruct`. Nothing is allocated.
      cluster: A `Cluster`, a path to a cluster file, or None for the live devices. No device is needed to plan.
      mesh: Logical mesh as axis name to size, major to minor (the last axis is the innermost); None to choose the best.
      donate_argnums: Positional arguments whose buffers `fn` may reuse, as for `jax.jit`.
      memory_budget_bytes: Limit per device; by default the device's memory less `options.memory_reserve`;
        `math.inf` for no limit.
      pins: Shardings to insist on: argument path pattern (`state.params.*.kernel`) to PartitionSpec.
      start: Layouts to start from, written like pins (such as `pins_from_logical_rules` makes of a model's own rules),
        or an earlier plan, whose arguments' layouts are taken. The search begins with the best plan that has them, and
        never ends with a worse one; nothing insists on them. A mesh without the axes that they name starts from
        nothing, as does one on which no such plan fits; if that is so of all, the plan has a warning that says why.
      options: See `PlanOptions`.
      solution: A file of `autoshard solve --out` that solves the problem written by `autoshard.write_problem` for the
        same program, cluster, mesh and limits; the plan is made from it, and nothing is solved here.

    The first Ctrl-C ends the search with the best plan so far, if there is one; its certificate says what is proven.

    Returns:
      The plan. It never costs more, predicted, than any other plan that autoshard can express, up to the certified gap.

    Raises:
      ClusterError, MeshError, PinError, LayoutError: The inputs do not fit together.
      MemoryBudgetError: No plan fits; tells the least budget that would do, and what is alive at the peak.
      SolverError: Nothing was found within the time limit.
      FileFormatError: `solution` does not belong to this problem, or does not solve it.
    """
    options = options or PlanOptions()
    started = time.perf_counter()
    donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    hardware = load_cluster(cluster)
    report(options, started, "trace", getattr(fn, "__name__", "the function"))
    traced = trace(fn, args, donated, TraceOptions(options.while_trips))
    report(options, started, "group", f"{len(traced.graph.equations)} equations")
    program = prepare(traced.graph)
    if isinstance(start, Plan):
        start = {glob.escape(a.name): PartitionSpec(*a.entries) for a in start.arguments}
    return plan_program(
        traced,
        program,
        hardware,
        mesh,
        donated,
        memory_budget_bytes,
        pins,
        options,
        started=started,
        solution=solution,
        start=start,
    )


def load_cluster(cluster: Cluster | str | os.PathLike[str] | None) -> Cluster:
    """A cluster from whatever `plan` accepts."""
    if cluster is None:
        return Cluster.detect()
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
    mesh: Mapping[str, int] | None,
    donate_argnums: tuple[int, ...],
    memory_budget_bytes: float | None,
    pins: Mapping[str, PartitionSpec] | None,
    options: PlanOptions,
    restrict: Restrict | None = None,
    name: str = "autoshard",
    started: float | None = None,
    solution: str | os.PathLike[str] | None = None,
    start: Mapping[str, PartitionSpec] | None = None,
) -> Plan:
    """Plans a traced program; what `plan` and the baselines share. See `plan` for the arguments."""
    started = time.perf_counter() if started is None else started
    hardware = homogeneous_slice(cluster)
    budget_bytes = budget_of(hardware.device_type, memory_budget_bytes, options)
    meshes = logical_meshes(traced.graph, hardware, mesh, pins, options)
    if solution is not None and len(meshes) > 1:
        raise MeshError(several_meshes("A solution", meshes))
    question = Question(traced, program, budget_bytes, pins, options, restrict, started, start)
    return plan_on(question, cluster.name, meshes, donate_argnums, name, solution)


def plan_on(
    question: Question,
    cluster_name: str,
    meshes: Sequence[LogicalMesh],
    donate_argnums: tuple[int, ...],
    name: str = "autoshard",
    solution: str | os.PathLike[str] | None = None,
) -> Plan:
    """The best plan of `question` on any of `meshes`."""
    options = question.options
    with stop_on_signals() as stop:
        found = search_meshes(question, meshes, solution, stop)
    if found.best is None:
        if stop.requested:
            raise KeyboardInterrupt
        raise no_plan_error(question, meshes)
    report(options, question.started, "decode", "")
    certificate = found.certificate(options, time.perf_counter() - question.started)
    limit_bytes = None if math.isinf(question.budget_bytes) else question.budget_bytes
    return _assemble(
        name,
        cluster_name,
        question.traced,
        *found.best,
        certificate,
        found.candidates,
        donate_argnums,
        limit_bytes,
        found.warnings,
    )


def budget_of(device: DeviceType, memory_budget_bytes: float | None, options: PlanOptions) -> float:
    """The memory limit per device, in bytes; +inf for none.

    Raises:
      MemoryBudgetError: If it is not positive.
    """
    budget_bytes = memory_budget_bytes
    if budget_bytes is None:
        budget_bytes = device.memory_bytes * (1 - options.memory_reserve)
    if not budget_bytes > 0:
        raise MemoryBudgetError(
            f"memory_budget_bytes must be a positive number of bytes per device, but got {budget_bytes}."
        )
    return budget_bytes


@collection_paused()
def _assemble(
    name,
    cluster,
    traced: Trace,
    formulation: Formulation,
    solution: Solution,
    certificate: Certificate,
    candidates,
    donate_argnums,
    budget_bytes,
    warnings: tuple[str, ...] = (),
) -> Plan:
    graph, logical = traced.graph, formulation.mesh
    names = logical.axis_names
    decoded = decode(formulation, solution.choices)
    values = graph.values

    def planned(label, value, layout):
        return PlannedTensor(
            label, values[value].shape, values[value].dtype, spec_entries(layout, len(values[value].shape), names)
        )

    arguments = tuple(
        dataclasses.replace(planned(a.name, a.value, l), is_weak=getattr(v.aval, "weak_type", False))
        for a, l, v in zip(graph.arguments, decoded.argument_layouts, traced.jaxpr.jaxpr.invars, strict=True)
    )
    outputs = tuple(
        PlannedTensor(o.name, (), "literal", ()) if o.value is None else planned(o.name, o.value, l)
        for o, l in zip(graph.outputs, decoded.output_layouts, strict=True)
    )
    warnings += tuple(
        f"No sharding rule is known for {u}; its operands and results are kept whole." for u in graph.unknown
    )
    warnings += indivisible(graph, logical)
    figures = estimate(formulation, solution.choices)
    if budget_bytes is not None:
        warnings += tuple(filter(None, [excess(figures, budget_bytes)]))
    near = tuple(
        CloseChoice(c.name, c.chosen, c.alternative, c.extra_s) for c in close_choices(formulation, solution.choices)
    )
    return Plan(
        name=name,
        cluster=cluster,
        device=logical.device_type.name,
        axes=tuple((axis.name, axis.size) for axis in logical.axes),
        mesh_text=str(logical),
        arguments=arguments,
        outputs=outputs,
        output_steps=decoded.output_steps,
        shardings=decoded.shardings,
        equations=graph.equations,
        donate_argnums=donate_argnums,
        budget_bytes=budget_bytes,
        estimate=figures,
        certificate=certificate,
        close_choices=near,
        candidates=candidates,
        warnings=warnings,
        figures=logical.device_type.provenance,
        devices_per_node=math.prod(l.size for axis in logical.axes for l in axis.levels if l.link.level == 0),
        in_tree=traced.in_tree,
        out_tree=traced.out_tree,
    )
