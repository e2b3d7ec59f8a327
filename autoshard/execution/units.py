"""Tensors by units and tensors by places: the same numbers, in the order of the program or as devices hold them.

By units, entry j of a dimension belongs to unit j. By places, every device along a mesh axis has room for a number of
units; empty places hold zeros.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.balance.places import Placing, Room
from autoshard.execution.placement import partition_spec
from autoshard.graph.layout import SpecEntries


class Held(NamedTuple):
    """What a running program is told of a placing; all are arrays, so that another placing compiles nothing.

    Attributes:
      owned: int32 (devices,), units on each device. active: int32 (devices,), how many of them it computes.
      bucket: int32 (devices,), the position of its bucket.
      unit_of: int32 (devices * capacity,), the unit in each place, -1 in empty ones.
      place_of: int32 (units,), the place of each unit.
      repeats: int32 (devices,), how often it computes everything once more, to be slow.
    """

    owned: Any
    active: Any
    bucket: Any
    unit_of: Any
    place_of: Any
    repeats: Any


def held(placing: Placing, room: Room, mesh: Mesh, repeats: Sequence[int] | None = None) -> Held:
    """A placing as arrays on the devices of a mesh."""
    axis = room.unit.axis
    along = NamedSharding(mesh, PartitionSpec(axis))
    put = lambda x, sharding: jax.make_array_from_callback(
        (data := np.asarray(x, np.int32)).shape, sharding, lambda index, data=data: data[index]
    )
    return Held(
        put(placing.counts, along),
        put(placing.active, along),
        put([room.bucket_of(n) for n in placing.active], along),
        put(placing.table(room.capacity).ravel(), along),
        put(placing.place_of(room.capacity), NamedSharding(mesh, PartitionSpec())),
        put(repeats if repeats is not None else [0] * room.unit.ways, along),
    )


def held_shardings(axis: str, mesh: Mesh) -> Held:
    """The shardings of `Held`."""
    along, whole = NamedSharding(mesh, PartitionSpec(axis)), NamedSharding(mesh, PartitionSpec())
    return Held(along, along, along, along, whole, along)


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """Moves tensors between the two forms, for the units of one dimension.

    Attributes:
      room: The places. held: Which unit is where. mesh: The devices.
    """

    room: Room
    held: Held
    mesh: Mesh

    def enter(self, x: Any, dim: int, entries: SpecEntries) -> Any:
        """`x` by units, of which no device lacks any, by places along `dim`; the result lies as `entries` say."""
        axis, inner = self.room.unit.axis, x.shape[dim] // self.room.unit.size
        before = tuple(() if d == dim else own for d, own in enumerate(entries))

        def local(x: Any, unit_of: Any) -> Any:
            split = x.reshape(*x.shape[:dim], self.room.unit.size, inner, *x.shape[dim + 1 :])
            taken = jnp.take(split, jnp.maximum(unit_of, 0), axis=dim)
            taken = jnp.where(_along(unit_of >= 0, taken.ndim, dim), taken, jnp.zeros((), x.dtype))
            return taken.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])

        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(partition_spec(before), PartitionSpec(axis)),
            out_specs=partition_spec(entries),
            check_vma=False,
        )(x, self.held.unit_of)

    def leave(self, x: Any, dim: int, entries: SpecEntries) -> Any:
        """`x` by places, which lies as `entries` say, by units along `dim`, whole on each device of the axis."""
        whole = tuple(() if d == dim else own for d, own in enumerate(entries))
        x = jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, partition_spec(whole)))
        inner = x.shape[dim] // self.room.places

        def local(x: Any, place_of: Any) -> Any:
            split = x.reshape(*x.shape[:dim], self.room.places, inner, *x.shape[dim + 1 :])
            return jnp.take(split, place_of, axis=dim).reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])

        spec = partition_spec(whole)
        return jax.shard_map(local, mesh=self.mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False)(
            x, self.held.place_of
        )

    def kept(self, new: Any, old: Any, dim: int) -> Any:
        """`new` where a unit was computed, and `old` in all other places."""
        place = jnp.arange(self.room.capacity)
        is_active = (place[None, :] < self.held.active[:, None]).ravel()
        inner = new.shape[dim] // self.room.places
        return jnp.where(_along(jnp.repeat(is_active, inner), new.ndim, dim), new, old)

    def owned_only(self, x: Any, dim: int) -> Any:
        """`x` with zeros in empty places."""
        place = jnp.arange(self.room.capacity)
        is_owned = (place[None, :] < self.held.owned[:, None]).ravel()
        inner = x.shape[dim] // self.room.places
        return jnp.where(_along(jnp.repeat(is_owned, inner), x.ndim, dim), x, jnp.zeros((), x.dtype))


def _along(mask: Any, rank: int, dim: int) -> Any:
    """A mask over dimension `dim`, ready to be broadcast to `rank` dimensions."""
    return mask.reshape(*(1,) * dim, -1, *(1,) * (rank - dim - 1))


def by_places(shape: Sequence[int], dim: int, room: Room) -> tuple[int, ...]:
    """The shape by places of a tensor of `shape` by units."""
    inner = shape[dim] // room.unit.size
    return (*shape[:dim], room.places * inner, *shape[dim + 1 :])
