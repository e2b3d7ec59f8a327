"""State of a balanced step in its two forms: by units, as the program knows it, and by places, as devices hold it."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.balance.places import Placing, Room
from autoshard.balance.units import UnitTensor
from autoshard.errors import ConfigError
from autoshard.execution.placement import partition_spec
from autoshard.execution.units import Held, Moves, Places, by_places, held, held_shardings, moves_between
from autoshard.graph.layout import SpecEntries

Placings = tuple[Placing, ...]


class UnitLeaves:
    """The leaves of one positional argument that hold units, brought from one form or placing to another.

    One program is compiled for each form of a tensor; where units are comes as data.
    """

    def __init__(
        self,
        leaves: Mapping[int, tuple[Room, UnitTensor]],
        shapes: Sequence[jax.ShapeDtypeStruct],
        entries: Sequence[SpecEntries],
        mesh: Mesh,
        donated: bool,
    ):
        """
        Args:
          leaves: Those that hold units, by position in the argument.
          shapes, entries: Of all its leaves, by units, and their layouts.
          mesh: The devices. donated: Whether the step may use up what it is given.
        """
        self._leaves, self._shapes, self._entries = dict(leaves), tuple(shapes), tuple(entries)
        self._mesh, self._donated = mesh, donated
        self._programs: dict[Any, Any] = {}
        self._seen: list[tuple[weakref.ref[Any], Placings]] = []
        self._kept: tuple[weakref.ref[Any], Placings, Any] | None = None

    def compile(self) -> None:
        """Compiles what brings tensors from one form or placing to another."""
        for n in self._leaves:
            for kind in ("enter", "leave", "move"):
                self._program(kind, n)

    def note(self, tree: Any, placings: Placings) -> None:
        """Remembers where the units of a tree by places are."""
        first = self._first(tree)
        if isinstance(first, jax.Array):
            self._seen = [(ref, p) for ref, p in self._seen[-7:] if ref() is not None]
            self._seen.append((weakref.ref(first), placings))

    def are_by_units(self, tree: Any) -> bool:
        """Whether a tree is by units: a device has more places than an even share, so that shapes tell."""
        n = next(iter(self._leaves))
        return tuple(self._first(tree).shape) == tuple(self._shapes[n].shape)

    def placed(self, tree: Any, placings: Placings) -> Any:
        """A tree by units, or by places somewhere, by places as `placings` say.

        Raises:
          ConfigError: It is by places, but not what the step returned or made.
        """
        if not self.are_by_units(tree):
            before = self._placings_of(tree)
            if before is placings:
                return tree
            result = self._moved(tree, before, placings)
        elif self._kept is not None and self._kept[0]() is self._first(tree) and self._kept[1] is placings:
            return self._kept[2]
        else:
            result = self._converted(tree, placings, "enter")
            if not self._donated and isinstance(self._first(tree), jax.Array):  # it may come again
                self._kept = weakref.ref(self._first(tree)), placings, result
        self.note(result, placings)
        return result

    def by_units(self, tree: Any) -> Any:
        """A tree by places by units; one by units as it is."""
        return tree if self.are_by_units(tree) else self._converted(tree, self._placings_of(tree), "leave")

    def _first(self, tree: Any) -> Any:
        return jax.tree_util.tree_leaves(tree)[next(iter(self._leaves))]

    def _placings_of(self, tree: Any) -> Placings:
        first = self._first(tree)
        for ref, placings in self._seen:
            if ref() is first:
                return placings
        raise ConfigError(
            "A state by places must be the one that the balanced step returned last, or was moved by it: which unit is "
            "where is not kept in the arrays. Pass that one, or keep states with `run.balance.by_units(state)`."
        )

    def _converted(self, tree: Any, placings: Placings, kind: str) -> Any:
        """A tree in the other form; tensor by tensor, so that one at a time is whole on a device, and so that XLA:CPU
        does not queue collectives of two programs on the same threads, where they can wait for each other for ever."""
        leaves, structure = jax.tree_util.tree_flatten(tree)
        arrays: dict[int, Held] = {}
        for n, (room, _) in self._leaves.items():
            unit = room.unit.index
            if unit not in arrays:
                arrays[unit] = held(placings[unit], room, self._mesh)
            x = jax.device_put(leaves[n], self._sharding(n)) if kind == "enter" else leaves[n]
            leaves[n] = jax.block_until_ready(self._program(kind, n)(x, arrays[unit]))
        return jax.tree_util.tree_unflatten(structure, leaves)

    def _moved(self, tree: Any, before: Placings, after: Placings) -> Any:
        """A tree by places with its units moved; tensor by tensor, as above."""
        leaves, structure = jax.tree_util.tree_flatten(tree)
        arrays: dict[int, Moves] = {}
        for n, (room, _) in self._leaves.items():
            unit = room.unit.index
            if before[unit].units == after[unit].units:
                continue
            if unit not in arrays:
                arrays[unit] = moves_between(before[unit], after[unit], room)
            leaves[n] = jax.block_until_ready(self._program("move", n)(leaves[n], arrays[unit]))
        return jax.tree_util.tree_unflatten(structure, leaves)

    def _sharding(self, n: int) -> NamedSharding:
        return NamedSharding(self._mesh, partition_spec(self._entries[n]))

    def _program(self, kind: str, n: int) -> Any:
        """What brings leaf `n` from one form or placing to another; one for all leaves that are alike."""
        room, tensor = self._leaves[n]
        shape, entries, dim = self._shapes[n], self._entries[n], tensor.dim
        key = kind, shape.shape, str(shape.dtype), room.capacity, room.unit.size, room.unit.axis, dim, entries
        if key not in self._programs:
            places, sharding = Places(room, self._mesh), self._sharding(n)
            whole = NamedSharding(self._mesh, PartitionSpec())
            if kind == "move":
                run = lambda x, moves: places.moved(x, moves, dim, entries)
                told, tables = places.moves_shapes, whole
            else:
                change = places.enter if kind == "enter" else places.leave
                run = lambda x, of: change(x, of, dim, entries)
                told, tables = places.held_shapes, held_shardings(room.unit.axis, self._mesh)
            given = shape if kind == "enter" else jax.ShapeDtypeStruct(by_places(shape.shape, dim, room), shape.dtype)
            donate = (0,) if kind == "move" and self._donated else ()
            jitted = jax.jit(run, in_shardings=(sharding, tables), out_shardings=sharding, donate_argnums=donate)
            self._programs[key] = jitted.lower(given, told).compile()
        return self._programs[key]
