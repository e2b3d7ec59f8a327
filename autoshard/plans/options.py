"""What a caller may tune about planning."""

import dataclasses
import numbers
from collections.abc import Callable
from typing import Literal, get_args

from autoshard.compiler.schedule import Schedule
from autoshard.cost.host_copies import Offload
from autoshard.cost.in_pieces import Decompose
from autoshard.cost.lookups import Lookups
from autoshard.errors import ConfigError

DeviceOrder = Literal["sought", "listed"]


@dataclasses.dataclass(frozen=True, slots=True)
class PlanProgress:
    """A line of the planning's story: what is being done, and the solver's figures where it is solving."""

    stage: str
    detail: str
    elapsed_s: float
    objective_s: float | None = None
    bound_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of `autoshard.plan`.

    Attributes:
      time_limit_s: Wall-clock limit of the whole search, from when planning begins: the best plan by then is taken.
        Where there is none yet, the search goes on until there is. What has begun and cannot be cut short, such as
        writing the problem of a mesh, is done to its end. None: no limit but that of each mesh. What is found by the
        clock may differ from run to run.
      mesh_limit_s: Wall-clock limit of the search on each mesh, which solves several problems; where the gaps between a
        plan's buffers do not fit, half as much again.
      relative_gap: A plan is called optimal when it is proven to be within this share of the optimum.
      max_mesh_axes: With `mesh=None`, all logical meshes of up to this many axes are searched (at most 3). None: all of
        up to two axes, and on 16 devices or more, of those of three, the ones around the best, as long as one is faster
        (`autoshard/plans/mesh_walk.py`).
      memory_reserve: Share of the device's memory that the default budget leaves to the runtime: its context, code and
        buffers of collectives, the next batch, and what its allocator cannot use. Gaps between the plan's own buffers
        are predicted, and count against the budget.
      schedule: What the compiler is asked for. None: on GPUs, and on more than one TPU, what hides collectives behind
        computation; elsewhere, and if nothing fits the memory so, what needs least memory. TPUs hide gathers of
        weights, and sums of their gradients.
      overlap: Share of a kernel's time that collectives beside it make use of; see docs/cost_model.md.
      while_trips: How often the body of a `while` loop is assumed to run, which a program does not state.
      seed: Seed of the solver.
      work_limit: Limit of each solve in units of work instead of `time_limit_s` and `mesh_limit_s`: no clock is read,
        and equal inputs and options give equal plans. See `SolverOptions`.
      cache: Whether solutions are kept on disk, to answer unchanged problems at once and to start changed ones from.
        The environment variable AUTOSHARD_CACHE names the folder, or says `off`. Not used with `work_limit`.
      least_memory_s: Where nothing fits the memory, how long the least memory that would do is sought, over all meshes
        together; with 0 the error tells only a bound that needs no search.
      compile_check: Whether the plan of one program is compiled ahead of time for its devices, and corrected where the
        compiler does otherwise; see `autoshard/verify/closed_loop.py`. The compiler for GPUs and TPUs must be
        installed, else the plan says that it is not checked.
      compile_check_rounds: How many plans are compiled at most.
      compile_check_meshes: On GPUs, of how many meshes plans are compiled, where several are searched and others are
        predicted to be nearly as fast as the best: the one whose compiled schedule is the fastest by replay is taken;
        see `autoshard/verify/fastest_mesh.py`. It takes as long again for each.
      remat: What the layers of a `TrainStep` of one program keep for their backward pass. "as_written": what the
        program says, `jax.checkpoint` included. "search": the fastest policy that fits the memory; `jax.checkpoint` in
        the program is then one candidate of several (`autoshard/plans/variant_search.py`). It takes a plan for each
        form that is not passed over, two to six where memory is short. None: as written, and searched where that does
        not fit the memory, where it recomputes something, or where more memory would make the step faster.
      micro_batches: In how many micro-batches a `TrainStep` of one program runs its batch. "as_written": as the step
        says. A number: so many. "search": 1, 2, 4, ..., whatever is fastest. None: searched with `remat`, where the
        model has no state of its own and its loss is known to be a plain mean over examples, so that it is the same
        step (`autoshard/plans/mean_loss.py`). Asked for, other losses are cut too, with a warning.
      pipelines: Whether a `TrainStep` may be run in stages where all devices are of one kind. "search": it is planned
        as one program and in pipelines of stages, and the faster plan is taken; that takes several times as long. What
        speaks of one program alone (a mesh, pins ...) is refused. "never": one program, unless annotations ask for
        stages; refused where devices are of several kinds. None: one program; but `autoshard.plan` tries stages where
        that does not fit the memory and micro-batches are the same step, and plans warn where much of a step waits for
        what is sent between nodes.
      offload: What may lie in the memory of the hosts, where the cluster describes them with their links to the devices
        (`host`; of the live GPUs of one process it does). "never": nothing. "state": donated state that the update
        alone reads, such as optimizer moments; each is copied to the device for its update and back, every step, which
        takes time. "activations": residuals, which the backward pass reads; they are copied out behind the products
        that follow, and back behind those before. "all": both. Nothing is offloaded that fits, unless the memory it
        leaves makes the step faster still. None: nothing, unless no plan of one program fits the memory of the devices;
        then all, with a warning.
      device_order: Which device is at which coordinate of the mesh. "sought": the order under which the plan's step
        takes least. "listed": as the cluster lists them, row-major.
      adaptive: Whether the plan is one whose devices can be given unequal shares (`Balance`), if there is one that is
        better on average: one device is taken to be at half speed in a tenth of all steps. Free places for moved work
        count as memory, and `explain` tells how much slowdown of one device the plan can even out. It takes a plan for
        every mesh axis inside a node.
      lookups: What is known of look-ups in tables: how often which row is looked up, and whether rows may be exchanged
        for ids; see `Lookups`.
      decompose: Which matrix products may run in pieces, each beside the transfer of another, where they read what is
        gathered along a mesh axis or their sum is scattered (collective matmul); see docs/cost_model.md. "faster": what
        is faster so than with the whole collective, if that is waited for, as those of tensor parallelism are.
        "any": all that can. "never": none. Planning takes longer the more may.
      on_progress: Called as the work goes on.
    """

    time_limit_s: float | None = None
    mesh_limit_s: float = 300.0
    relative_gap: float = 5e-3
    max_mesh_axes: int | None = None
    memory_reserve: float = 0.1
    schedule: Schedule | None = None
    overlap: float = 1.0
    while_trips: float = 1.0
    seed: int = 0
    work_limit: float | None = None
    cache: bool = True
    least_memory_s: float = 60.0
    compile_check: bool = False
    compile_check_rounds: int = 4
    compile_check_meshes: int = 1
    remat: Literal["as_written", "search"] | None = None
    micro_batches: int | Literal["as_written", "search"] | None = None
    pipelines: Literal["never", "search"] | None = None
    offload: Offload | None = None
    device_order: DeviceOrder = "sought"
    adaptive: bool = False
    lookups: Lookups = Lookups()  # noqa: RUF009 - frozen
    decompose: Decompose = "never"
    on_progress: Callable[[PlanProgress], None] | None = None

    def __post_init__(self) -> None:
        """Refuses values that nothing would tell of later.

        Raises:
          ConfigError: An option has a value that it does not take.
        """
        shares = (
            ("overlap", self.overlap),
            ("memory_reserve", self.memory_reserve),
            ("relative_gap", self.relative_gap),
        )
        for name, value in shares:
            if not (isinstance(value, numbers.Real) and 0 <= value <= 1):
                raise ConfigError(
                    f"PlanOptions.{name} is a share from 0 to 1; received {value!r:.60}. Write 0.05 for 5 %."
                )
        limits = (
            ("time_limit_s", 0.0 if self.time_limit_s is None else self.time_limit_s),
            ("mesh_limit_s", self.mesh_limit_s),
            ("least_memory_s", self.least_memory_s),
        )
        for name, value in limits:
            if not (isinstance(value, numbers.Real) and value >= 0):
                raise ConfigError(f"PlanOptions.{name} is a number of seconds; received {value!r:.60}. Give 0 or more.")
        choices = ("decompose", self.decompose, Decompose), ("device_order", self.device_order, DeviceOrder)
        for name, value, kind in choices:
            if value not in get_args(kind):
                raise ConfigError(
                    f"PlanOptions.{name} is one of {', '.join(map(repr, get_args(kind)))}; received {value!r:.60}. "
                    "Choose one."
                )
        if self.schedule is not None and not isinstance(self.schedule, Schedule):
            raise ConfigError(
                f"PlanOptions.schedule is one of {', '.join(f'autoshard.{s}' for s in Schedule)}, or None; received "
                f"{self.schedule!r:.60}. Choose one."
            )
