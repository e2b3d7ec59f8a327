"""`autoshard.plan`: trace, formulate, solve, decode; over one mesh or over all logical meshes of a cluster."""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from autoshard.cluster import Cluster, LogicalMesh, Slice
from autoshard.errors import ClusterError, MemoryBudgetError, MeshError, SolverError
from autoshard.graph.graph import Graph
from autoshard.graph.layout import spec_entries
from autoshard.planner.allowed import Restrictions
from autoshard.planner.build import Formulation, formulate
from autoshard.planner.close import close_choices
from autoshard.planner.decode import decode, estimate
from autoshard.planner.program import Program, prepare
from autoshard.planner.ties import settle_ties
from autoshard.plans.options import PlanOptions, PlanProgress
from autoshard.plans.pins import as_spec, resolve_pins
from autoshard.plans.plan import CloseChoice, MeshCandidate, Plan, PlannedTensor
from autoshard.solver import Progress, SolverOptions, least_capacity, solve
from autoshard.solver.problem import Certificate, Solution, Status
from autoshard.trace.annotations import fixed_of_spec
from autoshard.trace.flatten import TraceOptions
from autoshard.trace.trace import Trace, trace

Restrict = Callable[[Program, LogicalMesh], Restrictions]
"""Makes the restrictions of a baseline for a program on a mesh."""


