"""Evaluates an island: on each device as many units as it has, which is data.

Inside a `shard_map` over all axes of the mesh, each device computes its own number of units in one of two ways:

- In a loop over chunks of its places, as many rounds as it needs. A round cuts operands down to its chunk, and writes
  what it makes of it in place. Sums over units are added up over the rounds, in float32 at least.
- By `lax.switch`, which chooses a branch by the device's own bucket. A branch cuts operands down to so many units, and
  fills its results up again with zeros.

No round and no branch holds a collective: sums over devices follow behind.

What only islands read of each other, such as activations kept for the backward pass, has room for all places, of which
a device with few units uses few. A loop writes it into memory that is kept from one step to the next, so that nothing
fills, or even touches, the rest of it. (Two processes, a layer 128 wide with 7,282 places: for 1,640 units filling took
0.14 s of a step of 0.35 s, most of it for the system to provide pages.)
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from autoshard.balance.places import Room
from autoshard.balance.regions import Island, Key, Made, UnitOp
from autoshard.execution.island_body import IslandBody, inputs_of, unit_dim, zeros_behind
from autoshard.execution.placement import partition_spec
from autoshard.execution.scattered_sums import sum_over
from autoshard.execution.units import Held, by_places
from autoshard.graph.layout import SpecEntries
from autoshard.trace.walk import shape_of


class Reused(NamedTuple):
    """Memory for a result that is kept from one step to the next; what it holds when a step begins does not matter."""

    shape: tuple[int, ...]
    dtype: Any
    entries: SpecEntries


@dataclasses.dataclass(frozen=True, slots=True)
class IslandRunner:
    """Evaluates islands of one program.

    Attributes:
      body: Evaluates their equations.
      is_slowed: Whether devices may be made to compute everything several times.
      is_unbiased: Whether what a device computes counts for the units that it leaves out, too.
    """

    body: IslandBody
    is_slowed: bool = False
    is_unbiased: bool = False

    def reused(self, island: Island, room: Room) -> dict[int, Reused]:
        """For results that are written into memory of the step before: what that is like."""
        found = {}
        for made in island.made:
            dim = unit_dim(made)
            if room.chunk and made.stays and dim is not None:
                equation = self.body.numbered.equations[made.by.operation.equation]
                shape = by_places(shape_of(equation.outvars[made.slot]), dim, room)
                found[made.key] = Reused(shape, self.body.dtype(made), made.by.sharded.made[made.slot])
        return found

    def run(
        self,
        island: Island,
        room: Room,
        held: Held,
        read: Callable[[Key, SpecEntries], Any],
        memory: Mapping[int, Any],
    ) -> list[tuple[Made, Any]]:
        """What the island makes for others.

        Args:
          island: The island. room, held: The places of its units.
          read: Gives a value by places, or one without units, in a layout.
          memory: For each result of `reused`, an array like that, which is overwritten.
        """
        inputs = inputs_of(island)
        arrays = [read(key, entries) for key, (entries, _) in inputs.items()]
        axis, kept = PartitionSpec(room.unit.axis), self.reused(island, room)

        def local(
            owned: Any, active: Any, bucket: Any, repeats: Any, shards: Sequence[Any], memory: Sequence[Any]
        ) -> tuple[Any, ...]:
            compute = self._looped if room.chunk else self._switched
            given_for = [memory[list(kept).index(m.key)] if m.key in kept else None for m in island.made]
            made = compute(island, room, active[0], bucket[0], shards, given_for)
            if self.is_slowed:

                def again(_: Any, made: Any) -> Any:
                    given, last = jax.lax.optimization_barrier((shards, made))  # nothing can be taken from before
                    own = [x if m.key in kept else None for m, x in zip(island.made, last, strict=True)]
                    return compute(island, room, active[0], bucket[0], given, own)

                made = jax.lax.fori_loop(0, repeats[0], again, made)
            if self.is_unbiased:
                factor = owned[0] / jnp.maximum(active[0], 1)
                counted = zip(made, island.made, strict=True)
                made = [x * factor.astype(x.dtype) if m.counts_for_all else x for x, m in counted]
            return tuple(_summed(x, m.by, self.body.mesh) for x, m in zip(made, island.made, strict=True))

        results = jax.shard_map(
            local,
            mesh=self.body.mesh,
            in_specs=(
                *(axis, axis, axis, axis),
                [partition_spec(entries) for entries, _ in inputs.values()],
                [partition_spec(r.entries) for r in kept.values()],
            ),
            out_specs=tuple(partition_spec(_with_scatters(m)) for m in island.made),
            check_vma=False,
        )(held.owned, held.active, held.bucket, held.repeats, arrays, [memory[key] for key in kept])
        return list(zip(island.made, results, strict=True))

    def _looped(
        self, island: Island, room: Room, active: Any, chunks: Any, shards: Sequence[Any], memory: Sequence[Any]
    ) -> tuple[Any, ...]:
        """The island on one device, `chunks` chunks of units; in `memory` if that is given for a result."""
        inputs = list(inputs_of(island).items())

        def begin(made: Made, given: Any) -> Any:
            if given is not None:
                return given
            shape, dtype = self.body.local_shape(made.by, made.slot, room, room.capacity), self.body.dtype(made)
            return jnp.zeros(shape, _adding(dtype) if unit_dim(made) is None else dtype)

        def chunk(n: Any, so_far: tuple[Any, ...]) -> tuple[Any, ...]:
            first, env = n * room.chunk, {}
            for (key, (_, dim)), shard in zip(inputs, shards, strict=True):
                if dim is not None:
                    inner = shard.shape[dim] // room.capacity
                    shard = jax.lax.dynamic_slice_in_dim(shard, first * inner, room.chunk * inner, dim)
                env[key] = shard
            self.body.evaluate(island, room, room.chunk, active - first, env)
            found = []
            for made, sofar in zip(island.made, so_far, strict=True):
                x, dim = env[made.key], unit_dim(made)
                if dim is None:
                    found.append(sofar + x.astype(sofar.dtype))
                    continue
                inner = sofar.shape[dim] // room.capacity
                if made.counts_for_all is not False:
                    x = zeros_behind(x, dim, (active - first) * inner)
                found.append(jax.lax.dynamic_update_slice_in_dim(sofar, x, first * inner, dim))
            return tuple(found)

        start = tuple(begin(made, given) for made, given in zip(island.made, memory, strict=True))
        done = jax.lax.fori_loop(0, chunks, chunk, start)
        return tuple(x.astype(self.body.dtype(made)) for x, made in zip(done, island.made, strict=True))

    def _switched(
        self, island: Island, room: Room, active: Any, bucket: Any, shards: Sequence[Any], _: Sequence[Any]
    ) -> tuple[Any, ...]:
        """The island on one device, on as many units as its bucket has."""
        branches = [self._branch(island, room, count) for count in room.buckets]
        return tuple(jax.lax.switch(bucket, branches, active, *shards))

    def _branch(self, island: Island, room: Room, count: int) -> Callable[..., tuple[Any, ...]]:
        """The branch for `count` units."""
        inputs, body = list(inputs_of(island).items()), self.body

        def empty(_: Any, *shards: Any) -> tuple[Any, ...]:
            return tuple(jnp.zeros(body.local_shape(m.by, m.slot, room, room.capacity), body.dtype(m)) for m in made)

        def branch(active: Any, *shards: Any) -> tuple[Any, ...]:
            env: dict[Key, Any] = {}
            for (key, (_, dim)), shard in zip(inputs, shards, strict=True):
                if dim is not None:
                    inner = shard.shape[dim] // room.capacity
                    shard = jax.lax.slice_in_dim(shard, 0, count * inner, axis=dim)
                env[key] = shard
            body.evaluate(island, room, count, active, env)
            return tuple(self._filled(env[m.key], m, room, active) for m in made)

        made = island.made
        return empty if count == 0 else branch

    def _filled(self, x: Any, made: Made, room: Room, active: Any) -> Any:
        """`x` with zeros in the places that the branch left out, and in those of its last ones that do not count.

        Islands see to the latter themselves.
        """
        dim = unit_dim(made)
        if dim is None:
            return x
        wanted = self.body.local_shape(made.by, made.slot, room, room.capacity)[dim]
        if made.counts_for_all is not False:
            x = zeros_behind(x, dim, active * (wanted // room.capacity))
        return jnp.pad(x, [(0, wanted - x.shape[dim] if d == dim else 0) for d in range(x.ndim)])


def _adding(dtype: Any) -> Any:
    """The type in which numbers of `dtype` are added up: float32 for shorter ones."""
    is_short = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.float32 if is_short else dtype


def _summed(x: Any, by: UnitOp, mesh: Mesh) -> Any:
    """The sum over the devices of parts, of which each keeps its piece where it is scattered."""
    summed = by.sharded.summed
    return sum_over(x, summed, [(axis, dim) for axis, dim in by.sharded.scatters if axis in summed], mesh)


def _with_scatters(made: Made) -> SpecEntries:
    """The layout of a result once it is summed."""
    entries = [list(axes) for axes in made.by.sharded.made[made.slot]]
    for axis, dim in made.by.sharded.scatters:
        if axis in made.by.sharded.summed:
            entries[dim].append(axis)
    return tuple(map(tuple, entries))
