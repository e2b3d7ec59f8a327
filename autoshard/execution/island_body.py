"""What one device computes of an island: its equations on some number of units, without any collective.

What is in the last places beyond the units that count is replaced by zeros before anything sums over units, so that
f(0) need not be 0.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from autoshard.balance.places import Room
from autoshard.balance.regions import Island, Key, Made, UnitOp
from autoshard.execution.leaves import NumberedEquations
from autoshard.execution.resized import bind_resized
from autoshard.graph.graph import Graph, dim_of
from autoshard.graph.layout import SpecEntries
from autoshard.trace.walk import shape_of, type_of

Unit = tuple[Key, int]
"""A key and its dimension of units."""


@dataclasses.dataclass(frozen=True, slots=True)
class IslandBody:
    """Evaluates islands of one program on one device.

    Attributes:
      graph: The program. numbered: Its equations. mesh: The devices.
      arguments: Values that are arguments: their empty places hold zeros, and no entry is infinite.
    """

    graph: Graph
    numbered: NumberedEquations
    mesh: Mesh
    arguments: frozenset[int]

    def evaluate(self, island: Island, room: Room, count: int, active: Any, env: dict[Key, Any]) -> None:
        """Puts what the island makes of `count` units into `env`, which holds what it reads.

        Args:
          island: The island. room: Its places. count: The units that `env` holds.
          active: int32 (), how many of these count, from the first on.
          env: Values by key, of those with units `count` of them.
        """
        masked: set[Unit] = set()
        for op in island.ops:
            operation = op.operation
            equation = self.numbered.equations[operation.equation]
            if op.contracts:
                self._mask(op, env, count, active, masked)
            known, number = self.numbered.known, operation.equation
            operands = [
                known[number, slot] if key is None or (number, slot) in known else env[key]
                for slot, key in enumerate(op.operands)
            ]
            shapes = [self.local_shape(op, slot, room, count) for slot in range(len(operation.rule.results))]
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
            env[key] = zeros_behind(env[key], dim, active * (env[key].shape[dim] // count))
            masked.add((key, dim))

    def local_shape(self, op: UnitOp, slot: int, room: Room, count: int) -> tuple[int, ...]:
        """The shape of a result on one device that has `count` units."""
        rule, made = op.operation.rule, op.sharded.made[slot]
        whole = shape_of(self.numbered.equations[op.operation.equation].outvars[slot])
        ways = [math.prod(self.mesh.shape[a] for a in axes) for axes in made]
        shape = [n // w for n, w in zip(whole, ways, strict=True)]
        dim = dim_of(op.factor, rule.results[slot])
        if dim is not None:
            shape[dim] = whole[dim] // room.unit.size * count
        return tuple(shape)

    def dtype(self, made: Made) -> Any:
        """The type of a result."""
        return type_of(self.numbered.equations[made.by.operation.equation].outvars[made.slot]).dtype


def unit_dim(made: Made) -> int | None:
    """The dimension of units of a result; None if it sums over them."""
    return dim_of(made.by.factor, made.by.operation.rule.results[made.slot])


def inputs_of(island: Island) -> dict[Key, tuple[SpecEntries, int | None]]:
    """What an island reads of others: the layout, and the dimension of units."""
    made = {key for op in island.ops for key in op.results}
    inputs: dict[Key, tuple[SpecEntries, int | None]] = {}
    for op in island.ops:
        for slot, key in enumerate(op.operands):
            entries = op.sharded.reads[slot]
            if key is not None and entries is not None and key not in made:
                inputs[key] = entries, dim_of(op.factor, op.operation.rule.operands[slot])
    return inputs


def zeros_behind(x: Any, dim: int, count: Any) -> Any:
    """`x` with zeros behind its first `count` entries along `dim`."""
    entry = jax.lax.broadcasted_iota(jnp.int32, (1,) * dim + (x.shape[dim],) + (1,) * (x.ndim - dim - 1), dim)
    return jnp.where(entry < count, x, jnp.zeros((), x.dtype))
