"""The compiled programs that cut shards into parts and join parts into shards, each on one device."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.transfer.routes import Box

Slicer = Callable[[jax.Array], list[jax.Array]]
Concatenator = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class ShardPrograms:
    """Programs that were made before, so that they are compiled once for each device that runs them.

    Attributes:
      slicers: By the boxes that are cut out.
      concatenators: By the boxes that are joined.
    """

    slicers: dict[tuple[Box, ...], Slicer] = dataclasses.field(default_factory=dict)
    concatenators: dict[tuple[Box, ...], Concatenator] = dataclasses.field(default_factory=dict)

    def slicer(self, boxes: tuple[Box, ...]) -> Slicer:
        """The program that takes a shard to its parts in `boxes`, counted from its start."""
        if boxes not in self.slicers:
            self.slicers[boxes] = jax.jit(functools.partial(_cut, boxes))
        return self.slicers[boxes]

    def concatenator(self, boxes: tuple[Box, ...]) -> Concatenator:
        """The program that takes parts to the shard in which they lie in `boxes`, counted from its start.

        The parts are not donated: their memory could not hold the result, and parts that are shards of the moved
        array must outlive this.
        """
        if boxes not in self.concatenators:
            self.concatenators[boxes] = jax.jit(functools.partial(_join, boxes))
        return self.concatenators[boxes]


def nothing(shape: Sequence[int], dtype: Any, device: jax.Device) -> jax.Array:
    """An array without elements on `device`."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.zeros(shape, dtype, device=device)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
    return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype, device=device), impl=impl_of(dtype))


def plain(array: jax.Array) -> jax.Array:
    """PRNG keys as the numbers that they are made of; other arrays as they are."""
    return jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array


def impl_of(dtype: Any) -> Any:
    """The generator of PRNG keys of type `dtype`, as `jax.random.wrap_key_data` takes it."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype))
    return found[0]


def _cut(boxes: Sequence[Box], shard: jax.Array) -> list[jax.Array]:
    return [shard[tuple(map(slice, box.starts, box.stops))] for box in boxes]


def _join(boxes: Sequence[Box], *parts: jax.Array) -> jax.Array:
    """Concatenates parts that lie on a grid, first along the last dimensions."""
    return _join_from(0, list(zip(boxes, parts, strict=True)))


def _join_from(dim: int, parts: Sequence[tuple[Box, jax.Array]]) -> jax.Array:
    """Joins parts that agree in the dimensions before `dim`."""
    if len(parts) == 1:
        return parts[0][1]
    starts = sorted({box.starts[dim] for box, _ in parts})
    rows = [_join_from(dim + 1, [part for part in parts if part[0].starts[dim] == start]) for start in starts]
    return jnp.concatenate(rows, dim) if len(rows) > 1 else rows[0]
