"""The end of a staged step: the optimizer's update, each parameter where it lives."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.errors import PlanMismatchError
from autoshard.execution.placed import Copies, PlacedFunction
from autoshard.runtime.fleet import Fleet, as_array
from autoshard.runtime.move import CrossMesh
from autoshard.trace.placed import PlacedProgram, split_by_place
from autoshard.trace.trace import path_name
from autoshard.train_step import TrainStep

SMALL_BYTES = 4096
"""State up to this size that belongs to no parameter, such as counters, is kept on every device."""


@dataclasses.dataclass(frozen=True, slots=True)
class Located:
    """Where a leaf lives: the number of its place, and its layout there; the place is None for a copy everywhere."""

    place: int | None
    sharding: NamedSharding


@dataclasses.dataclass(frozen=True, slots=True)
class StateLayout:
    """Where every leaf of the state lives, in the order of its leaves; `tree` is its structure."""

    leaves: tuple[Located, ...]
    tree: Any


def state_layout(
    state: Any,
    parameters: Mapping[str, Located],
    sums: Mapping[str, Located],
    mutable: Mapping[str, Located],
    fleet: Fleet,
) -> StateLayout:
    """Where a training state lives.

    The optimizer's state of a parameter is known by its path, which ends like the parameter's, and lies like its sum of
    gradients. What is left is kept everywhere if it is small, and whole on the first place if not.

    Args:
      state: Arrays or shapes. parameters, sums, mutable: Where each leaf lives, by path.
    """
    found = []
    shapes = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(state.params)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        head, _, name = path_name(path).partition(".")
        if head == "params":
            found.append(parameters[name])
        elif head == "mutable":
            found.append(mutable[name])
        else:
            found.append(_of_optimizer(name, leaf, shapes, sums, fleet))
    return StateLayout(tuple(found), jax.tree.structure(state))


def _of_optimizer(
    name: str, leaf: Any, shapes: Mapping[str, Any], sums: Mapping[str, Located], fleet: Fleet
) -> Located:
    keys = name.split(".")
    for first in range(len(keys)):
        own = ".".join(keys[first:])
        if own in sums:
            home = sums[own]
            if shapes[own].shape == leaf.shape:
                return home
            # factored moments and the like: small beside the parameter
            return Located(home.place, NamedSharding(home.sharding.mesh, PartitionSpec()))
    if math.prod(leaf.shape) * getattr(leaf.dtype, "itemsize", 8) <= SMALL_BYTES:
        return Located(None, fleet.everywhere)
    return Located(0, NamedSharding(fleet.meshes[0], PartitionSpec()))


class Update:
    """`TrainStep.finish` over the places of a plan.

    Args:
      step: The training step. state: Its state, arrays or shapes. layout: Where the state lives.
      gradients: Where the sum of gradients of each parameter lives, in the order of the parameters' leaves.
      metrics: Where each metric is made, and its type, by name.
      unchanged: Leaves of the mutable state, by position, that no stage changes: they are passed on as they are.
      fleet, mover: Devices, and what moves between them. donate: Whether the state's buffers may be reused.
    """

    def __init__(
        self,
        step: TrainStep,
        state: Any,
        layout: StateLayout,
        gradients: Sequence[Located],
        metrics: Mapping[str, tuple[Located, Any]],
        unchanged: Collection[int],
        fleet: Fleet,
        mover: CrossMesh,
        donate: bool,
    ):
        self._fleet, self._layout = fleet, layout
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))
        state = jax.tree.map(shape, state)
        scalars = {name: jax.ShapeDtypeStruct((), metrics[name][1]) for name in sorted(metrics)}
        arguments = (state, state.params, state.mutable, scalars)
        closed, shapes = jax.make_jaxpr(step.finish, return_shape=True)(*arguments)
        self._out_tree = jax.tree.structure(shapes)
        if jax.tree.structure(shapes[0]) != layout.tree:
            raise PlanMismatchError(
                "A training step must return a state like the one that it takes, but the update of this one returns "
                "another structure. Let the optimizer keep the structure of its state."
            )
        mutable_slots = [k for k, name in enumerate(_heads(state)) if name == "mutable"]
        mutable = [layout.leaves[k] for k in mutable_slots]
        inputs = [*layout.leaves, *gradients, *mutable, *(metrics[name][0] for name in sorted(metrics))]
        num_state, num_outs = len(layout.leaves), len(closed.jaxpr.outvars)
        wanted: dict[int, int | None] = {k: l.place for k, l in enumerate(layout.leaves)}
        wanted |= dict.fromkeys(range(num_state, num_outs))
        self.program: PlacedProgram = split_by_place(closed, [l.place for l in inputs], len(fleet.meshes), wanted)
        ends = [None if l.place is None else l.sharding for l in layout.leaves]
        # the new mutable state and the gradients are the step's own: they may always be reused
        own = range(num_state, len(inputs) - len(metrics))
        first_mutable = num_state + len(gradients)
        twice = {k for n in unchanged for k in (mutable_slots[n], first_mutable + n)}  # one buffer as old and as new
        donated = [k for k in (*(range(num_state) if donate else ()), *own) if k not in twice]
        self._function = PlacedFunction(
            self.program,
            fleet.meshes,
            [None if l.place is None else l.sharding for l in inputs],
            [*ends, *[None] * (num_outs - num_state)],
            donated,
            lambda array, target, number: mover.move(array, target, name=f"value {number} of the optimizer's update"),
        )
        self._num_places = len(fleet.meshes)

    def __call__(self, state: Any, gradients: Sequence[Any], mutable: Any, metrics: Mapping[str, Any]) -> Any:
        """(new state, metrics).

        Args:
          state: As laid out. gradients: By parameter. mutable: The new mutable state. metrics: Scalars, by name.
        """
        leaves = []
        for leaf, located in zip(jax.tree.leaves(state), self._layout.leaves, strict=True):
            leaves.append(self._copies(leaf) if located.place is None else leaf)
        given = [*leaves, *gradients, *jax.tree.leaves(mutable), *(metrics[n] for n in sorted(metrics))]
        results = self._function(*given)
        ended = [self._fleet.joined(r.arrays) if isinstance(r, Copies) else as_array(r) for r in results]
        return jax.tree.unflatten(self._out_tree, ended)

    def _copies(self, leaf: jax.Array) -> Copies:
        return Copies(tuple(self._fleet.copy_on(leaf, p) for p in range(self._num_places)))


def _heads(state: Any) -> list[str]:
    """For each leaf of a state, the field that it belongs to."""
    return [path_name(path[:1]) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
