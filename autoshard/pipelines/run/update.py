"""The end of a staged step: the optimizer's update, each parameter where it lives."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.errors import PlanMismatchError
from autoshard.pipelines.run.device_meshes import DeviceMeshes
from autoshard.pipelines.run.mpmd_function import MpmdFunction, Replicated
from autoshard.pipelines.split.infer_submeshes import infer_submeshes
from autoshard.pipelines.split.mpmd import split_mpmd
from autoshard.pipelines.split.mpmd_program import MpmdProgram
from autoshard.trace.trace import path_name
from autoshard.train_step import TrainStep
from autoshard.transfer.cross_mesh import CrossMeshTransfer, as_array

SMALL_BYTES = 4096
"""State up to this size that belongs to no parameter, such as counters, is kept on every device."""


@dataclasses.dataclass(frozen=True, slots=True)
class LeafPlacement:
    """Where a leaf lives: the number of its submesh (None: a copy on every device), and its layout there."""

    submesh: int | None
    sharding: NamedSharding


@dataclasses.dataclass(frozen=True, slots=True)
class StateLayout:
    """Where every leaf of the state lives, in the order of its leaves; `tree` is its structure."""

    leaves: tuple[LeafPlacement, ...]
    tree: Any


@dataclasses.dataclass(frozen=True, slots=True)
class TracedUpdate:
    """`TrainStep.finish`, traced: (state, gradients, mutable state, metrics) -> (state, metrics), on flat leaves.

    Attributes:
      closed: The program, a closed jaxpr. state: Shapes of the state. out_tree: Structure of what it returns.
    """

    closed: Any
    state: Any
    out_tree: Any


def trace_update(step: TrainStep, state: Any, metric_types: Mapping[str, Any]) -> TracedUpdate:
    """Traces the end of a step.

    Args:
      step: The training step. state: Its state, arrays or shapes. metric_types: By name.

    Raises:
      PlanMismatchError: The state that it returns is built otherwise than the one that it takes.
    """
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))
    state = jax.tree.map(shape, state)
    scalars = {name: jax.ShapeDtypeStruct((), metric_types[name]) for name in sorted(metric_types)}
    closed, shapes = jax.make_jaxpr(step.finish, return_shape=True)(state, state.params, state.mutable, scalars)
    if jax.tree.structure(shapes[0]) != jax.tree.structure(state):
        raise PlanMismatchError(
            "A training step must return a state like the one that it takes, but the update of this one returns "
            "another structure. Let the optimizer keep the structure of its state."
        )
    return TracedUpdate(closed, state, jax.tree.structure(shapes))


def state_layout(
    finish: TracedUpdate,
    parameters: Mapping[str, LeafPlacement],
    sums: Mapping[str, LeafPlacement],
    mutable: Mapping[str, LeafPlacement],
    device_meshes: DeviceMeshes,
) -> StateLayout:
    """Where a training state lives.

    The optimizer's state of a parameter is known by its path, which ends like the parameter's, and lies like its sum of
    gradients. Of what is left, small leaves are kept everywhere, and a large one where the update combines it with
    gradients and parameters.

    Args:
      finish: The end of the step. parameters, sums, mutable: Where each leaf lives, by path.
    """
    found: list[LeafPlacement | None] = []
    shapes = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(finish.state.params)}
    leaves = jax.tree_util.tree_leaves_with_path(finish.state)
    for path, leaf in leaves:
        head, _, name = path_name(path).partition(".")
        if head == "params":
            found.append(parameters[name])
        elif head == "mutable":
            found.append(mutable[name])
        else:
            found.append(_of_optimizer(name, leaf, shapes, sums, device_meshes))
    submeshes = _inferred(finish, found, [sums[name] for name in shapes]) if None in found else ()
    placed = (
        own or _like_a_sum(submeshes[n] or 0, leaf, shapes, sums, device_meshes)
        for n, (own, (_, leaf)) in enumerate(zip(found, leaves, strict=True))
    )
    return StateLayout(tuple(placed), jax.tree.structure(finish.state))


def _of_optimizer(
    name: str, leaf: Any, shapes: Mapping[str, Any], sums: Mapping[str, LeafPlacement], device_meshes: DeviceMeshes
) -> LeafPlacement | None:
    """Where a leaf of the optimizer's state lives by its path or its size; None if neither tells."""
    keys = name.split(".")
    for first in range(len(keys)):
        own = ".".join(keys[first:])
        if own in sums:
            owner = sums[own]
            if shapes[own].shape == leaf.shape:
                return owner
            # factored moments and the like: small beside the parameter
            return LeafPlacement(owner.submesh, NamedSharding(owner.sharding.mesh, PartitionSpec()))
    if math.prod(leaf.shape) * getattr(leaf.dtype, "itemsize", 8) <= SMALL_BYTES:
        return LeafPlacement(None, device_meshes.everywhere)
    return None


