"""States of which some processes hold no part of a leaf, as those of a step in stages: Orbax can neither write nor read
them. They go by a layout in which every process has a part."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.checkpoints.agreement import from_all, met
from autoshard.transfer.cross_mesh import CrossMeshTransfer, as_array

_SPLIT, _COPIES = "split", "copies"

WHOLE_BYTES = 1 << 16
"""A leaf of no more goes whole: cutting it would take a program of its own, which takes longer to compile."""


class SpreadOut:
    """Brings leaves that only some processes hold onto all devices, and back. All processes make every call together.

    Leaves that all processes hold stay as they are, and in a run of one process all do.
    """

    def __init__(self) -> None:
        self._mover: CrossMeshTransfer | None = None

    def laid_out(self, like: Any) -> Any:
        """A state in the layouts in which it is written and read: such leaves as shapes, the others as they are.

        Args:
            like: arrays or `jax.ShapeDtypeStruct`s.
        """
        leaves, tree = jax.tree.flatten(like)
        chosen = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding(x)) if is_partial else x
            for x, is_partial in zip(leaves, _held_by_some(leaves), strict=True)
        ]
        return jax.tree.unflatten(tree, chosen)

    def moved(self, state: Any, before: Any, after: Any) -> Any:
        """A state whose leaves lie as in `before`, laid out as in `after`; waits until it is.

        Args:
            state: arrays. before, after: a state, and what `laid_out` made of it, in either order.

        Raises:
            TransferError: another process ended or stalled meanwhile.
        """
        leaves, tree = jax.tree.flatten(state)
        pairs = list(zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
        if all(x is y for x, y in pairs):
            return state
        if self._mover is None:
            self._mover = CrossMeshTransfer()
        moved = [
            leaf if x is y else as_array(self._mover.move(leaf, y.sharding, name=f"leaf {n} of a checkpoint"))
            for n, (leaf, (x, y)) in enumerate(zip(leaves, pairs, strict=True))
        ]
        self._mover.wait(moved)
        met("moved a checkpoint's state", self._mover.timeout_s)
        return jax.tree.unflatten(tree, moved)


def _held_by_some(leaves: list[Any]) -> list[bool]:
    """Of each leaf, whether it lies with some of the processes only, and all of them say so of the same ones."""
    if jax.process_count() == 1:
        return [False] * len(leaves)
    holders = [_holders(x) for x in leaves]
    others = from_all(holders)
    count = jax.process_count()
    return [0 < len(own) < count and all(o[n] == own for o in others) for n, own in enumerate(holders)]


def _holders(x: Any) -> list[int]:
    """The processes that hold a leaf; none of what has no layout."""
    sharding = getattr(x, "sharding", None)
    return [] if sharding is None else sorted({device.process_index for device in sharding.device_set})


def _sharding(x: Any) -> NamedSharding:
    """A layout over all devices, split by the dimension that most of them divide; of what is small, one copy for each
    process."""
    devices = jax.devices()
    if is_small(x):
        devices = list({d.process_index: d for d in reversed(devices)}.values())
    ways = [1 if is_small(x) or not extent else math.gcd(extent, len(devices)) for extent in x.shape]
    most = max(ways, default=1)
    mesh = Mesh(np.array(devices).reshape(most, -1), (_SPLIT, _COPIES), axis_types=(AxisType.Auto,) * 2)
    if most == 1:
        return NamedSharding(mesh, PartitionSpec())
    place = ways.index(most)
    return NamedSharding(mesh, PartitionSpec(*[_SPLIT if n == place else None for n in range(len(x.shape))]))


def is_small(x: Any) -> bool:
    """Whether a leaf, an array or a shape, goes whole; random keys do."""
    return math.prod(x.shape) * getattr(x.dtype, "itemsize", 8) <= WHOLE_BYTES
