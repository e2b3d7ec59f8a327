"""How much each unit matters, for the choice of those that stay where a slow device leaves some out."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.balance.places import Room
from autoshard.balance.selection import Priority
from autoshard.errors import ConfigError
from autoshard.graph.graph import Graph

_MEANS = (".mu.", ".trace.")
"""Where Optax keeps running means of gradients: Adam's first moment, and momentum."""


class UnitScores:
    """Sums, for each unit, what its weights changed by, or the sizes of its running mean of gradients.

    Args:
        priority: which of these. rooms: the unit dimensions. graph: the step. mesh: the devices.

    Raises:
        ConfigError: gradients are asked for, and the optimizer keeps no mean of them.
    """

    def __init__(self, priority: Priority, rooms: Sequence[Room], graph: Graph, mesh: Mesh):
        self._priority = priority
        is_wanted = lambda name: (
            name.startswith("state.params.") if priority == "change" else any(m in name for m in _MEANS)
        )
        of = {t.value: (room, t) for room in rooms for t in room.unit.tensors}
        self._leaves = {n: of[a.value] for n, a in enumerate(graph.arguments) if a.value in of and is_wanted(a.name)}
        missing = [r.unit.name for r in rooms if all(room is not r for room, _ in self._leaves.values())]
        if priority == "gradient" and missing:
            raise ConfigError(
                f"stragglers.priority: `gradient` reads the optimizer's running mean of gradients; the state has "
                f"none for {missing[0]}. Use `adamw` or `sgd`, or another priority: `change` or `random`."
            )
        self._count = len(rooms)
        whole = NamedSharding(mesh, PartitionSpec())
        self._sum = jax.jit(self._sums, out_shardings=whole)
        self._change = jax.jit(
            lambda new, old: self._sums([a - b for a, b in zip(new, old, strict=True)]), out_shardings=whole
        )
        self._before: list[jax.Array] | None = None

    def of(self, state: Any) -> list[np.ndarray | None]:
        """For each unit dimension the scores, (units,); None where they are not known yet.

        Args:
            state: by units.
        """
        if self._priority == "random":
            return [None] * self._count
        flat = jax.tree_util.tree_leaves(state)
        now = [flat[n] for n in self._leaves]
        if self._priority == "gradient":
            return self._found(self._sum(now))
        before, self._before = self._before, [jnp.copy(x) for x in now]  # the step reuses the state's memory
        return [None] * self._count if before is None else self._found(self._change(now, before))

    def _found(self, sums: dict[int, jax.Array]) -> list[np.ndarray | None]:
        return [np.asarray(sums[n]) if n in sums else None for n in range(self._count)]

    def _sums(self, leaves: Sequence[jax.Array]) -> dict[int, jax.Array]:
        """By unit dimension, (units,): the sums of absolute values over all entries of a unit."""
        found: dict[int, jax.Array] = {}
        for x, (room, tensor) in zip(leaves, self._leaves.values(), strict=True):
            own = jnp.moveaxis(x, tensor.dim, 0).reshape(room.unit.size, -1)
            total = jnp.sum(jnp.abs(own.astype(jnp.float32)), axis=1)
            found[room.unit.index] = found.get(room.unit.index, 0.0) + total
        return found
