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


class Moves(NamedTuple):
    """What a program that moves units is told; all are arrays, so that another move compiles nothing.

    Attributes:
      came_from: int32 (devices * capacity,), for each place the one where its unit was; -1 for empty ones.
      before, after: int32 (units,), the place of each unit.
      rank: int32 (units,), the number of each unit among those that go from the same device to the same one.
      rounds: int32 (), how often devices send.
    """

    came_from: Any
    before: Any
    after: Any
    rank: Any
    rounds: Any


_ROUND = 16
"""Units that a device sends to each other one at once when units move."""


def moves_between(before: Placing, after: Placing, room: Room) -> Moves:
    """What moves units from where they are to where they are to be."""
    capacity = room.capacity
    table, old, new = after.table(capacity).ravel(), before.place_of(capacity), after.place_of(capacity)
    way = old // capacity * room.unit.ways + new // capacity
    order = np.argsort(way, kind="stable")
    rank = np.empty_like(old)
    rank[order] = np.arange(len(way)) - np.searchsorted(way[order], way[order])
    is_sent = old // capacity != new // capacity
    rounds = int(rank[is_sent].max() // _ROUND + 1) if is_sent.any() else 0
    came_from = np.where(table >= 0, old[np.maximum(table, 0)], -1)
    return Moves(*(np.asarray(x, np.int32) for x in (came_from, old, new, rank, rounds)))


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """Moves tensors between the two forms, for the units of one dimension.

    Attributes:
      room: The places. mesh: The devices.
    """

    room: Room
    mesh: Mesh

    @property
    def held_shapes(self) -> Held:
        """What `Held` looks like."""
        of = lambda n: jax.ShapeDtypeStruct((n,), jnp.int32)
        ways = self.room.unit.ways
        return Held(of(ways), of(ways), of(ways), of(self.room.places), of(self.room.unit.size), of(ways))

    @property
    def moves_shapes(self) -> Moves:
        """What `Moves` looks like."""
        of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
        units = self.room.unit.size
        return Moves(of(self.room.places), of(units), of(units), of(units), of())

    def enter(self, x: Any, held: Held, dim: int, entries: SpecEntries) -> Any:
        """`x` by units by places along `dim`; the result lies as `entries` say."""
        axis, inner = self.room.unit.axis, x.shape[dim] // self.room.unit.size
        before = tuple(() if d == dim else own for d, own in enumerate(entries))
        among = self._alone(dim, entries)

        def local(x: Any, unit_of: Any) -> Any:
            split = x.reshape(*x.shape[:dim], self.room.unit.size, inner, *x.shape[dim + 1 :])
            return _taken(split, unit_of, dim).reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])

        x = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(partition_spec(before), PartitionSpec(axis)),
            out_specs=among,
            check_vma=False,
        )(x, held.unit_of)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, partition_spec(entries)))

    def _alone(self, dim: int, entries: SpecEntries) -> PartitionSpec:
        """A layout in which nothing but the axis of the units splits them."""
        return partition_spec(tuple((self.room.unit.axis,) if d == dim else own for d, own in enumerate(entries)))

    def leave(self, x: Any, held: Held, dim: int, entries: SpecEntries) -> Any:
        """`x` by places, which lies as `entries` say, by units along `dim`, whole on each device of the axis."""
        whole = tuple(() if d == dim else own for d, own in enumerate(entries))
        x = jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, partition_spec(whole)))
        inner = x.shape[dim] // self.room.places

        def local(x: Any, place_of: Any) -> Any:
            split = x.reshape(*x.shape[:dim], self.room.places, inner, *x.shape[dim + 1 :])
            return jnp.take(split, place_of, axis=dim).reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])

        spec = partition_spec(whole)
        return jax.shard_map(local, mesh=self.mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False)(
            x, held.place_of
        )

    def moved(self, x: Any, moves: Moves, dim: int, entries: SpecEntries) -> Any:
        """`x` by places with its units in other places.

        Units go straight to their new device, a few at a time: in every round each device sends up to `_ROUND` of them
        to each other one. How many rounds there are is data, so that other moves compile nothing.
        """
        axis, ways, capacity = self.room.unit.axis, self.room.unit.ways, self.room.capacity
        spec = self._alone(dim, entries)

        def local(x: Any, moves: Moves) -> Any:
            me = jax.lax.axis_index(axis)
            old = x.reshape(*x.shape[:dim], capacity, -1, *x.shape[dim + 1 :])
            came = jax.lax.dynamic_slice_in_dim(moves.came_from, me * capacity, capacity)
            new = _taken(old, jnp.where((came >= 0) & (came // capacity == me), came % capacity, -1), dim)
            source, target = moves.before // capacity, moves.after // capacity

            def send(n: Any, new: Any) -> Any:
                is_now = (moves.rank // _ROUND == n) & (source != target)

                def slots(mine: Any, other: Any, place: Any) -> Any:
                    """For each other device and each of the round, the place here; -1 where there is none."""
                    slot = jnp.where(is_now & (mine == me), other * _ROUND + moves.rank % _ROUND, ways * _ROUND)
                    return jnp.full(ways * _ROUND, -1, jnp.int32).at[slot].set(place % capacity, mode="drop")

                sent = _taken(old, slots(source, target, moves.before), dim)
                sent = sent.reshape(*old.shape[:dim], ways, _ROUND, *old.shape[dim + 1 :])
                received = jax.lax.all_to_all(sent, axis, dim, dim)
                received = received.reshape(*old.shape[:dim], ways * _ROUND, *old.shape[dim + 1 :])
                into = slots(target, source, moves.after)
                into = (slice(None),) * dim + (jnp.where(into >= 0, into, capacity),)
                return new.at[into].set(received, mode="drop")

            return jax.lax.fori_loop(0, moves.rounds, send, new).reshape(x.shape)

        return jax.shard_map(local, mesh=self.mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False)(
            x, moves
        )

    def kept(self, new: Any, old: Any, held: Held, dim: int) -> Any:
        """`new` where a unit was computed, and `old` in all other places."""
        return jnp.where(self._is_among_first(held.active, new, dim), new, old)

    def owned_only(self, x: Any, held: Held, dim: int) -> Any:
        """`x` with zeros in empty places."""
        return jnp.where(self._is_among_first(held.owned, x, dim), x, jnp.zeros((), x.dtype))

    def _is_among_first(self, counts: Any, x: Any, dim: int) -> Any:
        """A mask over `x` by places along `dim`: which are among the first `counts` of their device."""
        place = jnp.arange(self.room.capacity)
        is_first = (place[None, :] < counts[:, None]).ravel()
        inner = x.shape[dim] // self.room.places
        return _along(jnp.repeat(is_first, inner), x.ndim, dim)


def _taken(x: Any, places: Any, dim: int) -> Any:
    """The entries of `x` along `dim` at `places`, zeros where these are negative."""
    taken = jnp.take(x, jnp.maximum(places, 0), axis=dim)
    return jnp.where(_along(places >= 0, taken.ndim, dim), taken, jnp.zeros((), x.dtype))


def _along(mask: Any, rank: int, dim: int) -> Any:
    """A mask over dimension `dim`, ready to be broadcast to `rank` dimensions."""
    return mask.reshape(*(1,) * dim, -1, *(1,) * (rank - dim - 1))


def by_places(shape: Sequence[int], dim: int, room: Room) -> tuple[int, ...]:
    """The shape by places of a tensor of `shape` by units."""
    inner = shape[dim] // room.unit.size
    return (*shape[:dim], room.places * inner, *shape[dim + 1 :])
