"""Strategies as plans: trace, problem and solver of `autoshard.plan`, under the restrictions of a strategy."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from autoshard.calls.pure_call import planned_call
from autoshard.calls.wrapped import bound, donated_argnums, shifted
from autoshard.cluster import Cluster, Slice
from autoshard.errors import AutoshardError, LayoutError, MeshError, NotFasterError, SolverError
from autoshard.planner.program import Program, prepare
from autoshard.planner.roles import Roles, roles_of
from autoshard.plans.gaps import excess, fits
from autoshard.plans.make import Posed, homogeneous_slice, load_cluster, plan_posed, plan_program
from autoshard.plans.options import PlanOptions
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.question import Restrict
from autoshard.strategies.restrict import restrictions, why_unsuited
from autoshard.strategies.strategies import ALL, Strategy
from autoshard.trace.flatten import TraceOptions
from autoshard.trace.trace import Trace, trace


class Settings(TypedDict, total=False):
    """The keyword arguments that all strategies take; each may be left out.

    Attributes:
      cluster: A `Cluster`, a path to a cluster file, or None for the live devices.
      mesh: Axis names to sizes, major to minor. None for one axis over all devices (`data` or `tensor`); for a mix,
        None tries every size of the tensor axis inside a node and keeps the best.
      tensor_axis: For a mix, which axis of `mesh` splits the weights; all others are data axes. `tensor` by default.
      donate_argnums: Positional arguments whose buffers the function may reuse, as for `jax.jit`.
      memory_budget_bytes: Limit per device; None for the device's memory less the reserve, `math.inf` for no limit.
      batch_argnums: Positional arguments that hold the batch, along dimension 0; None for the leaves of which the
        function returns no new version.
      options: See `PlanOptions`.
    """

    cluster: Cluster | str | os.PathLike[str] | None
    mesh: Mapping[str, int] | None
    tensor_axis: str
    donate_argnums: int | Sequence[int] | None
    memory_budget_bytes: float | None
    batch_argnums: int | Sequence[int] | None
    options: PlanOptions | None


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one strategy.

    Attributes:
      strategy: Which.
      plan: Its plan; where nothing keeps to the memory limit, the fastest plan without one, whose
        `estimate.peak_bytes` tells what it would need. None if there is no plan at all.
      fits: Whether the plan keeps to the memory limit.
      reason: Why there is no plan, or why it does not fit; empty otherwise.
    """

    strategy: Strategy
    plan: ProgramPlan | None
    fits: bool
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """A function to be planned several times over: its trace, program and roles, and the hardware.

    Attributes:
      traced, program, roles: What was read from the function.
      cluster: The hardware. donated: Positional arguments whose buffers are reused.
    """

    traced: Trace
    program: Program
    roles: Roles
    cluster: Cluster
    donated: tuple[int, ...]


def suited(subject: Subject) -> tuple[Strategy, ...]:
    """The strategies that apply to a function: expert parallelism only where there are experts, for example."""
    return tuple(s for s in ALL if not why_unsuited(s, subject.program, subject.roles))


def prepare_subject(fn: Callable[..., Any], *args: Any, **settings: Unpack[Settings]) -> Subject:
    """Traces `fn` and finds the roles in it.

    Args:
      fn: The function, such as a whole training step, that takes and returns its state.
      *args: Its positional arguments: pytrees of arrays or `jax.ShapeDtypeStruct`.
      **settings: See `Settings`.

    Raises:
      ClusterError, LayoutError, TraceError: The inputs fit no strategy at all.
    """
    donated = donated_argnums(fn, settings.get("donate_argnums"))
    cluster = load_cluster(settings.get("cluster"))
    batch = settings.get("batch_argnums")
    call = planned_call(fn, args)
    options = settings.get("options") or PlanOptions()
    traced = trace(call.fn, call.args, donated, TraceOptions(options.while_trips))
    program = prepare(traced.graph)
    batch = None if batch is None else shifted(_numbers(batch), len(bound(fn).args))
    return Subject(traced, program, roles_of(program, batch), cluster, donated)


def try_baseline(strategy: Strategy, subject: Subject, **settings: Unpack[Settings]) -> Outcome:
    """Plans one strategy, also where it exceeds the memory; see `Outcome`."""
    options = dataclasses.replace(settings.get("options") or PlanOptions(), least_memory_s=0.0)
    settings = {**settings, "options": options}
    limit = settings.get("memory_budget_bytes")
    if limit is None:
        limit = homogeneous_slice(subject.cluster).device_type.memory_bytes * (1 - options.memory_reserve)
    try:
        plan = plan_baseline(strategy, subject, **settings)
        reason = excess(plan.estimate, limit)
        return Outcome(strategy, plan, not reason, reason)
    except AutoshardError as error:
        reason = str(error)
    unlimited: Settings = {**settings, "memory_budget_bytes": math.inf}
    try:
        return Outcome(strategy, plan_baseline(strategy, subject, **unlimited), False, reason)
    except AutoshardError as error:
        return Outcome(strategy, None, False, str(error))


