"""One step on its way: what every stage has at hand, what is in flight, and what goes from stage to stage.

Every process makes the same calls in the same order, and with them the same moves; what only other processes have is
stood for by shapes.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.errors import StageError
from autoshard.pipelines.plan.parameter_owners import StageId
from autoshard.pipelines.run.phase_functions import PhaseResult
from autoshard.pipelines.run.stage_runner import Leaves
from autoshard.pipelines.run.stage_runners import StageRunners
from autoshard.pipelines.schedule.tasks import Phase
from autoshard.trace.trace import path_name
from autoshard.train_step import TrainStep
from autoshard.transfer.cross_mesh import CrossMeshTransfer, as_array

_Named = dict[str, Any]


@dataclasses.dataclass(slots=True)
class _InFlight:
    """What one stage holds of one micro-batch.

    Attributes:
      inputs: What earlier stages sent. gradients: What later stages sent back, by output; to be added up.
      mutable: The mutable state as its forward task read it; others have gone on when its backward task runs.
      residuals: What its phases hold for later ones.
    """

    mutable: _Named = dataclasses.field(default_factory=dict)
    inputs: _Named = dataclasses.field(default_factory=dict)
    gradients: dict[str, list[Any]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    residuals: list[Any] = dataclasses.field(default_factory=list)


class RandomKeys:
    """Makes the random keys of micro-batches; what it compiled serves all steps."""

    def __init__(self, step: TrainStep):
        self._step = step
        self._made: dict[StageId, Callable[[Any, Any], list[Any]]] = {}

    def of(self, runners: StageRunners, one: StageId, state: Any) -> list[Any]:
        """The key of each micro-batch of a stage's pipeline; None where they are not needed here."""
        runner, submesh, pipeline = (
            runners[one],
            runners.device_meshes.submesh_of(one),
            runners.plan.pipeline(one.pipeline),
        )
        count, total = pipeline.num_micro_batches, len(runners.plan.parts)
        if not (runner.reads_key and runner.is_local):
            return [None] * count
        first = sum(p.num_micro_batches for p in runners.plan.arrangement.pipelines[: one.pipeline])
        if one not in self._made:
            step = self._step

            def keys(rng: Any, number: Any) -> list[Any]:
                key = step.key(state.replace(rng=rng, step=number))
                return [step.part_key(key, first + m, total) for m in range(count)]

            self._made[one] = jax.jit(keys, out_shardings=[runner.whole] * count)
        return self._made[one](
            runners.device_meshes.copy_on(state.rng, submesh), runners.device_meshes.copy_on(state.step, submesh)
        )