def plan(
    fn: Callable[..., Any],
    *args: Any,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    mesh: Mapping[str, int] | None = None,
    donate_argnums: int | Sequence[int] = (),
    memory_budget_bytes: float | None = None,
    pins: Mapping[str, PartitionSpec] | None = None,
    options: PlanOptions | None = None,
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
      options: See `PlanOptions`.

    Returns:
      The plan. It never costs more, predicted, than any other plan that autoshard can express, up to the certified gap.

    Raises:
      ClusterError, MeshError, PinError, LayoutError: The inputs do not fit together.
      MemoryBudgetError: No plan fits; tells the least budget that would do, and what is alive at the peak.
      SolverError: Nothing was found within the time limit.
    """
    options = options or PlanOptions()
    started = time.perf_counter()
    donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    hardware = load_cluster(cluster)
    _report(options, started, "trace", getattr(fn, "__name__", "the function"))
    traced = trace(fn, args, donated, TraceOptions(options.while_trips))
    _report(options, started, "group", f"{len(traced.graph.equations)} equations")
    program = prepare(traced.graph)
    return plan_program(traced, program, hardware, mesh, donated, memory_budget_bytes, pins, options, started=started)


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
            f"One plan covers devices of one kind, but cluster `{cluster.name}` has {kinds}. "
            "Plan for one of its slices: write that group of nodes into a cluster file of its own."
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
) -> Plan:
    """Plans a traced program; what `plan` and the baselines share. See `plan` for the arguments."""
    started = time.perf_counter() if started is None else started
    hardware = homogeneous_slice(cluster)
    budget_bytes = memory_budget_bytes
    if budget_bytes is None:
        budget_bytes = hardware.device_type.memory_bytes * (1 - options.memory_reserve)
    if not budget_bytes > 0:
        raise MemoryBudgetError(
            f"memory_budget_bytes must be a positive number of bytes per device, but got {budget_bytes}."
        )
    limit_bytes = None if math.isinf(budget_bytes) else budget_bytes
    meshes = [hardware.logical_mesh(mesh)] if mesh is not None else _meshes(traced.graph, hardware, pins, options)
    best: tuple[Formulation, Solution] | None = None
    candidates: list[MeshCandidate] = []
    infeasible: Formulation | None = None
    for n, logical in enumerate(meshes, 1):
        axes = tuple((axis.name, axis.size) for axis in logical.axes)
        stage = f"solve {n}/{len(meshes)}"
        _report(options, started, stage, ", ".join(f"{a}={s}" for a, s in axes))
        layouts = resolve_pins(traced.graph, pins, dict(axes))
        restrictions = restrict(program, logical) if restrict else Restrictions()
        formulation = formulate(program, logical, limit_bytes, layouts, restrictions, options.overlap)
        cutoff = math.inf if best is None else best[1].certificate.objective
        limits = SolverOptions(time_limit_s=options.time_limit_s, relative_gap=options.relative_gap, seed=options.seed)

        def tell(p: Progress, stage=stage, axes=axes, cutoff=cutoff) -> None:
            _report(
                options, started, stage, f"{', '.join(f'{a}={s}' for a, s in axes)}: {p.phase}", p.objective, p.bound
            )
            if p.bound >= cutoff < math.inf:
                raise _CannotWin(p)

        try:
            solution = solve(formulation.problem, limits, on_progress=tell)
        except _CannotWin as stop:
            p = stop.progress
            solution = Solution(None, Certificate(Status.UNKNOWN, math.inf, p.bound, math.inf, p.elapsed_s))
        if solution.choices is not None:
            solution = dataclasses.replace(solution, choices=settle_ties(formulation, solution.choices))
        certificate = solution.certificate
        candidates.append(
            MeshCandidate(
                axes,
                certificate.objective if solution.choices is not None else None,
                certificate.bound,
                _verdict(solution, cutoff),
            )
        )
        if solution.choices is None:
            infeasible = formulation
        elif best is None or certificate.objective < best[1].certificate.objective:
            best = formulation, solution
    if best is None:
        raise _no_plan(infeasible, candidates, budget_bytes, options)
    _report(options, started, "decode", "")
    certificate = _overall(best[1].certificate, candidates, options, time.perf_counter() - started)
    return _assemble(
        name, cluster, traced, best[0], best[1], certificate, tuple(candidates), donate_argnums, limit_bytes
    )


class _CannotWin(Exception):
    """Stops a solve whose bound shows that its mesh cannot beat the best plan so far."""

    def __init__(self, progress: Progress):
        super().__init__()
        self.progress = progress


def _meshes(
    graph: Graph, hardware: Slice, pins: Mapping[str, PartitionSpec] | None, options: PlanOptions
) -> list[LogicalMesh]:
    """The logical meshes to search: all of them, or those that have the axes that pins and annotations name."""
    meshes = list(hardware.logical_meshes(max_axes=options.max_mesh_axes))
    fixed = [a.fixed for a in graph.arguments]
    fixed += [l for o in graph.operations for l in (*(o.fixed_operands or ()), *(o.fixed_results or ()))]
    fixed += [fixed_of_spec(as_spec(pattern, spec), len(spec)) for pattern, spec in (pins or {}).items()]
    named = {axis for layout in fixed for entry in layout or () for axis in entry or ()}
    fitting = [m for m in meshes if named <= set(m.axis_names)]
    if not fitting:
        raise MeshError(
            f"Pins or annotations name the mesh axes {sorted(named)}, which no searched mesh of "
            f"{hardware.num_devices} devices has "
            f"(they use {sorted({axis.name for m in meshes for axis in m.axes})}). Pass mesh= with the axes that "
            "they mean."
        )
    return fitting


def _verdict(solution: Solution, cutoff: float) -> str:
    if solution.choices is not None:
        return solution.certificate.status.value
    if solution.certificate.bound >= cutoff < math.inf:
        return "cannot beat the best"
    return {Status.INFEASIBLE: "does not fit the memory"}.get(solution.certificate.status, "nothing found in time")


def _overall(
    own: Certificate, candidates: Sequence[MeshCandidate], options: PlanOptions, elapsed_s: float
) -> Certificate:
    """The certificate over all meshes: the bound is the least bound of any mesh that might still hold a better plan."""
    open_bounds = [c.bound_s for c in candidates if c.verdict != "does not fit the memory"]
    bound = min([own.objective, *open_bounds])
    gap = (own.objective - bound) / own.objective if own.objective else 0.0
    status = Status.OPTIMAL if gap <= options.relative_gap else Status.FEASIBLE
    return Certificate(status, own.objective, bound, gap, elapsed_s)


def _no_plan(
    formulation: Formulation | None, candidates: Sequence[MeshCandidate], budget_bytes: float, options: PlanOptions
) -> SolverError:
    """The error for a search that ended without a plan; for memory, with the least budget known to do."""
    if formulation is None:
        return SolverError("No plan was found. Raise options.time_limit_s.")
    least = least_capacity(
        formulation.problem, SolverOptions(time_limit_s=options.time_limit_s, seed=options.seed)
    )
    bound_bytes, least_bytes = least.bound, least.peak
    if least.choices is None:
        return SolverError(
            f"No plan was found within {options.time_limit_s} s, nor the least memory of any. Raise "
            "options.time_limit_s."
        )
    if least_bytes <= budget_bytes:
        return SolverError(
            f"No plan was found within {options.time_limit_s} s, although one of {least_bytes / 1e9:.4g} GB per "
            "device exists and "
            f"{budget_bytes / 1e9:.4g} GB are allowed. Raise options.time_limit_s or memory_budget_bytes."
        )
    figures = estimate(formulation, least.choices)
    alive = ", ".join(f"{m.name} {list(m.shape)} ({m.size_bytes / 1e9:.3g} GB)" for m in figures.memory[:5])
    axes = ", ".join(f"{axis.name}={axis.size}" for axis in formulation.mesh.axes)
    return MemoryBudgetError(
        f"No plan found needs at most {budget_bytes / 1e9:.4g} GB per device. On mesh {axes}, "
        f"{least_bytes / 1e9:.4g} GB "
        f"(memory_budget_bytes={math.ceil(least_bytes)}) would do; proven: not less than {bound_bytes / 1e9:.4g} "
        f"GB. The peak is at {figures.peak_at}, where these are alive, among others: "
        f"{alive}. Raise memory_budget_bytes, donate the state (donate_argnums), use more devices, a smaller "
        "batch or jax.checkpoint."
    )


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
        planned(a.name, a.value, l) for a, l in zip(graph.arguments, decoded.argument_layouts, strict=True)
    )
    outputs = tuple(
        PlannedTensor(o.name, (), "literal", ()) if o.value is None else planned(o.name, o.value, l)
        for o, l in zip(graph.outputs, decoded.output_layouts, strict=True)
    )
    steps = tuple(
        tuple(spec_entries(l, len(values[o.value].shape), names) for l in path)
        for o, path in zip(graph.outputs, decoded.output_steps, strict=True)
    )
    warnings = tuple(
        f"No sharding rule is known for {u}; its operands and results are kept whole." for u in graph.unknown
    )
    warnings += _indivisible(graph, logical)
    near = tuple(
        CloseChoice(c.name, c.chosen, c.alternative, c.extra_s) for c in close_choices(formulation, solution.choices)
    )
    return Plan(
        name=name,
        cluster=cluster.name,
        device=logical.device_type.name,
        axes=tuple((axis.name, axis.size) for axis in logical.axes),
        mesh_text=str(logical),
        arguments=arguments,
        outputs=outputs,
        output_steps=steps,
        shardings=decoded.shardings,
        equations=graph.equations,
        donate_argnums=donate_argnums,
        budget_bytes=budget_bytes,
        estimate=estimate(formulation, solution.choices),
        certificate=certificate,
        close_choices=near,
        candidates=candidates,
        warnings=warnings,
        in_tree=traced.in_tree,
        out_tree=traced.out_tree,
    )


def _indivisible(graph: Graph, mesh: LogicalMesh) -> tuple[str, ...]:
    """Arguments that no mesh axis can split although they are large."""
    found = []
    for a in graph.arguments:
        value = graph.values[a.value]
        if value.size_bytes >= 1e6 and not any(
            d % axis.size == 0 for d in value.shape for axis in mesh.axes if axis.size > 1
        ):
            found.append(
                f"`{a.name}` with shape {value.shape} is kept whole: no mesh axis of {mesh} divides any of its "
                "dimensions."
            )
    return tuple(found)


def _report(
    options: PlanOptions,
    started: float,
    stage: str,
    detail: str,
    objective: float | None = None,
    bound: float | None = None,
) -> None:
    if options.on_progress is not None:
        options.on_progress(PlanProgress(stage, detail, time.perf_counter() - started, objective, bound))
