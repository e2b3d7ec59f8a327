"""Runs a training step as a staged plan says: many jitted programs on many meshes, from one thread, asynchronously.

Every process walks through the same list of tasks and transfers in the same order; each runs the programs of its own
devices, and takes part in the transfers that concern it. Nothing waits for a result: JAX hands work to the devices, and
an array that is not there yet holds back only what reads it. How much is in flight is bounded by the schedule, because
every submesh runs its tasks in the schedule's order.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from autoshard.errors import PlanMismatchError, StageError, TransferError
from autoshard.execution.donated import refuse_deleted
from autoshard.pipelines.plan.parameter_owners import StageId
from autoshard.pipelines.plan.pipeline_plan import PipelinePlan
from autoshard.pipelines.run.agreement import check_same_plan
from autoshard.pipelines.run.create_state import create
from autoshard.pipelines.run.device_meshes import DeviceMeshes, bring
from autoshard.pipelines.run.recorder import Recorder
from autoshard.pipelines.run.stage_runners import StageRunners
from autoshard.pipelines.run.step import RandomKeys, RunningStep
from autoshard.pipelines.run.update import (
    LeafPlacement,
    OptimizerUpdate,
    StateLayout,
    TracedUpdate,
    state_layout,
    trace_update,
)
from autoshard.pipelines.schedule.timeline import Timeline
from autoshard.plans.apply import leaves_of, refuse_others
from autoshard.train_step import TrainStep, batch_size
from autoshard.transfer.cross_mesh import CrossMeshTransfer, as_array

COMPILING_S = 3600.0
"""How long processes wait for each other at least in the first two steps: each compiles its programs in the first, and
the others may meanwhile be in the second."""

_MOST_QUEUED = 4
"""Tasks of a submesh that are handed over before the first of them has ended, in a run of several processes."""


class StagedFunction:
    """A training step that runs as planned. Call it with `(state, batch)`.

    The state that it returns lies where the plan says, and is best passed on as it is; a state that lies otherwise is
    moved first. In a run of several processes all of them call it with equal host values or with the arrays that it
    returned, and with the whole batch. Each step then waits for its metrics, so that reading them cannot hang; to wait
    for other results use `wait`. After a TransferError the run is over: the processes no longer agree on what moves.

    Args:
      plan: What to do. step: The training step that was planned.
      devices: One for each device of the cluster, in its order; default all live devices.
      donate: Whether the buffers of the state may be reused; what is passed in must then not be used again. None: as
        planned.
      timeout_s: How long another process may keep this one waiting, from the third step on; more than its longest task.
      coordinator_address: As given to `jax.distributed.initialize`; see `CrossMeshTransfer`.
      record: Whether to measure when each task ran; see `timeline`. It costs a thread for each submesh.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        step: TrainStep,
        devices: Sequence[Any] | None = None,
        *,
        donate: bool | None = None,
        timeout_s: float = 300.0,
        coordinator_address: str | None = None,
        record: bool = False,
    ):
        self.plan, self.step = plan, step
        self.device_meshes = DeviceMeshes(plan, devices)
        self._timeout_s, self._num_steps = timeout_s, 0
        self.mover = CrossMeshTransfer(timeout_s=max(timeout_s, COMPILING_S), coordinator_address=coordinator_address)
        self._donate, self._records = plan.donates_state if donate is None else donate, record
        self._recorder: Recorder | None = None
        self._keys = RandomKeys(step)
        self._built: tuple[StageRunners, OptimizerUpdate] | None = None
        self._layout: StateLayout | None = None
        self._shapes: tuple[Any, Any] | None = plan.shapes
        timeline = plan.timeline
        self._tasks = [
            (StageId(e.pipeline, e.stage), e.phase, e.micro_batch)
            for e in sorted(timeline.events, key=lambda e: (e.start_s, e.stop_s, e.pipeline, e.submesh))
            if e.phase is not None and e.to_submesh is None
        ]
        self._marker_of = jax.jit(lambda x: jnp.ravel(x)[:1])
        self._is_shared = jax.process_count() > 1
        self._failure: TransferError | None = None
        if self._is_shared:
            check_same_plan(plan)
        # XLA:CPU may run what is queued in any order, and run out of threads. In a run of several processes little may
        # be queued, see `arrivals.MOST_PENDING`.
        is_cpu = self.device_meshes.meshes[0].devices.flat[0].platform == "cpu"
        self._most_queued = 1 if is_cpu else _MOST_QUEUED if self._is_shared else None

    def __call__(self, state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        """Takes one step: `(new state, metrics)`.

        Raises:
          PlanMismatchError: The step, the state or the batch is not what was planned.
          TraceError: An array was given to an earlier call to reuse.
          TransferError: Another process ended or stalled.
        """
        if self._failure is not None:
            raise TransferError("An earlier step failed. Start all processes again.") from self._failure
        try:
            return self._take_step(state, batch)
        except TransferError as error:
            self._failure = error
            raise
        except jax.errors.JaxRuntimeError:
            self.mover.blame()
            raise

    def _take_step(self, state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        refuse_deleted(self.step, (state, batch), jax.tree.leaves((state, batch)))
        self._check_batch(batch)
        runners, update = self._prepared(state, batch)
        state = self.place(state)
        self._recorder = Recorder(self.plan, self.device_meshes) if self._records else None
        running = RunningStep(runners, self.step, self.mover, self._keys, state, batch)
        self._run_tasks(running)
        state, metrics = update(state, running.gradients(), running.mutable(), running.metrics())
        result = state, {name: self._readable(x, f"metric {name}") for name, x in metrics.items()}
        if self._is_shared:
            self._watch_update(result[0])
            self.wait(result[1])
            self._num_steps += 1
            if self._num_steps == 2:
                self.mover.timeout_s = self._timeout_s
        if self._recorder is not None:
            self.wait(result)
            self._recorder.end()
        return result

    def _readable(self, metric: jax.Array, name: str) -> jax.Array:
        if metric.sharding != self.device_meshes.everywhere:
            return metric
        return as_array(self.mover.move(metric, self.device_meshes.readable, name=name))

    def _run_tasks(self, running: RunningStep) -> None:
        queues: dict[int, collections.deque[Any]] = collections.defaultdict(collections.deque)
        for one, phase, micro_batch in self._tasks:
            submesh = self.device_meshes.submesh_of(one)
            queue = queues[submesh]
            if self._most_queued is not None and len(queue) >= self._most_queued:
                self.wait(queue.popleft())
            made = running.run(one, phase, micro_batch)
            if made is None:
                continue
            marker = self._marker_of(
                made.addressable_shards[0].data
            )  # for `made` itself may be donated to the next task
            queue.append(marker)
            if others := self.device_meshes.others(submesh):
                self.mover.watch(f"{phase.name.lower()} {micro_batch} of {one}", others, marker)
            if self._recorder is not None:
                self._recorder.task(one, phase, micro_batch, marker)
        if self._is_shared:
            self.wait(list(queues.values()))

    def _watch_update(self, state: Any) -> None:
        """Watches a result of the update on each mesh of which other processes have a part."""
        by_mesh = {x.sharding.mesh: x for x in jax.tree.leaves(state)}
        for submesh, mesh in enumerate(self.device_meshes.meshes):
            if mesh in by_mesh and (others := self.device_meshes.others(submesh)):
                part = by_mesh[mesh].addressable_shards[0].data
                self.mover.watch("the optimizer's update", others, self._marker_of(part))

    @property
    def timeline(self) -> Timeline:
        """What was measured of the last step; needs `record`. All processes of a run must ask for it together.

        Raises:
          StageError: Nothing was recorded.
        """
        if self._recorder is None:
            raise StageError("No timeline was recorded. Pass record=True to `plan.jit`, and take a step.")
        return self._recorder.timeline()

    def prepare(self, state: Any, batch: Any) -> None:
        """Traces the step, and works out where everything lies; the first step does so if it was not done before.

        Args:
          state, batch: Arrays, or their shapes as `jax.ShapeDtypeStruct`.

        Raises:
          PlanMismatchError: The step, the state or the batch is not what was planned.
        """
        self._prepared(state, batch)

    def _prepared(self, state: Any, batch: Any) -> tuple[StageRunners, OptimizerUpdate]:
        if self._built is None:
            self._built = self._build(state, batch)
        return self._built

    @property
    def shardings(self) -> Any:
        """Where each leaf of the state lies, in its structure: for creating a state, or restoring a checkpoint."""
        layout = self._laid_out
        return jax.tree.unflatten(layout.tree, [located.sharding for located in layout.leaves])

    def in_shardings(self, args: Sequence[Any]) -> tuple[Any, None]:
        """Where each leaf of the state lies, and None for the batch, which the step shares out itself.

        Args:
          args: State and batch, as arrays or shapes.

        Raises:
          PlanMismatchError: The step, the state or the batch is not what was planned.
        """
        self.prepare(*args)
        return self.shardings, None

    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """Creates the state where the plan says: each submesh makes what lives there, and no device makes it all.

        Args:
          init_fn: Returns the state, e.g. from a seed. *args: Its arguments.

        Raises:
          PlanMismatchError: It returns another state than that of `prepare`.
        """
        layout = self._laid_out
        self._check_state(jax.eval_shape(init_fn, *args))
        return create(layout, self.device_meshes, init_fn, args)

    def place(self, state: Any) -> Any:
        """A state laid out as planned; leaves that lie so already stay as they are."""
        layout = self._laid_out
        self._check_state(state)
        placed = [
            bring(x, l.sharding, self.mover, f"leaf {n} of the state")
            for n, (x, l) in enumerate(zip(jax.tree.leaves(state), layout.leaves, strict=True))
        ]
        return jax.tree.unflatten(layout.tree, placed)

    @property
    def _laid_out(self) -> StateLayout:
        if self._layout is None and self.plan.shapes is not None:
            self.prepare(*self.plan.shapes)
        if self._layout is None:
            raise StageError(
                "Where a state lies is known once the step is prepared: call `prepare(state, batch)` with arrays or "
                "shapes, or take a step."
            )
        return self._layout

    def _check_state(self, state: Any) -> None:
        """Refuses another state than the step was prepared for."""
        assert self._shapes is not None  # a layout is known
        _refuse_another(self.step, self._shapes, (state, self._shapes[1]))

    def wait(self, arrays: Any) -> None:
        """Blocks until arrays are ready, as `jax.block_until_ready`, but not for ever if another process has died."""
        self.mover.wait(arrays)

    def _check_batch(self, batch: Any) -> None:
        """Refuses another batch than is planned, before the step stumbles over it."""
        found = batch_size(batch)
        if found != self.plan.batch_size:
            raise PlanMismatchError(
                f"The plan is for batches of {self.plan.batch_size} examples; received one of {found}. Plan again."
            )
        if self._shapes is not None:
            _refuse_another(self.step, self._shapes, (self._shapes[0], batch))

    def _build(self, state: Any, batch: Any) -> tuple[StageRunners, OptimizerUpdate]:
        traced = trace_step(self.plan, self.step, self.device_meshes, state, batch)
        runners, self._layout = traced.runners, traced.layout
        self._shapes = jax.tree.map(_shape, (state, batch))
        metrics = {}
        for name in runners.metric_types:
            owner = runners.metric_stage(name)
            metrics[name] = LeafPlacement(self.device_meshes.submesh_of(owner), runners[owner].whole)
        gradients = [traced.sums[name] for name in self.plan.parameters]
        unchanged = [n for n, name in enumerate(runners.mutable_names) if not runners.is_changed(name)]
        return runners, OptimizerUpdate(
            traced.finish, self._layout, gradients, metrics, unchanged, self.device_meshes, self.mover, self._donate
        )


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    """The shape of a leaf, and its type as a device has it."""
    dtype = getattr(x, "dtype", None)
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.extended)
    return jax.ShapeDtypeStruct(jnp.shape(x), dtype if is_key else jax.dtypes.canonicalize_dtype(jnp.result_type(x)))


def _refuse_another(step: TrainStep, planned: tuple[Any, Any], received: tuple[Any, Any]) -> None:
    """Refuses a state or a batch with other leaves than were planned.

    Raises:
      PlanMismatchError: A leaf has another shape, type or name; names the first.
    """
    planned, received = jax.tree.map(_shape, planned), jax.tree.map(_shape, received)
    if jax.tree.structure(planned) == jax.tree.structure(received):
        if jax.tree.leaves(planned) == jax.tree.leaves(received):
            return
    ours, theirs = leaves_of(step, planned), leaves_of(step, received)
    refuse_others(ours, theirs)
    for k, ((name, *_), (other, *_)) in enumerate(zip(ours, theirs, strict=True)):
        if name != other:
            raise PlanMismatchError(
                f"The plan was made for other arguments: leaf {k} is planned as `{name}`, but the function is called "
                f"with `{other}`. Plan again for these arguments."
            )


class TracedStep(NamedTuple):
    """A training step as its plan cuts it: the stages, the end of the step, where the state lies, and the gradients."""

    runners: StageRunners
    finish: TracedUpdate
    layout: StateLayout
    sums: dict[str, LeafPlacement]


def trace_step(plan: PipelinePlan, step: TrainStep, device_meshes: DeviceMeshes, state: Any, batch: Any) -> TracedStep:
    """Traces a step, with state and batch by shape, as a plan says; no other process need do the same.

    Raises:
      PlanMismatchError: The step, the state or the batch is not what was planned.
    """
    if step.parts and tuple(step.parts) != plan.parts:
        raise PlanMismatchError(
            f"A step that says its micro-batches runs in them, but the plan has some of {plan.parts} examples; "
            f"received a TrainStep with parts of {tuple(step.parts)}. Plan that step, or leave `parts` out."
        )
    runners = StageRunners(plan, step, device_meshes, state, batch)
    parameters, sums = runners.parameter_owners()
    mutable = {name: runners.mutable_owner(name) for name in runners.mutable_names}
    finish = trace_update(step, state, runners.metric_types)
    return TracedStep(runners, finish, state_layout(finish, parameters, sums, mutable, device_meshes), sums)
