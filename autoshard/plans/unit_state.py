"""State of a balanced step in its two forms: by units, as the program knows it, and by places, as devices hold it."""

import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autoshard.balance.places import Placing, Room
from autoshard.balance.units import UnitTensor
from autoshard.errors import ConfigError
from autoshard.execution.placement import partition_spec
from autoshard.execution.units import Held, Places, held
from autoshard.graph.layout import SpecEntries

Placings = tuple[Placing, ...]


class UnitLeaves:
    """The leaves of one positional argument that hold units, brought from one form or placing to another.

    One program is compiled for each form of a tensor; where units are comes as data.
    """

    def __init__(
        self, leaves: dict[int, tuple[Room, UnitTensor]], entries: Sequence[SpecEntries], mesh: Mesh, donated: bool
    ):
        """
        Args:
          leaves: Those that hold units, by position in the argument. entries: The layouts of all its leaves.
          mesh: The devices. donated: Whether the step may use up what it is given.
        """
        self._leaves, self._entries, self._mesh, self._donated = leaves, tuple(entries), mesh, donated
        self._programs: dict[Any, Any] = {}
        self._seen: list[tuple[weakref.ref[Any], Placings]] = []

    def note(self, tree: Any, placings: Placings) -> None:
        """Remembers where the units of a tree by places are."""
        first = jax.tree_util.tree_leaves(tree)[next(iter(self._leaves))]
        if isinstance(first, jax.Array):
            self._seen = [(ref, p) for ref, p in self._seen[-7:] if ref() is not None]
            self._seen.append((weakref.ref(first), placings))

    def are_by_units(self, tree: Any) -> bool:
        """Whether a tree is by units; the capacity is never that of an even share, so that shapes tell."""
        leaves = jax.tree_util.tree_leaves(tree)
        n, (room, tensor) = next(iter(self._leaves.items()))
        return leaves[n].shape[tensor.dim] == room.unit.size * tensor.inner

    def placed(self, tree: Any, placings: Placings) -> Any:
        """A tree by units, or by places somewhere, by places as `placings` say.

        Raises:
          ConfigError: It is by places, but not what the step returned or made.
        """
        if self.are_by_units(tree):
            result = self._converted(tree, placings, enters=True)
        else:
            before = self._placings_of(tree)
            if before is placings:
                return tree
            result = self._moved(tree, before, placings)
        self.note(result, placings)
        return result

    def by_units(self, tree: Any) -> Any:
        """A tree by places by units; one by units as it is."""
        return tree if self.are_by_units(tree) else self._converted(tree, self._placings_of(tree), enters=False)

    def _placings_of(self, tree: Any) -> Placings:
        first = jax.tree_util.tree_leaves(tree)[next(iter(self._leaves))]
        for ref, placings in self._seen:
            if ref() is first:
                return placings
        raise ConfigError(
            "A state by places must be the one that the balanced step returned last, or was moved by it: which unit is "
            "where is not kept in the arrays. Pass that one, or keep states with `run.balance.by_units(state)`."
        )

    def _converted(self, tree: Any, placings: Placings, enters: bool) -> Any:
        leaves, structure = jax.tree_util.tree_flatten(tree)
        arrays: dict[int, Held] = {}
        for n, (room, tensor) in self._leaves.items():
            x, unit = leaves[n], room.unit.index
            if unit not in arrays:
                arrays[unit] = held(placings[unit], room, self._mesh)
            entries = self._entries[n]
            whole = tuple(() if d == tensor.dim else own for d, own in enumerate(entries))
            ends = NamedSharding(self._mesh, partition_spec(entries))
            begins = NamedSharding(self._mesh, partition_spec(whole))
            key = enters, x.shape, str(x.dtype), room.capacity, room.unit.size, tensor.dim, entries
            if key not in self._programs:

                def convert(x: Any, of: Held, room: Room = room, dim: int = tensor.dim, entries: Any = entries) -> Any:
                    places = Places(room, of, self._mesh)
                    return (places.enter if enters else places.leave)(x, dim, entries)

                self._programs[key] = jax.jit(convert, out_shardings=ends)
            x = jax.device_put(x, begins) if enters else x
            leaves[n] = self._programs[key](x, arrays[unit])
        return jax.tree_util.tree_unflatten(structure, leaves)

    def _moved(self, tree: Any, before: Placings, after: Placings) -> Any:
        """A tree by places with its units moved; tensor by tensor, so that one is whole on a device at a time."""
        leaves, structure = jax.tree_util.tree_flatten(tree)
        sources: dict[int, np.ndarray] = {}
        for n, (room, tensor) in self._leaves.items():
            unit, x = room.unit.index, leaves[n]
            if before[unit].units == after[unit].units:
                continue
            if unit not in sources:
                place_of, table = before[unit].place_of(room.capacity), after[unit].table(room.capacity).ravel()
                sources[unit] = np.where(table < 0, -1, place_of[np.maximum(table, 0)]).astype(np.int32)
            key = "move", x.shape, str(x.dtype), tensor.dim, room.places, self._entries[n]
            if key not in self._programs:
                self._programs[key] = self._mover(room.places, tensor.dim, self._entries[n])
            leaves[n] = self._programs[key](x, sources[unit])
        result = jax.tree_util.tree_unflatten(structure, leaves)
        self.note(result, after)
        return result

    def _mover(self, places: int, dim: int, entries: SpecEntries) -> Any:
        def move(x: Any, source: Any) -> Any:
            split = x.reshape(*x.shape[:dim], places, -1, *x.shape[dim + 1 :])
            taken = jnp.take(split, jnp.maximum(source, 0), axis=dim)
            is_full = (source >= 0).reshape(*(1,) * dim, -1, *(1,) * (taken.ndim - dim - 1))
            return jnp.where(is_full, taken, jnp.zeros((), x.dtype)).reshape(x.shape)

        sharding = NamedSharding(self._mesh, partition_spec(entries))
        return jax.jit(move, donate_argnums=(0,) if self._donated else (), out_shardings=sharding)