def _inferred(
    finish: TracedUpdate, state: Sequence[LeafPlacement | None], gradients: Sequence[LeafPlacement]
) -> tuple[int | None, ...]:
    """The submesh of each leaf of the state, from where the values are that the update combines it with."""
    known = [None if located is None else located.submesh for located in (*state, *gradients)]
    rest = len(finish.closed.jaxpr.invars) - len(known)
    return infer_submeshes(finish.closed, (*known, *[None] * rest), {n: n for n in range(len(state))})


def _like_a_sum(
    submesh: int, leaf: Any, shapes: Mapping[str, Any], sums: Mapping[str, LeafPlacement], device_meshes: DeviceMeshes
) -> LeafPlacement:
    """A leaf on a submesh, split like the first sum of gradients of its shape there; whole if there is none."""
    alike = (s for name, s in sums.items() if s.submesh == submesh and shapes[name].shape == leaf.shape)
    return next(alike, LeafPlacement(submesh, NamedSharding(device_meshes.meshes[submesh], PartitionSpec())))


class OptimizerUpdate:
    """`TrainStep.finish` over the submeshes of a plan.

    Args:
      finish: The end of the step. layout: Where the state lives.
      gradients: Where the sum of gradients of each parameter lives, in the order of the parameters' leaves.
      metrics: Where each metric is made, by name.
      unchanged: Leaves of the mutable state, by position, that no stage changes: they are passed on as they are.
      device_meshes, mover: Devices, and what moves between them. donate: Whether the state's buffers may be reused.
    """

    def __init__(
        self,
        finish: TracedUpdate,
        layout: StateLayout,
        gradients: Sequence[LeafPlacement],
        metrics: Mapping[str, LeafPlacement],
        unchanged: Collection[int],
        device_meshes: DeviceMeshes,
        mover: CrossMeshTransfer,
        donate: bool,
    ):
        self._device_meshes, self._layout, self._out_tree = device_meshes, layout, finish.out_tree
        closed, state = finish.closed, finish.state
        mutable_slots = [k for k, name in enumerate(_heads(state)) if name == "mutable"]
        mutable = [layout.leaves[k] for k in mutable_slots]
        inputs = [*layout.leaves, *gradients, *mutable, *(metrics[name] for name in sorted(metrics))]
        num_state, num_outs = len(layout.leaves), len(closed.jaxpr.outvars)
        wanted: dict[int, int | None] = {k: l.submesh for k, l in enumerate(layout.leaves)}
        wanted |= dict.fromkeys(range(num_state, num_outs))
        self.program: MpmdProgram = split_mpmd(closed, [l.submesh for l in inputs], len(device_meshes.meshes), wanted)
        ends = [None if l.submesh is None else l.sharding for l in layout.leaves]
        # the new mutable state and the gradients are the step's own: they may always be reused
        own = range(num_state, len(inputs) - len(metrics))
        first_mutable = num_state + len(gradients)
        twice = {k for n in unchanged for k in (mutable_slots[n], first_mutable + n)}  # one buffer as old and as new
        donated = [k for k in (*(range(num_state) if donate else ()), *own) if k not in twice]
        self._function = MpmdFunction(
            self.program,
            device_meshes.meshes,
            [None if l.submesh is None else l.sharding for l in inputs],
            [*ends, *[None] * (num_outs - num_state)],
            donated,
            lambda array, target, number: mover.move(array, target, name=f"value {number} of the optimizer's update"),
        )
        self._num_submeshes = len(device_meshes.meshes)

    def __call__(self, state: Any, gradients: Sequence[Any], mutable: Any, metrics: Mapping[str, Any]) -> Any:
        """(new state, metrics).

        Args:
          state: As laid out. gradients: By parameter. mutable: The new mutable state. metrics: Scalars, by name.
        """
        leaves = []
        for leaf, located in zip(jax.tree.leaves(state), self._layout.leaves, strict=True):
            leaves.append(self._copies(leaf) if located.submesh is None else leaf)
        given = [*leaves, *gradients, *jax.tree.leaves(mutable), *(metrics[n] for n in sorted(metrics))]
        results = self._function(*given)
        ended = [self._device_meshes.joined(r.arrays) if isinstance(r, Replicated) else as_array(r) for r in results]
        return jax.tree.unflatten(self._out_tree, ended)

    def _copies(self, leaf: jax.Array) -> Replicated:
        return Replicated(tuple(self._device_meshes.copy_on(leaf, p) for p in range(self._num_submeshes)))


def _heads(state: Any) -> list[str]:
    """For each leaf of a state, the field that it belongs to."""
    return [path_name(path[:1]) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