class RunningStep:
    """A step from its beginning, when copies of weights are sent, to the gradients of all parameters at their owners.

    Args:
      runners: The stages. step: The training step. mover: What moves arrays between meshes. keys: Makes random keys.
      state: Laid out as planned. batch: The whole batch.

    Raises:
      StageError: In a run of several processes, the batch is not whole in each.
    """

    def __init__(
        self, runners: StageRunners, step: TrainStep, mover: CrossMeshTransfer, keys: RandomKeys, state: Any, batch: Any
    ):
        self._runners, self._step, self._mover = runners, step, mover
        self._mutable_before = dict(zip(runners.mutable_names, jax.tree.leaves(state.mutable), strict=True))
        weights = dict(zip(runners.plan.parameters, jax.tree.leaves(state.params), strict=True))
        self._params: dict[StageId, _Named] = {}
        self._mutable: dict[StageId, _Named] = {}
        for one, runner in runners:
            self._params[one] = {
                n: mover.move(weights[n], leaf.sharding, name=f"parameter {n}") for n, leaf in runner.params.items()
            }
            self._mutable[one] = self._given_mutable(one)
        self._sums = {one: r.zeros() if r.is_local else dict.fromkeys(r.sums) for one, r in runners}
        self._keys = {one: keys.of(runners, one, state) for one, _ in runners}
        self._factors = {one: self._factor(one, state) for one, _ in runners}
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        self._batch = {path_name(path): _on_host(x) for path, x in leaves}
        self._flights: dict[tuple[StageId, int], _InFlight] = collections.defaultdict(_InFlight)
        self._made_metrics: dict[str, dict[StageId, list[Any]]] = collections.defaultdict(
            lambda: collections.defaultdict(list)
        )

    def _given_mutable(self, one: StageId) -> _Named:
        """The mutable state that a stage begins with: that before the step, counters ahead by what the pipelines before
        this one add."""
        runners, found = self._runners, {}
        before = runners.plan.arrangement.pipelines[: one.pipeline]
        for name, leaf in runners[one].mutable.items():
            own = self._mutable_before[name]
            if runners.mutable_owner(name).submesh is None:
                found[name] = runners.device_meshes.copy_on(own, runners.device_meshes.submesh_of(one))
            else:
                found[name] = self._mover.move(own, leaf.sharding, name=f"mutable state {name}")
            if runners[one].is_local and (added := runners.counted(name, before)):
                found[name] = _counted_on(found[name], added)
        return found

    def _factor(self, one: StageId, state: Any) -> Any:
        """The weight of one micro-batch in the loss, on a stage's devices."""
        runner, plan = self._runners[one], self._runners.plan
        if not runner.is_local:
            return None
        share = np.float32(plan.pipeline(one.pipeline).micro_batch_size / plan.batch_size)
        scale = self._step.scale(state)
        if scale is None:
            return jax.make_array_from_callback((), runner.whole, lambda _: share, dtype=np.float32)
        meshes = self._runners.device_meshes
        return as_array(meshes.copy_on(scale, meshes.submesh_of(one))) * share

    def run(self, one: StageId, phase: Phase, micro_batch: int) -> jax.Array | None:
        """Runs a task, if it is one of this process, and sends on what others wait for.

        Returns:
          An array that the task makes; None if it makes none here.
        """
        runner = self._runners[one]
        flight = self._flights[one, micro_batch]
        ran = None
        if phase is Phase.FORWARD:
            flight.mutable = dict(self._mutable[one])
        if runner.is_local:
            ran = runner.run(phase, self._arguments(one, phase, micro_batch, flight), flight.residuals)
        if ran is not None:
            flight.residuals = runner.residuals_after(phase, flight.residuals, ran.residuals)
        results = PhaseResult({}, ()) if ran is None else ran
        if phase is Phase.FORWARD:
            self._send_outputs(one, micro_batch, results)
        else:
            self._take_sums(one, results)
            if phase is Phase.BACKWARD:
                self._send_gradients(one, micro_batch, results)
        if phase is runner.last_phase:
            self._flights.pop((one, micro_batch), None)
        return next(iter(jax.tree.leaves((results.results, results.residuals))), None)

    def _arguments(self, one: StageId, phase: Phase, micro_batch: int, flight: _InFlight) -> dict[int, Any]:
        """By position, what a task reads."""
        runner = self._runners[one]
        read = runner.reads(phase)
        arguments: dict[int, Any] = {}

        def fill(leaves: Leaves, value_of: Callable[[str], Any]) -> None:
            arguments.update((leaf.position, value_of(n)) for n, leaf in leaves.items() if leaf.position in read)

        fill(runner.params, self._params[one].__getitem__)
        fill(runner.mutable, flight.mutable.__getitem__)
        fill(runner.sums, self._sums[one].__getitem__)
        fill(runner.inputs, lambda name: flight.inputs[name])
        fill(runner.batch, lambda name: self._batch_part(one, micro_batch, name))
        fill(runner.gradients, lambda name: runner.add(flight.gradients[name]))
        if runner.reads_key and runner.key_position in read:
            arguments[runner.key_position] = self._keys[one][micro_batch]
        if runner.factor_position in read:
            arguments[runner.factor_position] = self._factors[one]
        return arguments

    def _batch_part(self, one: StageId, micro_batch: int, name: str) -> jax.Array:
        """The examples of a micro-batch of one leaf of the batch."""
        plan = self._runners.plan
        size = plan.pipeline(one.pipeline).micro_batch_size
        first = sum(p.num_examples for p in plan.arrangement.pipelines[: one.pipeline]) + micro_batch * size
        rows = self._batch[name][first : first + size]
        sharding = self._runners[one].batch[name].sharding
        return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index], dtype=rows.dtype)

    def _send_outputs(self, one: StageId, micro_batch: int, ran: PhaseResult) -> None:
        runner = self._runners[one]
        for name, leaf in runner.outputs.items():
            array = leaf.or_shape(ran.results.get(leaf.position))
            for reader, wanted in self._runners.readers(one, name):
                arrived = self._mover.move(array, wanted.sharding, name=f"{name} of micro-batch {micro_batch} of {one}")
                self._flights[reader, micro_batch].inputs[name] = arrived
        for name, leaf in runner.new_mutable.items():
            self._mutable[one][name] = ran.results.get(leaf.position)
        for name in [n for n in runner.mutable if n not in runner.new_mutable] if runner.is_local else ():
            if added := self._runners.added(name, self._runners.plan.pipeline(one.pipeline)):  # another stage counts
                self._mutable[one][name] = _counted_on(self._mutable[one][name], added)
        for name, leaf in runner.metrics.items():
            self._made_metrics[name][one].append(ran.results.get(leaf.position))

    def _take_sums(self, one: StageId, ran: PhaseResult) -> None:
        leaves = self._runners[one].new_sums
        if any(leaf.position in ran.results for leaf in leaves.values()):
            self._sums[one] = {name: ran.results[leaf.position] for name, leaf in leaves.items()}

    def _send_gradients(self, one: StageId, micro_batch: int, ran: PhaseResult) -> None:
        for name, leaf in self._runners[one].input_gradients.items():
            array = leaf.or_shape(ran.results.get(leaf.position))
            source = self._runners.source(one, name)
            wanted = self._runners[source].gradients[name].sharding
            what = f"the gradient of {name} of micro-batch {micro_batch} of {one}"
            self._flights[source, micro_batch].gradients[name].append(self._mover.move(array, wanted, name=what))

    def gradients(self) -> list[Any]:
        """The gradient of each parameter, at its owner."""
        runners, found = self._runners, []
        for name, owner in zip(runners.plan.parameters, runners.plan.owners, strict=True):
            runner = runners[owner]
            parts: list[Any] = []
            for one, reader in runners:
                if name not in reader.sums:
                    continue
                own = reader.new_sums[name].or_shape(self._sums[one][name])
                if one == owner:
                    parts.insert(0, own)
                else:
                    target, what = runner.new_sums[name].sharding, f"the gradient of {name} of {one}"
                    parts.append(self._mover.move(own, target, name=what, may_alias=False))
            if not parts:  # nobody reads it, so nothing depends on it
                shape = runners.shapes[name]
                parts = [jnp.zeros(shape.shape, shape.dtype, device=runner.whole) if runner.is_local else shape]
            found.append(runner.add(parts) if runner.is_local else parts[0])
        return found

    def mutable(self) -> list[Any]:
        """The mutable state after the step: of several pipelines, the mean by their shares of the batch; of counters,
        what all pipelines in turn make of them."""
        runners, found = self._runners, []
        for name in runners.mutable_names:
            owner = runners.mutable_stage(name)
            if owner is None or not runners.is_changed(name):
                found.append(self._mutable_before[name])
                continue
            runner = runners[owner]
            added = runners.counted(name, runners.plan.arrangement.pipelines[1:])
            if added is not None:
                own = runner.new_mutable[name].or_shape(self._mutable[owner].get(name))
                found.append(_counted_on(own, added) if added and runner.is_local else own)
                continue
            arrays, shares = [], []
            for one, other in runners:
                if name in other.new_mutable:
                    own = other.new_mutable[name].or_shape(self._mutable[one].get(name))
                    target, what = runner.new_mutable[name].sharding, f"mutable state {name} of {one}"
                    arrays.append(self._mover.move(own, target, name=what))
                    shares.append(runners.plan.pipeline(one.pipeline).num_examples / runners.plan.batch_size)
            found.append(_weighted(arrays, shares) if len(arrays) > 1 and runner.is_local else arrays[0])
        return found

    def metrics(self) -> dict[str, Any]:
        """The mean of each metric over the batch, on the submesh where it is made first."""
        runners, found = self._runners, {}
        for name, by_stage in self._made_metrics.items():
            owner, dtype = runners[runners.metric_stage(name)], runners.metric_types[name]
            sums = []
            for one, values in by_stage.items():
                runner = runners[one]
                share = runners.plan.pipeline(one.pipeline).micro_batch_size / runners.plan.batch_size
                own: Any = jax.ShapeDtypeStruct((), dtype, sharding=runner.whole)
                if runner.is_local:
                    own = _weighted([v.astype(dtype) for v in values], [share] * len(values))
                sums.append(self._mover.move(own, owner.whole, name=f"metric {name} of {one}"))
            found[name] = sum(sums[1:], sums[0]) if owner.is_local else sums[0]
        return found


@jax.jit
def _plus(array: Any, added: Any) -> Any:
    return array + added


def _counted_on(array: Any, added: int) -> Any:
    """A counter that goes on by so much, in its own type, which may begin again at 0."""
    return _plus(array, np.asarray(added).astype(array.dtype))


@jax.jit
def _weighted_sum(arrays: Sequence[Any], shares: Sequence[Any]) -> Any:
    return sum(a * s for a, s in zip(arrays, shares, strict=True))


def _weighted(arrays: Sequence[Any], shares: Sequence[float]) -> Any:
    """The sum of arrays by their shares, in their own type; whole numbers as the first has them."""
    if not jnp.issubdtype(arrays[0].dtype, jnp.inexact):
        return arrays[0]
    return _weighted_sum(list(arrays), [np.asarray(s, arrays[0].dtype) for s in shares])


def _on_host(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise StageError(
            "In a run of several processes each must be given the whole batch, on its host or its devices; received an "
            f"array of shape {x.shape} whose sharding is {x.sharding}. Load all examples in every process."
        )
    host = np.asarray(x)
    return host.astype(jax.dtypes.canonicalize_dtype(host.dtype))
