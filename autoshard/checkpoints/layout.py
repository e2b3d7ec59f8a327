"""What a state is made of, and which process holds which part: leaves, their shards, and who looks after each."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.trace.trace import path_name
from autoshard.transfer.routes import Box, boxes_of
from autoshard.transfer.shard_programs import plain


@dataclasses.dataclass(frozen=True, slots=True)
class LeafShape:
    """A leaf of a state: its path, and its shape and type as numbers (random keys are kept as their words)."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A part of a leaf that this process looks after.

    Attributes:
        leaf: number of the leaf, as `jax.tree.leaves` counts.
        box: which part of it.
        shard: number among the addressable shards of the leaf; 0 for a leaf that is no `jax.Array`.
    """

    leaf: int
    box: Box
    shard: int


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a state with their paths, in order; random keys as their words."""
    return [(path_name(path), words(leaf)) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def words(leaf: Any) -> Any:
    """Random keys as the words they are made of, whether they are arrays or only described; others as they are."""
    if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    if isinstance(leaf, jax.Array):
        return plain(leaf)
    described = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    sharding = getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(described.shape, described.dtype, sharding=words_sharding(sharding, leaf.shape))


def words_sharding(sharding: Any, shape: Sequence[int]) -> Any:
    """The layout of the words of keys that are laid out as `sharding`: the added last dimension is not split."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        split = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec)), None]
        return jax.sharding.NamedSharding(
            sharding.mesh, jax.sharding.PartitionSpec(*split), memory_kind=sharding.memory_kind
        )
    return sharding


def leaf_shapes(tree: Any) -> tuple[LeafShape, ...]:
    """The leaves of a state or of its description."""
    return tuple(LeafShape(name, *_shape_and_dtype(leaf)) for name, leaf in named_leaves(tree))


def pieces_of(leaves: Sequence[Any], host_of: Mapping[int, str] | None = None) -> tuple[Piece, ...]:
    """The parts that this process looks after, so that together all processes look after each part once.

    Args:
        leaves: arrays or what stands for them; what is no `jax.Array` is alike in all processes.
        host_of: host of each process. Given, each part is looked after once on every host that holds it.
    """
    mine = jax.process_index()
    found: list[Piece] = []
    for number, leaf in enumerate(leaves):
        if not isinstance(leaf, jax.Array):
            if _is_first(mine, host_of):
                found.append(Piece(number, whole(np.shape(leaf)), 0))
            continue
        seen: dict[Box, set[str]] = {}
        place = {shard.device: n for n, shard in enumerate(leaf.addressable_shards)}
        for device, box in boxes_of(leaf.shape, leaf.sharding).items():
            host = host_of[device.process_index] if host_of is not None else ""
            if host in seen.setdefault(box, set()):
                continue
            seen[box].add(host)
            if device.process_index == mine and (box.size or not math.prod(leaf.shape)):
                found.append(Piece(number, box, place[device]))
    return tuple(found)


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def host_view(leaf: Any, shard: int) -> np.ndarray:
    """The numbers of a shard on the host; on CPUs they are those of the device's memory, so do not keep the view.

    A view of a CPU array that is kept would make a step that reuses the array's memory copy it first.
    """
    return np.asarray(leaf.addressable_shards[shard].data if isinstance(leaf, jax.Array) else leaf)


def _shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    return tuple(map(int, leaf.shape)), np.dtype(leaf.dtype)


def _is_first(process: int, host_of: Mapping[int, str] | None) -> bool:
    if host_of is None:
        return process == 0
    return process == min(p for p, host in host_of.items() if host == host_of[process])