def plan_baseline(
    strategy: Strategy, subject: Subject, *, to_beat_s: float = math.inf, **settings: Unpack[Settings]
) -> ProgramPlan:
    """Plans one strategy, on the mesh that is fastest for it.

    Args:
      strategy, subject: What is planned. **settings: See `Settings`.
      to_beat_s: A plan that costs this or more is of no use: the search ends where its bound shows that there is none
        that costs less.

    Raises:
      LayoutError: The batch does not divide, or nothing tells it from the state.
      MemoryBudgetError: The strategy does not fit the budget.
      NotFasterError: None of its plans costs less than `to_beat_s`.
      ClusterError, MeshError, SolverError: As for `autoshard.plan`.
    """
    tensor_axis = settings.get("tensor_axis", "tensor")
    mesh = settings.get("mesh")
    if mesh is None:
        meshes = default_meshes(strategy, homogeneous_slice(subject.cluster), tensor_axis)
    else:
        meshes = (mesh,)
    if strategy.data is not None and strategy.tensor is not None and tensor_axis not in meshes[0]:
        raise MeshError(
            f"The baseline `{strategy.name}` splits weights over the mesh axis `{tensor_axis}`, but the mesh has the "
            f"axes {', '.join(meshes[0])}. Rename an axis, or tell which one it is: tensor_axis=."
        )
    options = settings.get("options") or PlanOptions()
    best, failure = None, None
    for one in meshes:
        try:
            plan = plan_program(
                subject.traced,
                subject.program,
                subject.cluster,
                mesh=one,
                donate_argnums=subject.donated,
                memory_budget_bytes=settings.get("memory_budget_bytes"),
                options=options,
                restrict=restriction(strategy, subject, tuple(one), tensor_axis),
                name=strategy.name,
                answer=functools.partial(_plan_faster, to_beat_s=to_beat_s),
            )
        except (LayoutError, SolverError) as error:
            failure = failure if isinstance(failure, NotFasterError) else error
            continue
        if best is None or plan.certificate.objective < best.certificate.objective:
            best = plan
        if plan.budget_bytes is None or fits(plan.estimate, plan.budget_bytes):
            to_beat_s = min(to_beat_s, plan.certificate.objective)
    if best is None:
        assert failure is not None  # there is a mesh
        raise failure
    return best


def _plan_faster(posed: Posed, to_beat_s: float) -> ProgramPlan:
    return plan_posed(dataclasses.replace(posed, question=dataclasses.replace(posed.question, to_beat_s=to_beat_s)))


def restriction(strategy: Strategy, subject: Subject, axes: tuple[str, ...], tensor_axis: str) -> Restrict:
    """Makes what a plan may not do, so that it is the strategy's.

    Args:
      strategy: The strategy. subject: What is planned. axes: Of the mesh.
      tensor_axis: The one that splits weights where the strategy has data axes as well.
    """
    names = () if strategy.tensor is None else axes if strategy.data is None else (tensor_axis,)
    return lambda program, logical: restrictions(strategy, program, subject.roles, logical, names)


WIDEST_TENSOR_AXIS = 16
"""The widest tensor axis that a mix is tried with where the fastest links join more devices, as on a TPU slice.

What people train with is below it: 8 in Megatron-LM (Narayanan et al. 2021, arXiv:2104.04473), 12 in PaLM (Chowdhery et
al. 2022, arXiv:2204.02311).
"""


def default_meshes(strategy: Strategy, hardware: Slice, tensor_axis: str) -> tuple[dict[str, int], ...]:
    """The meshes that a strategy is tried on: one axis, or for a mix every usual tensor axis inside a node."""
    if strategy.data is None:
        return ({tensor_axis: hardware.num_devices},)
    if strategy.tensor is None:
        return ({"data": hardware.num_devices},)
    in_node = hardware.levels[0].size if hardware.levels else 1
    widest = min(in_node, WIDEST_TENSOR_AXIS)
    sizes = [n for n in range(2, widest + 1) if in_node % n == 0 and n < hardware.num_devices]
    if not sizes:
        raise MeshError(
            f"A mix of data and tensor parallelism needs at least two devices a node and four in all; slice "
            f"`{hardware.name}` has {in_node} a node and {hardware.num_devices} in all."
        )
    return tuple({"data": hardware.num_devices // n, tensor_axis: n} for n in sizes)


def _numbers(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)
