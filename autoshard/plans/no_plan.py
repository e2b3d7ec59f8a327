"""Why there is no plan: the least memory of any mesh, and what is alive at its peak."""

import dataclasses
import math
from collections.abc import Sequence

from autoshard.cluster import LogicalMesh
from autoshard.errors import MemoryBudgetError, SolverError
from autoshard.planner.build import Formulation
from autoshard.planner.decode import estimate
from autoshard.plans.host_memory import is_offloading
from autoshard.plans.question import Question, report
from autoshard.solver import SolverOptions, least_capacity
from autoshard.solver.least_capacity import LeastCapacity

_ADVICE = (
    "Raise memory_budget_bytes, {donation}use more devices, a smaller batch, {hosts}micro-batches or jax.checkpoint."
)
_DONATION = "donate the state (donate_argnums), "
_HOSTS = "host memory for optimizer state (PlanOptions.offload), "
_TABLES = (
    " Or let embedding tables live in host memory: autoshard.plan decides that for a TrainStep on a cluster that "
    "describes its hosts (autoshard.TableOptions), the trainer with execution.mode=auto, and you with "
    "autoshard.HostTables."
)

_FEWEST_BYTES = 4096
"""A budget of fewer bytes is likely to be meant in GB."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Least:
    """The mesh that needs least memory, how little, and in which choices, if any was found; a bound over all meshes."""

    best: tuple[Formulation, LeastCapacity, tuple[int, ...]] | None
    bound_bytes: float


def looks_up(question: Question) -> bool:
    """Whether the program has look-ups in tables that have more rows than it reads."""
    return any(shape.is_sparse for shape in question.program.shapes)


def _is_donated(question: Question) -> bool:
    """Whether all arguments that the program returns a new version of are donated, if there are any."""
    graph = question.traced.graph
    return all(o.successor_of is None or graph.arguments[o.successor_of].donated for o in graph.outputs)


def no_plan_error(question: Question, meshes: Sequence[LogicalMesh], has_tables: bool | None = None) -> SolverError:
    """The error for a search over `meshes` that ended without a plan; for memory, with the least budget that would do.

    The search for that budget takes `PlanOptions.least_memory_s`.

    Args:
      question: What was asked. meshes: Those that were searched.
      has_tables: Whether the step has embedding tables; None where its program tells. One in micro-batches does not.
    """
    budget_bytes, options = question.budget_bytes, question.options
    found = _least_memory(question, meshes)
    advice = _ADVICE.format(
        donation="" if _is_donated(question) else _DONATION, hosts="" if is_offloading(options) else _HOSTS
    ) + (_TABLES if (looks_up(question) if has_tables is None else has_tables) else "")
    if budget_bytes < _FEWEST_BYTES:
        advice = f"memory_budget_bytes counts bytes: for {budget_bytes:g} GB, give {budget_bytes:g}e9."
    within, limit = f"within {options.mesh_limit_s:g} s a mesh", "mesh_limit_s"
    if not math.isinf(question.until_s):
        within, limit = f"in the time there is (time_limit_s={options.time_limit_s:g})", "time_limit_s"
    others = f"On all {len(meshes)} meshes" if len(meshes) > 1 else "There"
    bound = f"{others}, not less than {found.bound_bytes / 1e9:.4g} GB: proven."
    if found.best is None:
        if found.bound_bytes > budget_bytes:
            return MemoryBudgetError(f"No plan needs at most {budget_bytes / 1e9:.4g} GB per device. {bound} {advice}")
        return SolverError(
            f"No plan of at most {budget_bytes / 1e9:.4g} GB per device was found {within}, nor the least memory of "
            f"any. Raise options.{limit} and least_memory_s, or name the mesh: mesh=."
        )
    formulation, least, choices = found.best
    axes = ", ".join(f"{axis.name}={axis.size}" for axis in formulation.mesh.axes)
    if least.peak <= budget_bytes:
        return SolverError(
            f"No plan was found {within}, although on mesh {axes} one of {least.peak / 1e9:.4g} GB per device exists "
            f"and {budget_bytes / 1e9:.4g} GB are allowed. Raise options.{limit} or memory_budget_bytes, or name "
            "the mesh: mesh=."
        )
    figures = estimate(formulation, choices)
    alive = ", ".join(f"{m.name} {list(m.shape)} ({m.size_bytes / 1e9:.3g} GB)" for m in figures.memory[:5])
    return MemoryBudgetError(
        f"No plan found needs at most {budget_bytes / 1e9:.4g} GB per device. On mesh {axes}, "
        f"{least.peak / 1e9:.4g} GB (memory_budget_bytes={math.ceil(least.peak)}) would do. {bound} The peak is at "
        f"{figures.peak_at}, where these are alive, among others: {alive}. {advice}"
    )


def _least_memory(question: Question, meshes: Sequence[LogicalMesh]) -> _Least:
    """The least memory over `meshes`."""
    options = question.options
    limits = SolverOptions(time_limit_s=options.least_memory_s / len(meshes), seed=options.seed)
    best: tuple[Formulation, LeastCapacity, tuple[int, ...]] | None = None
    bound_bytes = math.inf
    for n, mesh in enumerate(meshes, 1):
        axes = ", ".join(f"{axis.name}={axis.size}" for axis in mesh.axes)
        report(options, question.started, f"least memory {n}/{len(meshes)}", axes)
        formulation = question.formulation(mesh)
        least = least_capacity(formulation.problem, limits)
        bound_bytes = min(bound_bytes, least.bound)
        if least.choices is not None and (best is None or least.peak < best[1].peak):
            best = formulation, least, least.choices
    return _Least(best, bound_bytes)
