"""`autoshard.plan`: a plan on devices, or one with embedding tables in host memory where that must be or is faster."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from autoshard.api import Plan, StagedPlan, plan_on_devices
from autoshard.api.planning import is_cut, plan_in_stages_instead
from autoshard.api.received import check_received
from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError, ConfigError, MemoryBudgetError
from autoshard.offloading.host_planning import HostPlanner
from autoshard.offloading.hosted_plan import HostTablesPlan
from autoshard.offloading.options import TableOptions
from autoshard.pipelines.search.options import StageOptions
from autoshard.plans.make import budget_of, load_cluster
from autoshard.plans.options import PlanOptions
from autoshard.train_step import TrainStep


def plan(
    fn: Callable[..., Any],
    *args: Any,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    mesh: Mapping[str, int] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    memory_budget_bytes: float | None = None,
    pins: Mapping[str, PartitionSpec] | None = None,
    start: Plan | Mapping[str, PartitionSpec] | None = None,
    options: PlanOptions | None = None,
    solution: str | os.PathLike[str] | None = None,
    stages: StageOptions | None = None,
    tables: TableOptions | None = None,
    configuration: str | None = None,
    **kwargs: Any,
) -> Plan | StagedPlan | HostTablesPlan:
    """Chooses how `fn` runs on a cluster.

    Any function on devices of one kind is planned as one program over one mesh. A `TrainStep` can also be cut into
    stages and shared out over pipelines: that is done where the cluster has devices of several kinds, wherever
    `stages` is given, where annotations in it ask for stages (`autoshard.pipeline`), and where no plan of one program
    fits the memory and it has no embedding tables to move. With `PlanOptions(pipelines="search")` it is planned both
    ways, and the faster plan is taken.

    Where no plan of one program fits the memory of the devices, optimizer state and activations may lie in that of the
    hosts, if the cluster describes them (`PlanOptions.offload`); stages come after that.

    Where the state of a `TrainStep` does not fit the devices, or a step is predicted to be faster so, and the cluster
    describes its hosts, embedding tables that the loss looks up live in host memory. Which of them do, and how steps
    follow each other then, is decided by `place_tables`, and the step over the rows of a batch is planned as any other.

    Args:
      fn: Any traceable JAX function, such as a whole training step, also one that `jax.jit` or `nnx.jit` has wrapped;
        or a `TrainStep`, called with (state, batch).
      *args: Its positional arguments: pytrees of arrays or `jax.ShapeDtypeStruct`, and Flax NNX modules, whole or by
        shape (`nnx.eval_shape`), which the planned function changes in place as `fn` does. Leaves that are no arrays,
        such as functions and strings, are constants. Nothing is allocated.
      **kwargs: Its keyword arguments. One that has the name of an option here is bound by `functools.partial`.
      cluster: A `Cluster`, a path to a cluster file, or None for the live devices. No device is needed to plan.
      mesh: Logical mesh as axis name to size, major to minor (the last axis is the innermost); None to choose the best.
      donate_argnums: Positional arguments whose buffers `fn` may reuse, as for `jax.jit`; by default those of a `fn`
        that is wrapped.
      static_argnums, static_argnames: Arguments that are constants, as for `jax.jit`; by default those of a `fn` that
        is wrapped.
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
      stages: What is fixed of stages, replicas and micro-batches; see `StageOptions`. With `StageOptions()` a training
        step is planned in stages on a cluster of one kind too; with `PlanOptions(pipelines="search")` as well, these
        stages are compared with one program. `mesh`, `pins`, `start` and `solution` are for plans of one program.
      tables: What may be done with embedding tables; see `TableOptions`. With `pins`, `start` or `solution` they stay
        on the devices.
      configuration: What the plan is made from, as JSON, for the plan to carry.

    The first Ctrl-C ends the search with the best plan so far, if there is one; its certificate says what is proven.

    Returns:
      A `Plan`, a `StagedPlan`, or a `HostTablesPlan`; see `BasePlan` for what all can do. A `Plan` never
      costs more, predicted, than any other plan on the devices that autoshard can express, up to the certified gap.

    Raises:
      TraceError: `fn` is no function, or cannot be traced as one program.
      ConfigError: There is neither an option nor an argument of `fn` of that name; an option has another type or value
        than it takes; `tables` are for a `TrainStep` of one program; options exclude each other.
      ClusterError: The cluster has devices of several kinds, and `fn` is no `TrainStep`.
      StageError: The step cannot be cut or shared out as asked; what is given fits one program only.
      MeshError, PinError, LayoutError: The inputs do not fit together.
      AnnotationError: What annotations in `fn` ask for cannot be had.
      MemoryBudgetError: No plan fits; tells the least budget that would do, what is alive at the peak, and why
        tables cannot be in host memory.
      SolverError: Nothing was found within the time limit.
      FileFormatError: `solution` does not belong to this problem, or does not solve it.
    """
    check_received(fn, args, pins, options, stages)
    hardware, options = load_cluster(cluster), options or PlanOptions()
    may_leave = isinstance(fn, TrainStep) and len(args) == 2 and not is_cut(fn, hardware, stages, options)
    if tables is not None and not may_leave:
        received = getattr(fn, "__name__", type(fn).__name__)
        raise ConfigError(
            "tables= is for a TrainStep of one program, planned for (state, batch); received "
            f"{received} with {len(args)} arguments{'' if stages is None else ' and stages='} for cluster "
            f"`{hardware.name}`. Leave it out, or write the step as autoshard.TrainStep(loss_fn, optimizer)."
        )
    on_devices = lambda: plan_on_devices(
        fn,
        *args,
        cluster=hardware,
        mesh=mesh,
        donate_argnums=donate_argnums,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        memory_budget_bytes=memory_budget_bytes,
        pins=pins,
        start=start,
        options=options,
        solution=solution,
        stages=stages,
        configuration=configuration,
        **kwargs,
    )
    chosen = tables or TableOptions()
    if not (isinstance(fn, TrainStep) and may_leave and chosen.on_hosts):
        return on_devices()
    state, batch = args
    of_one_program = dataclasses.replace(options, pipelines="never")  # as steps over rows are
    planner = HostPlanner(fn, state, batch, hardware, chosen, of_one_program, mesh, memory_budget_bytes, configuration)
    fixed = [name for name, value in (("pins", pins), ("start", start), ("solution", solution)) if value]

    @functools.cache
    def on_hosts() -> HostTablesPlan | AutoshardError | None:
        """The plan with tables in host memory, or why there is none; None where there are no tables."""
        try:
            if not planner.has_tables:
                return None
            if fixed:
                raise ConfigError(f"{', '.join(fixed)} speak of a step with all tables on the devices. Leave them out.")
            return planner.where_devices_do_not_suffice()
        except AutoshardError as error:
            return error

    if _exceeds(state, hardware, memory_budget_bytes, options) and isinstance(made := on_hosts(), HostTablesPlan):
        return made
    try:
        whole = on_devices()
    except MemoryBudgetError as error:
        made = on_hosts()
        if isinstance(made, HostTablesPlan):
            return made
        if made is not None:
            raise MemoryBudgetError(f"{error} Here they do not: {made}") from made
        staged = plan_in_stages_instead(
            error,
            fn,
            args,
            hardware,
            options,
            {"mesh": mesh, "pins": pins, "start": start, "solution": solution},
            donate_argnums=donate_argnums,
            memory_budget_bytes=memory_budget_bytes,
            configuration=configuration,
        )
        if staged is None:
            raise
        return staged
    return planner.where_faster(whole) if isinstance(whole, Plan) and not fixed else whole


def _exceeds(state: Any, cluster: Cluster, memory_budget_bytes: float | None, options: PlanOptions) -> bool:
    """Whether a state is too large for all devices together, however it is sharded: no search is needed then."""
    size_bytes = sum(
        math.prod(np.shape(x)) * getattr(getattr(x, "dtype", None), "itemsize", 8) for x in jax.tree.leaves(state)
    )
    device = cluster.groups[0].device_type
    return size_bytes > cluster.num_devices * budget_of(device, memory_budget_bytes, options)
