"""`autoshard.write_problem`: the problem behind a plan as a file, to be solved on another machine.

`autoshard solve` turns the file into a solution on any machine, without JAX or the model;
`autoshard.plan(solution=...)` makes the plan of that.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from autoshard.calls.pure_call import planned_call
from autoshard.calls.wrapped import donated_argnums
from autoshard.cluster import Cluster
from autoshard.errors import ConfigError, MeshError
from autoshard.planner.build import Formulation
from autoshard.planner.program import prepare
from autoshard.plans.logical_meshes import several_meshes
from autoshard.plans.make import load_cluster, pose
from autoshard.plans.options import PlanOptions
from autoshard.plans.question import report
from autoshard.solver.io.problem_file import ProblemFile, write_problem_file
from autoshard.trace.flatten import TraceOptions
from autoshard.trace.trace import trace


def write_problem(
    path: str | os.PathLike[str],
    fn: Callable[..., Any],
    *args: Any,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    mesh: Mapping[str, int] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    memory_budget_bytes: float | None = None,
    pins: Mapping[str, PartitionSpec] | None = None,
    options: PlanOptions | None = None,
) -> None:
    """Writes the problem that `autoshard.plan` would solve for the same arguments, on one mesh.

    Args:
      path: The file, by custom with the ending `.npz`; its format is told in `autoshard/solver/io/problem_file.py`.
      fn, *args, cluster, donate_argnums, memory_budget_bytes, pins, options: As for `autoshard.plan`.
      mesh: As for `autoshard.plan`; may be None only where a single mesh comes into question, since each mesh has a
        problem of its own.

    Raises:
      MeshError: If no mesh is given although there are several; the message lists them.
      ClusterError, PinError, LayoutError: As for `autoshard.plan`.
      FileFormatError: The file cannot be written.
    """
    options = options or PlanOptions()
    if options.remat == "search" or options.micro_batches not in (None, "as_written", 1):
        raise ConfigError(
            'PlanOptions.remat="search" (plan.remat) and PlanOptions.micro_batches (plan.micro_batches) plan several '
            'programs, and a problem file holds one, as it is written. Leave them out, or say "as_written".'
        )
    started = time.perf_counter()
    donated = donated_argnums(fn, donate_argnums)
    name = getattr(fn, "__name__", "the function")
    report(options, started, "trace", name)
    call = planned_call(fn, args)
    traced = trace(call.fn, call.args, donated, TraceOptions(options.while_trips))
    report(options, started, "formulate", f"{len(traced.graph.equations)} equations")
    posed = pose(
        traced,
        prepare(traced.graph),
        load_cluster(cluster),
        mesh=mesh,
        memory_budget_bytes=memory_budget_bytes,
        pins=pins,
        options=options,
        started=started,
    )
    question, meshes = posed.question, posed.meshes
    if len(meshes) > 1:
        raise MeshError(several_meshes("A problem file", meshes))
    schedule, budget_bytes = question.schedules(meshes[0])[0], question.budget_bytes
    formulation = dataclasses.replace(question, schedule=schedule).formulation(meshes[0])
    title = f"{name} on {meshes[0]}, at most {budget_bytes / 1e9:.4g} GB per device; costs in seconds, usage in bytes"
    write_problem_file(ProblemFile(formulation.problem, title, instant_texts(formulation)), path)


def instant_texts(f: Formulation) -> tuple[str, ...]:
    """What runs at each instant: an operation and its line."""
    operations = f.program.graph.operations
    texts = []
    for index in f.instants:
        operation = operations[index] if 0 <= index < len(operations) else None
        name, source = ("the start", "") if operation is None else (operation.name, operation.source)
        texts.append(f"{name} at {source}" if source else name)
    return tuple(texts)
