"""Evaluates an island: on each device as many units as it has, chosen at run time among compiled sizes.

Inside a `shard_map` over all axes of the mesh, `lax.switch` chooses a branch by the device's own bucket. A branch cuts
its operands down to so many units, evaluates the island's equations on them, and fills its results up again with zeros.
No branch holds a collective: sums over devices follow behind the switch. What is in the last places of a bucket beyond
the units that count is replaced by zeros before anything sums over units, so that f(0) need not be 0.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from autoshard.balance.places import Room
from autoshard.balance.regions import Island, Key, Made, UnitOp
from autoshard.execution.leaves import NumberedEquations
from autoshard.execution.placement import partition_spec
from autoshard.execution.resized import bind_resized
from autoshard.execution.units import Held
from autoshard.graph.graph import Graph, dim_of
from autoshard.graph.layout import SpecEntries
from autoshard.trace.walk import shape_of, type_of

Unit = tuple[Key, int]
"""A key and its dimension of units."""


@dataclasses.dataclass(frozen=True, slots=True)
class IslandRunner:
    """Evaluates islands of one program on one mesh.

    Attributes:
      graph: The program. numbered: Its equations. mesh: The devices.
      arguments: Values that are arguments: their empty places hold zeros, and no entry is infinite.
      is_slowed: Whether devices may be made to compute everything several times.
      is_unbiased: Whether what a device computes counts for the units that it leaves out, too.
    """

    graph: Graph
    numbered: NumberedEquations
    mesh: Mesh
    arguments: frozenset[int]
    is_slowed: bool = False
    is_unbiased: bool = False

    def run(
        self, island: Island, room: Room, held: Held, read: Callable[[Key, SpecEntries], Any]
    ) -> list[tuple[Made, Any]]:
        """What the island makes for others.

        Args:
          island: The island. room, held: The places of its units.
          read: Gives a value by places, or one without units, in a layout.
        """
        inputs = _inputs(island)
        arrays = [read(key, entries) for key, (entries, _) in inputs.items()]
        axis = PartitionSpec(room.unit.axis)

        def local(owned: Any, active: Any, bucket: Any, repeats: Any, *shards: Any) -> tuple[Any, ...]:
            branches = [self._branch(island, room, k, list(inputs.items())) for k in room.buckets]
            compute = lambda given: tuple(jax.lax.switch(bucket[0], branches, active[0], *given))
            made = compute(shards)
            if self.is_slowed:

                def again(_: Any, made: Any) -> Any:
                    given, _ = jax.lax.optimization_barrier((shards, made))  # nothing can be taken from before
                    return compute(given)

                made = jax.lax.fori_loop(0, repeats[0], again, made)
            if self.is_unbiased:
                factor = owned[0] / jnp.maximum(active[0], 1)
                counted = zip(made, island.made, strict=True)
                made = [x * factor.astype(x.dtype) if m.counts_for_all else x for x, m in counted]
            return tuple(_summed(x, m.by) for x, m in zip(made, island.made, strict=True))

        results = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(axis, axis, axis, axis, *(partition_spec(entries) for entries, _ in inputs.values())),
            out_specs=tuple(partition_spec(_with_scatters(m)) for m in island.made),
            check_vma=False,
        )(held.owned, held.active, held.bucket, held.repeats, *arrays)
        return list(zip(island.made, results, strict=True))

    def _branch(
        self, island: Island, room: Room, count: int, inputs: Sequence[tuple[Key, tuple[SpecEntries, int | None]]]
    ) -> Callable[..., tuple[Any, ...]]:
        """The branch for `count` units."""

        def empty(_: Any, *shards: Any) -> tuple[Any, ...]:
            return tuple(
                jnp.zeros(self._local_shape(m.by, m.slot, room, room.capacity), self._dtype(m)) for m in island.made
            )

        def branch(active: Any, *shards: Any) -> tuple[Any, ...]:
            env: dict[Key, Any] = {}
            for (key, (_, dim)), shard in zip(inputs, shards, strict=True):
                if dim is not None:
                    inner = shard.shape[dim] // room.capacity
                    shard = jax.lax.slice_in_dim(shard, 0, count * inner, axis=dim)
                env[key] = shard
            masked: set[Unit] = set()
            for op in island.ops:
                self._evaluate(op, env, room, count, active, masked)
            return tuple(self._filled(env[m.key], m, room, active) for m in island.made)

        return empty if count == 0 else branch

    def _evaluate(
        self, op: UnitOp, env: dict[Key, Any], room: Room, count: int, active: Any, masked: set[Unit]
    ) -> None:
        operation = op.operation
        equation = self.numbered.equations[operation.equation]
        if op.contracts:
            self._mask(op, env, count, active, masked)
        known, number = self.numbered.known, operation.equation
        operands = [
            known[number, slot] if key is None or (number, slot) in known else env[key]
            for slot, key in enumerate(op.operands)
        ]
        shapes = [self._local_shape(op, slot, room, count) for slot in range(len(operation.rule.results))]
        for key, result in zip(op.results, bind_resized(equation, operands, shapes), strict=True):
            if key is not None:
                env[key] = result

    def _mask(self, op: UnitOp, env: dict[Key, Any], count: int, active: Any, masked: set[Unit]) -> None:
        """Puts zeros in place of what does not count, in all operands that could hold anything there.

        Arguments of the program are finite, so that zeros in what they are multiplied with suffice.
        """
        found = [
            (key, dim)
            for key, dims in zip(op.operands, op.operation.rule.operands, strict=True)
            if key is not None and (dim := dim_of(op.factor, dims)) is not None
        ]
        made_here = [u for u in found if u[0] not in self.arguments]
        for key, dim in made_here or found:
            if (key, dim) in masked:
                continue
            env[key] = _zeros_behind(env[key], dim, active * (env[key].shape[dim] // count))
            masked.add((key, dim))

    def _local_shape(self, op: UnitOp, slot: int, room: Room, count: int) -> tuple[int, ...]:
        """The shape of a result on one device that has `count` units."""
        rule, made = op.operation.rule, op.sharded.made[slot]
        whole = self._shape(op, slot)
        ways = [math.prod(self.mesh.shape[a] for a in axes) for axes in made]
        shape = [n // w for n, w in zip(whole, ways, strict=True)]
        dim = dim_of(op.factor, rule.results[slot])
        if dim is not None:
            shape[dim] = whole[dim] // room.unit.size * count
        return tuple(shape)

    def _shape(self, op: UnitOp, slot: int) -> tuple[int, ...]:
        return shape_of(self.numbered.equations[op.operation.equation].outvars[slot])

    def _dtype(self, made: Made) -> Any:
        return type_of(self.numbered.equations[made.by.operation.equation].outvars[made.slot]).dtype

    def _filled(self, x: Any, made: Made, room: Room, active: Any) -> Any:
        """`x` with zeros in the places that the branch left out, and in those of its last ones that do not count.

        Islands see to the latter themselves.
        """
        dim = dim_of(made.by.factor, made.by.operation.rule.results[made.slot])
        if dim is None:
            return x
        wanted = self._local_shape(made.by, made.slot, room, room.capacity)[dim]
        if made.counts_for_all is not False:
            x = _zeros_behind(x, dim, active * (wanted // room.capacity))
        return jnp.pad(x, [(0, wanted - x.shape[dim] if d == dim else 0) for d in range(x.ndim)])


def _zeros_behind(x: Any, dim: int, count: Any) -> Any:
    """`x` with zeros behind its first `count` entries along `dim`."""
    entry = jax.lax.broadcasted_iota(jnp.int32, (1,) * dim + (x.shape[dim],) + (1,) * (x.ndim - dim - 1), dim)
    return jnp.where(entry < count, x, jnp.zeros((), x.dtype))


def _inputs(island: Island) -> dict[Key, tuple[SpecEntries, int | None]]:
    """What an island reads of others: the layout, and the dimension of units."""
    made = {key for op in island.ops for key in op.results}
    inputs: dict[Key, tuple[SpecEntries, int | None]] = {}
    for op in island.ops:
        for slot, key in enumerate(op.operands):
            entries = op.sharded.reads[slot]
            if key is not None and entries is not None and key not in made:
                inputs[key] = entries, dim_of(op.factor, op.operation.rule.operands[slot])
    return inputs


def _summed(x: Any, by: UnitOp) -> Any:
    """The sum over the devices of parts, of which each keeps its piece where it is scattered."""
    scatters = [(a, d) for a, d in by.sharded.scatters if a in by.sharded.summed]
    for dim in dict.fromkeys(d for _, d in scatters):
        x = jax.lax.psum_scatter(x, tuple(a for a, d in scatters if d == dim), scatter_dimension=dim, tiled=True)
    left = tuple(a for a in by.sharded.summed if a not in dict(scatters))
    return jax.lax.psum(x, left) if left else x


def _with_scatters(made: Made) -> SpecEntries:
    """The layout of a result once it is summed."""
    entries = [list(axes) for axes in made.by.sharded.made[made.slot]]
    for axis, dim in made.by.sharded.scatters:
        if axis in made.by.sharded.summed:
            entries[dim].append(axis)
    return tuple(map(tuple, entries))
