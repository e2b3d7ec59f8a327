"""Runs a training step as a staged plan says: many jitted programs on many meshes, from one thread, asynchronously.

Every process walks through the same list of tasks and transfers in the same order; each runs the programs of its own
devices, and takes part in the transfers that concern it. Nothing waits for a result: JAX hands work to the devices, and
an array that is not there yet holds back only what reads it. How much is in flight is bounded by the schedule, because
every place runs its tasks in the schedule's order.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from autoshard.errors import PlanMismatchError, StageError, TransferError
from autoshard.runtime.agree import check_same_plan
from autoshard.runtime.create import create
from autoshard.runtime.fleet import Fleet, bring
from autoshard.runtime.move import CrossMesh
from autoshard.runtime.recorder import Recorder
from autoshard.runtime.stage_runner import StageRunner
from autoshard.runtime.update import Located, StateLayout, Update, state_layout
from autoshard.schedule.tasks import Phase, ScheduleKind
from autoshard.schedule.timeline import Timeline
from autoshard.stages.homes import StageId
from autoshard.stages.pricing import Model, trace_model
from autoshard.stages.stage_plan import check_stage
from autoshard.stages.staged_plan import StagedPlan
from autoshard.trace.layers import LayerCuts
from autoshard.trace.trace import path_name
from autoshard.train_step import TrainStep, batch_size

_Named = dict[str, Any]

COMPILING_S = 3600.0
"""How long processes wait for each other at least in the first step, in which each compiles its own programs."""

_MOST_QUEUED = 4
"""Tasks of a place that are handed over before the first of them has ended, in a run of several processes."""


@dataclasses.dataclass(slots=True)
class _InFlight:
    """What one stage holds of one micro-batch.

    Attributes:
      inputs: What earlier stages sent. gradients: What later stages sent back, by output; to be added up.
      held: What its phases hold for later ones.
    """

    inputs: _Named = dataclasses.field(default_factory=dict)
    gradients: dict[str, list[Any]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    held: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class _Step:
    """One step on its way.

    Attributes:
      params, mutable, sums: Of each stage, by name. keys: Of each stage, by micro-batch of its pipeline.
      factors: Of each stage, the weight of a micro-batch in the loss. flights: By stage and micro-batch.
      metrics: By name: (stage, share of the batch, value).
    """

    params: dict[StageId, _Named]
    mutable: dict[StageId, _Named]
    sums: dict[StageId, _Named]
    keys: dict[StageId, list[Any]]
    factors: dict[StageId, Any]
    batch: Any
    flights: dict[tuple[StageId, int], _InFlight]
    metrics: dict[str, list[tuple[StageId, float, Any]]]


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
      timeout_s: How long another process may keep this one waiting after the first step; longer than its longest task.
      coordinator_address: As given to `jax.distributed.initialize`; see `CrossMesh`.
      record: Whether to measure when each task ran; see `timeline`. It costs a thread for each place.
    """

    def __init__(
        self,
        plan: StagedPlan,
        step: TrainStep,
        devices: Sequence[Any] | None = None,
        *,
        donate: bool | None = None,
        timeout_s: float = 300.0,
        coordinator_address: str | None = None,
        record: bool = False,
    ):
        self.plan, self.step = plan, step
        self.fleet = Fleet(plan, devices)
        self._timeout_s = timeout_s
        self.mover = CrossMesh(timeout_s=max(timeout_s, COMPILING_S), coordinator_address=coordinator_address)
        self._donate, self._records = plan.donates_state if donate is None else donate, record
        self._recorder: Recorder | None = None
        self._runners: dict[StageId, StageRunner] = {}
        self._key_makers: dict[tuple[int, int, NamedSharding], Any] = {}
        self._update: Update | None = None
        self._layout: StateLayout | None = None
        timeline = plan.timeline
        self._tasks = [
            (StageId(e.pipeline, e.stage), e.phase, e.micro_batch)
            for e in sorted(timeline.events, key=lambda e: (e.start_s, e.stop_s, e.pipeline, e.place))
            if e.phase is not None and e.to_place is None
        ]
        self._sign_of = jax.jit(lambda x: jnp.ravel(x)[:1])
        self._is_shared = jax.process_count() > 1
        self._failure: TransferError | None = None
        if self._is_shared:
            check_same_plan(plan)
        # XLA:CPU may run what is queued in any order, and run out of threads. In a run of several processes little may
        # be queued, see `arrivals.MOST_OWED`.
        is_cpu = self.fleet.meshes[0].devices.flat[0].platform == "cpu"
        self._most_queued = 1 if is_cpu else _MOST_QUEUED if self._is_shared else None

    def __call__(self, state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        """Takes one step: `(new state, metrics)`.

        Raises:
          PlanMismatchError: The step, the state or the batch is not what was planned.
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
        self.prepare(state, batch)
        self._check_batch(batch)
        state = self.place(state)
        self._recorder = Recorder(self.plan, self.fleet) if self._records else None
        running = self._begin(state, batch)
        self._run_tasks(running)
        gradients = self._reduce(running)
        mutable = self._new_mutable(running, state)
        metrics = self._metrics(running)
        result = self._update(state, gradients, mutable, metrics)
        if self._is_shared:
            self._watch_update(result[0])
            self.wait(result[1])
            self.mover.timeout_s = self._timeout_s
        if self._recorder is not None:
            self.wait(result)
            self._recorder.end()
        return result

    def _run_tasks(self, running: _Step) -> None:
        queues: dict[int, collections.deque[Any]] = collections.defaultdict(collections.deque)
        for one, phase, micro_batch in self._tasks:
            place = self.fleet.place_of(one)
            queue = queues[place]
            if self._most_queued is not None and len(queue) >= self._most_queued:
                self.wait(queue.popleft())
            made = self._run(running, one, phase, micro_batch)
            if made is None:
                continue
            sign = self._sign_of(made.addressable_shards[0].data)  # for `made` itself may be donated to the next task
            queue.append(sign)
            if others := self.fleet.others(place):
                self.mover.watch(f"{phase.name.lower()} {micro_batch} of {one}", others, sign)
            if self._recorder is not None:
                self._recorder.task(one, phase, micro_batch, sign)
        if self._is_shared:
            self.wait(list(queues.values()))

    def _watch_update(self, state: Any) -> None:
        """Watches a result of the update on each mesh of which other processes have a part."""
        by_mesh = {x.sharding.mesh: x for x in jax.tree.leaves(state)}
        for place, mesh in enumerate(self.fleet.meshes):
            if mesh in by_mesh and (others := self.fleet.others(place)):
                part = by_mesh[mesh].addressable_shards[0].data
                self.mover.watch("the optimizer's update", others, self._sign_of(part))

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
        if self._update is None:
            self._build(state, batch)

    @property
    def shardings(self) -> Any:
        """Where each leaf of the state lies, in its structure: for creating a state, or restoring a checkpoint."""
        layout = self._laid_out
        return jax.tree.unflatten(layout.tree, [located.sharding for located in layout.leaves])

    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """Creates the state where the plan says: each place makes what lives there, and no device makes it all.

        Args:
          init_fn: Returns the state, e.g. from a seed. *args: Its arguments.

        Raises:
          PlanMismatchError: It returns another state than that of `prepare`.
        """
        layout = self._laid_out
        self._check_leaves(jax.eval_shape(init_fn, *args))
        return create(layout, self.fleet, init_fn, args)

    def place(self, state: Any) -> Any:
        """A state laid out as planned; leaves that lie so already stay as they are."""
        layout = self._laid_out
        self._check_leaves(state)
        placed = [
            bring(x, l.sharding, self.mover, f"leaf {n} of the state")
            for n, (x, l) in enumerate(zip(jax.tree.leaves(state), layout.leaves, strict=True))
        ]
        return jax.tree.unflatten(layout.tree, placed)

    @property
    def _laid_out(self) -> StateLayout:
        if self._layout is None:
            raise StageError(
                "Where a state lies is known once the step is prepared: call `prepare(state, batch)` with arrays or "
                "shapes, or take a step."
            )
        return self._layout

    def _check_leaves(self, state: Any) -> None:
        found, planned = len(jax.tree.leaves(state)), len(self._laid_out.leaves)
        if found != planned:
            raise PlanMismatchError(
                f"The state has {found} leaves, but the step was prepared for one with {planned}. Plan again for it."
            )

    def wait(self, arrays: Any) -> None:
        """Blocks until arrays are ready, as `jax.block_until_ready`, but not for ever if another process has died."""
        self.mover.wait(arrays)

    def _check_batch(self, batch: Any) -> None:
        found = batch_size(batch)
        if found != self.plan.batch_size:
            raise PlanMismatchError(
                f"The plan is for batches of {self.plan.batch_size} examples; received one of {found}. Plan again."
            )

    def _build(self, state: Any, batch: Any) -> None:
        plan = self.plan
        cuts = LayerCuts(plan.starts, plan.stop, plan.layers.names)
        models: dict[int, Model] = {}
        for pipeline in plan.arrangement.pipelines:
            size = pipeline.micro_batch_size
            if size not in models:
                models[size] = model = trace_model(self.step, state, batch, size, cuts)
                if model.forward.params.names != plan.parameters or model.stages.cuts.starts != plan.starts:
                    raise PlanMismatchError(
                        "The training step is no longer the one that was planned: its loss has other parameters or "
                        "other layers. Plan again."
                    )
        for one in plan.stage_ids:
            pipeline = plan.pipeline(one.pipeline)
            part, model = pipeline.stages[one.stage], models[pipeline.micro_batch_size]
            program = model.stages.program(part.start, part.stop)
            stage = check_stage(model.forward, program, part.rematerialise, plan.plan_of(one))
            splits = pipeline.schedule is ScheduleKind.ZERO_BUBBLE
            self._runners[one] = StageRunner(stage, plan.plan_of(one), self.fleet.mesh_of(one), splits)
        forward = next(iter(models.values())).forward
        self._mutable_names = forward.mutable.names
        parameters, sums = self._homes(state)
        mutable = {n: self._mutable_home(n) for n in self._mutable_names}
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        self._unread_shapes = dict(zip(plan.parameters, jax.tree.leaves(shapes.params), strict=True))
        self._layout = state_layout(shapes, parameters, sums, mutable, self.fleet)
        types = map(self._metric_type, forward.metric_dtypes)
        self._metric_types = dict(zip(forward.metrics.names, types, strict=True))
        where = {}
        for name in forward.metrics.names:
            home = self._metric_home(name)
            where[name] = Located(self.fleet.place_of(home), self._runners[home].whole), self._metric_types[name]
        gradients = [sums[name] for name in plan.parameters]
        unchanged = [n for n, name in enumerate(self._mutable_names) if not self._is_changed(name)]
        self._update = Update(
            self.step, shapes, self._layout, gradients, where, unchanged, self.fleet, self.mover, self._donate
        )

    def _homes(self, state: Any) -> tuple[dict[str, Located], dict[str, Located]]:
        """Where each parameter lives, and its sum of gradients."""
        parameters, sums = {}, {}
        for name, home in zip(self.plan.parameters, self.plan.homes, strict=True):
            runner, place = self._runners[home], self.fleet.place_of(home)
            parameters[name] = Located(place, runner.params.get(name, runner.whole))
            sums[name] = Located(place, runner.new_sums.get(name, parameters[name].sharding))
        return parameters, sums

    def _mutable_home(self, name: str) -> Located:
        one = self._mutable_stage(name)
        if one is None:
            return Located(None, self.fleet.everywhere)
        runner = self._runners[one]
        return Located(self.fleet.place_of(one), runner.new_mutable.get(name) or runner.mutable[name])

    def _mutable_stage(self, name: str) -> StageId | None:
        """The stage of the first pipeline that changes or reads a leaf of the mutable state."""
        first = [o for o in self._runners if o.pipeline == 0]
        changing = [o for o in first if name in self._runners[o].new_mutable]
        return next(iter(changing or [o for o in first if name in self._runners[o].mutable]), None)

    def _is_changed(self, name: str) -> bool:
        """Whether any stage changes a leaf of the mutable state."""
        return any(name in runner.new_mutable for runner in self._runners.values())

    def _metric_home(self, name: str) -> StageId:
        return next(o for o in self._runners if name in self._runners[o].metrics)

    def _metric_type(self, dtype: Any) -> Any:
        """The type of a metric's mean: of several whole numbers it is no whole number."""
        return dtype if jnp.issubdtype(dtype, jnp.inexact) or len(self.plan.parts) == 1 else jnp.dtype(jnp.float32)

    # ---- one step

    def _begin(self, state: Any, batch: Any) -> _Step:
        plan, move = self.plan, self.mover.move
        names = plan.parameters
        weights = dict(zip(names, jax.tree.leaves(state.params), strict=True))
        mutable = dict(zip(self._mutable_names, jax.tree.leaves(state.mutable), strict=True))
        params: dict[StageId, _Named] = {}
        own_mutable: dict[StageId, _Named] = {}
        for one, runner in self._runners.items():
            params[one] = {n: move(weights[n], s, name=f"parameter {n}") for n, s in runner.params.items()}
            own_mutable[one] = {n: self._given_mutable(mutable[n], s, one, n) for n, s in runner.mutable.items()}
        sums = {one: r.zeros() if r.is_local else dict.fromkeys(r.sums) for one, r in self._runners.items()}
        host = jax.tree.map(_on_host, batch)
        return _Step(
            params,
            own_mutable,
            sums,
            {one: self._keys(one, state) for one in self._runners},
            {one: self._factor(one, state) for one in self._runners},
            host,
            collections.defaultdict(_InFlight),
            collections.defaultdict(list),
        )

    def _given_mutable(self, leaf: Any, sharding: NamedSharding, one: StageId, name: str) -> Any:
        if self._mutable_home(name).place is None:
            return self.fleet.copy_on(leaf, self.fleet.place_of(one))
        return self.mover.move(leaf, sharding, name=f"mutable state {name}")

    def _keys(self, one: StageId, state: Any) -> list[Any]:
        """The random keys of a stage's micro-batches."""
        runner, place = self._runners[one], self.fleet.place_of(one)
        pipeline = self.plan.pipeline(one.pipeline)
        if not (runner.reads_key and runner.is_local):
            return [None] * pipeline.num_micro_batches
        rng, number = self.fleet.copy_on(state.rng, place), self.fleet.copy_on(state.step, place)
        first = sum(p.num_micro_batches for p in self.plan.arrangement.pipelines[: one.pipeline])
        count, total = pipeline.num_micro_batches, len(self.plan.parts)
        return self._key_maker(state, first, count, total, runner.whole)(rng, number)

    def _key_maker(self, state: Any, first: int, count: int, total: int, whole: NamedSharding) -> Any:
        known = self._key_makers
        if (first, count, whole) not in known:
            step = self.step

            def keys(rng: Any, number: Any) -> list[Any]:
                key = step.key(state.replace(rng=rng, step=number))
                return [step.part_key(key, first + m, total) for m in range(count)]

            known[first, count, whole] = jax.jit(keys, out_shardings=[whole] * count)
        return known[first, count, whole]

    def _factor(self, one: StageId, state: Any) -> Any:
        """The weight of one micro-batch in the loss, on a stage's devices."""
        runner = self._runners[one]
        if not runner.is_local:
            return None
        share = np.float32(self.plan.pipeline(one.pipeline).micro_batch_size / self.plan.batch_size)
        whole = runner.whole
        scale = self.step.scale(state)
        if scale is None:
            return jax.make_array_from_callback((), whole, lambda _: share, dtype=np.float32)
        return self.fleet.copy_on(scale, self.fleet.place_of(one)) * share

    def _run(self, running: _Step, one: StageId, phase: Phase, micro_batch: int) -> jax.Array | None:
        """Runs a task, and sends on what others wait for; gives an array that it makes, if it does here."""
        runner = self._runners[one]
        flight = running.flights[one, micro_batch]
        done = None
        if runner.is_local:
            slots, given = runner.stage.slots, set(runner.given(phase))
            arguments: dict[int, Any] = {}

            def fill(positions: range, values: Mapping[str, Any], layouts: Mapping[str, Any]) -> None:
                for n, name in zip(positions, layouts, strict=True):
                    if n in given:
                        arguments[n] = values[name]

            fill(slots.params, running.params[one], runner.params)
            fill(slots.mutable, running.mutable[one], runner.mutable)
            fill(slots.inputs, flight.inputs, runner.inputs)
            fill(slots.sums, running.sums[one], runner.sums)
            if given & set(slots.batch):
                fill(slots.batch, self._batch_part(running, one, micro_batch), runner.batch)
            if given & set(slots.key):
                arguments[slots.key.start] = running.keys[one][micro_batch]
            if slots.factor in given:
                arguments[slots.factor] = running.factors[one]
            if given & set(slots.gradients):
                fill(slots.gradients, self._gradients_of(flight, runner), runner.gradients)
            done = runner.run(phase, arguments, flight.held)
        results = {} if done is None else done.results
        if done is not None:
            flight.held = runner.held_after(phase, flight.held, done.held)
        self._take(running, one, phase, micro_batch, results)
        if phase is self._last_phase(one):
            running.flights.pop((one, micro_batch), None)
        return None if done is None else next(iter(jax.tree.leaves((results, done.held))), None)

    def _last_phase(self, one: StageId) -> Phase:
        splits = self.plan.pipeline(one.pipeline).schedule is ScheduleKind.ZERO_BUBBLE
        return Phase.WEIGHT if splits else Phase.BACKWARD

    def _batch_part(self, running: _Step, one: StageId, micro_batch: int) -> _Named:
        pipeline = self.plan.pipeline(one.pipeline)
        first = sum(p.num_examples for p in self.plan.arrangement.pipelines[: one.pipeline])
        first += micro_batch * pipeline.micro_batch_size
        runner = self._runners[one]
        named = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(running.batch)}
        part = {}
        for name, sharding in runner.batch.items():
            rows = named[name][first : first + pipeline.micro_batch_size]
            part[name] = jax.make_array_from_callback(
                rows.shape, sharding, lambda index, rows=rows: rows[index], dtype=rows.dtype
            )
        return part

    def _gradients_of(self, flight: _InFlight, runner: StageRunner) -> _Named:
        """The gradients of a stage's outputs: what all readers sent, added up; there is one at least."""
        return {name: runner.add(flight.gradients[name]) for name in runner.gradients}

    def _take(self, running: _Step, one: StageId, phase: Phase, micro_batch: int, results: Mapping[int, Any]) -> None:
        """Sends on the results of a task. Every process comes here for every task, and makes the same moves."""
        runner = self._runners[one]
        slots = runner.stage.slots
        where = f"micro-batch {micro_batch} of {one}"
        pipeline = self.plan.pipeline(one.pipeline)
        held = lambda positions, name, layouts: results.get(positions[list(layouts).index(name)])
        if phase is Phase.FORWARD:
            for name, sharding in runner.outputs.items():
                array = held(slots.outputs, name, runner.outputs)
                for later in range(one.stage + 1, len(pipeline.stages)):
                    reader = StageId(one.pipeline, later)
                    wanted = self._runners[reader].inputs.get(name)
                    if wanted is not None:
                        planned = runner.plan.outputs[slots.outputs[list(runner.outputs).index(name)]]
                        source = _or_shape(array, planned, sharding)
                        arrived = self.mover.move(source, wanted, name=f"{name} of {where}")
                        running.flights[reader, micro_batch].inputs[name] = arrived
            for name in runner.new_mutable:
                running.mutable[one][name] = held(slots.new_mutable, name, runner.new_mutable)
            share = pipeline.micro_batch_size / self.plan.batch_size
            for name in runner.metrics:
                running.metrics[name].append((one, share, held(slots.metrics, name, runner.metrics)))
            return
        if any(n in results for n in slots.new_sums):
            running.sums[one] = {n: results[k] for n, k in zip(runner.new_sums, slots.new_sums, strict=True)}
        if phase is Phase.BACKWARD:
            for name, sharding in runner.input_gradients.items():
                array = held(slots.input_gradients, name, runner.input_gradients)
                source = self._source_of(one, name)
                wanted = self._runners[source].gradients[name]
                planned = runner.plan.outputs[slots.input_gradients[list(runner.input_gradients).index(name)]]
                arrived = self.mover.move(
                    _or_shape(array, planned, sharding), wanted, name=f"the gradient of {name} of {where}"
                )
                running.flights[source, micro_batch].gradients[name].append(arrived)

    def _source_of(self, one: StageId, name: str) -> StageId:
        """The stage that makes an input of another."""
        for earlier in range(one.stage):
            source = StageId(one.pipeline, earlier)
            if name in self._runners[source].outputs:
                return source
        raise StageError(f"No stage before {one} makes {name}; the plan contradicts itself. Plan again.")

    def _reduce(self, running: _Step) -> list[Any]:
        """The gradient of each parameter, at its home."""
        gradients = []
        for name, home in zip(self.plan.parameters, self.plan.homes, strict=True):
            runner = self._runners[home]
            target = runner.new_sums.get(name)
            own: list[Any] = []
            for one, reader in self._runners.items():
                if name not in reader.sums:
                    continue
                position = reader.stage.slots.new_sums[list(reader.new_sums).index(name)]
                source = _or_shape(running.sums[one][name], reader.plan.outputs[position], reader.new_sums[name])
                if one == home:
                    own.insert(0, source)
                else:
                    moved = self.mover.move(source, target, name=f"the gradient of {name} of {one}", may_alias=False)
                    own.append(moved)
            if not own:  # nobody reads it, so nothing depends on it
                shape = self._unread_shapes[name]
                own = [jnp.zeros(shape.shape, shape.dtype, device=runner.whole) if runner.is_local else shape]
            gradients.append(runner.add(own) if runner.is_local else own[0])
        return gradients

    def _new_mutable(self, running: _Step, state: Any) -> list[Any]:
        """The mutable state after the step: of several pipelines, the mean by their shares of the batch."""
        before = dict(zip(self._mutable_names, jax.tree.leaves(state.mutable), strict=True))
        found = []
        for name in self._mutable_names:
            if not self._is_changed(name):
                found.append(before[name])
                continue
            home = self._mutable_stage(name)
            runner, arrays, shares = self._runners[home], [], []
            for one, other in self._runners.items():
                if name not in other.new_mutable:
                    continue
                position = other.stage.slots.new_mutable[list(other.new_mutable).index(name)]
                source = _or_shape(
                    running.mutable[one].get(name), other.plan.outputs[position], other.new_mutable[name]
                )
                arrays.append(self.mover.move(source, runner.new_mutable[name], name=f"mutable state {name} of {one}"))
                shares.append(self.plan.pipeline(one.pipeline).num_examples / self.plan.batch_size)
            found.append(_weighted(arrays, shares) if len(arrays) > 1 and runner.is_local else arrays[0])
        return found

    def _metrics(self, running: _Step) -> dict[str, Any]:
        """The mean of each metric over the batch, on the place where it is made first."""
        found = {}
        for name, values in running.metrics.items():
            by_stage: dict[StageId, list[tuple[float, Any]]] = collections.defaultdict(list)
            for one, share, value in values:
                by_stage[one].append((share, value))
            home, dtype = self._metric_home(name), self._metric_types[name]
            target = self._runners[home].whole
            sums = []
            for one, parts in by_stage.items():
                runner = self._runners[one]
                own = None
                if runner.is_local:
                    own = _weighted([v.astype(dtype) for _, v in parts], [s for s, _ in parts])
                shape = jax.ShapeDtypeStruct((), dtype, sharding=runner.whole)
                sums.append(self.mover.move(shape if own is None else own, target, name=f"metric {name} of {one}"))
            found[name] = sum(sums[1:], sums[0]) if self._runners[home].is_local else sums[0]
        return found


@jax.jit
def _weighted_sum(arrays: Sequence[Any], shares: Sequence[Any]) -> Any:
    return sum(a * s for a, s in zip(arrays, shares, strict=True))


def _weighted(arrays: Sequence[Any], shares: Sequence[float]) -> Any:
    """The sum of arrays by their shares, in their own type; whole numbers as the first has them."""
    if not jnp.issubdtype(arrays[0].dtype, jnp.inexact):
        return arrays[0]
    return _weighted_sum(list(arrays), [np.asarray(s, arrays[0].dtype) for s in shares])


def _or_shape(array: Any, planned: Any, sharding: NamedSharding) -> Any:
    """An array, or what stands for it in a process that does not have it."""
    if array is not None:
        return array
    return jax.ShapeDtypeStruct(planned.shape, jnp.dtype(planned.dtype), sharding=sharding)


def _on_host(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise StageError(
            "In a run of several processes each must be given the whole batch, on its host or its devices; received an "
            f"array of shape {x.shape} whose sharding is {x.sharding}. Load all examples in every process."
        )
    host = np.asarray(x)
    return host.astype(jax.dtypes.canonicalize_dtype(host.dtype))
