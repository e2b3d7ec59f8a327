"""`autoshard.plan`: a plan of one program for one mesh, or of a training step for a cluster of several slices."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from autoshard.cluster import Cluster
from autoshard.errors import StageError
from autoshard.pipeline.plan.make import plan_staged
from autoshard.pipeline.plan.staged_plan import StagedPlan
from autoshard.pipeline.search.options import StageOptions
from autoshard.plans.make import load_cluster
from autoshard.plans.make import plan as plan_program
from autoshard.plans.options import PlanOptions
from autoshard.plans.plan import Plan
from autoshard.train_step import TrainStep


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
    stages: StageOptions | None = None,
) -> Plan | StagedPlan:
    """Chooses how `fn` runs on a cluster.

    Any function on devices of one kind is planned as one program over one mesh. A `TrainStep` can also be cut into
    stages and shared out over pipelines: that is done where the cluster has devices of several kinds, and wherever
    `stages` is given.

    Args:
      fn: Any traceable JAX function, such as a whole training step; or a `TrainStep`, called with (state, batch).
      *args: Its positional arguments: pytrees of arrays or `jax.ShapeDtypeStruct`. Nothing is allocated.
      cluster: A `Cluster`, a path to a cluster file, or None for the live devices. No device is needed to plan.
      mesh, donate_argnums, pins, start, solution: For one program; see `autoshard.plans.make.plan`.
      memory_budget_bytes: Limit per device; by default the device's memory less `options.memory_reserve`.
      options: See `PlanOptions`.
      stages: What is fixed of stages, replicas and micro-batches; see `StageOptions`. With `StageOptions()` a training
        step is planned in stages on a cluster of one kind too.

    Returns:
      A `Plan`, or a `StagedPlan`. Both have `jit`, `save`, `explain`, and can be printed.

    Raises:
      ClusterError: The cluster has devices of several kinds, and `fn` is no `TrainStep`.
      StageError: The step cannot be cut or shared out as asked; what is given fits one program only.
      AutoshardError: As `autoshard.plans.make.plan` otherwise.
    """
    options = options or PlanOptions()
    hardware = load_cluster(cluster)
    is_step = isinstance(fn, TrainStep)
    if not is_step and stages is not None:
        received = getattr(fn, "__name__", type(fn).__name__)
        raise StageError(
            f"Only a TrainStep can be cut into stages; received {received}. Write the step as "
            "autoshard.TrainStep(loss_fn, optimizer), or leave out stages=."
        )
    if not is_step or (stages is None and hardware.is_homogeneous):
        return plan_program(
            fn,
            *args,
            cluster=hardware,
            mesh=mesh,
            donate_argnums=donate_argnums,
            memory_budget_bytes=memory_budget_bytes,
            pins=pins,
            start=start,
            options=options,
            solution=solution,
        )
    given = {"mesh": mesh, "pins": pins, "start": start, "solution": solution}
    unfit = [name for name, value in given.items() if value]
    if unfit:
        raise StageError(
            f"{', '.join(unfit)} speak of one program on one mesh, but a training step on cluster `{hardware.name}` is "
            "planned in stages, each on a mesh of its own. Leave them out, or plan for a cluster of one kind of device."
        )
    if len(args) != 2:
        raise StageError(f"A TrainStep is planned for (state, batch); received {len(args)} arguments. Pass both.")
    donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    made = plan_staged(fn, *args, hardware, options, stages or StageOptions(), memory_budget_bytes)
    return dataclasses.replace(made, donates_state=0 in donated)
