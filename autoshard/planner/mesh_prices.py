"""What choices and moves cost on one mesh, remembered as far as anyone asked.

It depends on the shapes of groups and values, not on the program that they stand in. The forms of a step
(`plans/variant_search.py`) have most of them in common, and so have the schedules of one form: what was priced for one
serves all.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from autoshard.cluster import LogicalMesh
from autoshard.compiler.buffer_uses import CopySizes
from autoshard.cost.collectives import Joining
from autoshard.cost.in_pieces import InPieces
from autoshard.cost.lookups import Lookups
from autoshard.cost.move_prices import MovePrices
from autoshard.graph.layout import Layout, all_layouts, shard_bytes
from autoshard.graph.layout_columns import LayoutColumn, LayoutColumns, MoveKinds
from autoshard.planner.choices import ChoiceTable, choice_table
from autoshard.planner.group_shapes import GroupShape


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """What all edges of one kind share: costs, and what a resharded copy takes (None if never any)."""

    costs: np.ndarray
    copies: CopySizes | None


class MoveKind(NamedTuple):
    """What the price of moving a value depends on, beside its layouts.

    Attributes:
      shape, itemsize_bytes, is_narrowed: As of a `Flow`.
      trips: How often it is moved. makings, places: For how many operations on each, and in how many checkpointed
        functions, for each of which a copy is made.
      alike: The moves that the compiler joins with it; None if none.
    """

    shape: tuple[int, ...]
    itemsize_bytes: int
    is_narrowed: bool
    trips: float
    makings: int
    places: int
    alike: Joining | None


class MeshPrices:
    """Prices on one mesh; equal questions get one object as the answer, so that the solver can see copies.

    Attributes:
      mesh: The mesh. moves: Times of moves. columns: Of layouts.
    """

    def __init__(self, mesh: LogicalMesh) -> None:
        self.mesh, self.moves, self.columns = mesh, MovePrices(mesh), LayoutColumns()
        self._tables: dict[tuple[GroupShape, Lookups, InPieces], ChoiceTable] = {}
        self._layouts: dict[tuple[tuple[int, ...], int], tuple[Layout, ...]] = {}
        self._moves: dict[tuple[MoveKind, int, int], Move] = {}

    def table(self, shape: GroupShape, lookups: Lookups, in_pieces: InPieces) -> ChoiceTable:
        """The choices of a group of this shape."""
        key = shape, lookups, InPieces() if in_pieces.decompose == "never" else in_pieces
        if key not in self._tables:
            self._tables[key] = choice_table(shape, self.mesh, lookups, in_pieces)
        return self._tables[key]

    def layouts(self, shape: tuple[int, ...], times: int = 1) -> tuple[Layout, ...]:
        """All legal layouts of a value, so many times over."""
        key = shape, times
        if key not in self._layouts:
            self._layouts[key] = all_layouts(shape, self.mesh.shape) * times
        return self._layouts[key]

    def move(self, kind: MoveKind, source: LayoutColumn, target: LayoutColumn) -> Move:
        """What a value costs to move, and what its copies take; both columns are of `columns`."""
        key = kind, id(source), id(target)
        if key not in self._moves:
            self._moves[key] = self._move(kind, source, target)
        return self._moves[key]

    def _move(self, kind: MoveKind, source: LayoutColumn, target: LayoutColumn) -> Move:
        size_bytes = float(math.prod(kind.shape) * kind.itemsize_bytes)
        costs = self.moves.seconds(kind.shape, size_bytes, source.layouts, target.layouts, kind.alike)
        costs = kind.trips * costs
        kinds = MoveKinds.between(source.layouts, target.layouts)
        if max(kind.makings, kind.places) > 1:
            costs = costs * np.where(kinds.gathered, kind.makings, kind.places)
        moved, sent = kinds.moved, kinds.sent
        copy_bytes = np.array([shard_bytes(size_bytes, t, self.mesh.shape) for t in target.layouts])
        if kind.is_narrowed:  # what is sent becomes the result, which is counted as a value
            moved, sent = moved & ~sent, sent & False
        copies = CopySizes(moved * copy_bytes, sent * copy_bytes) if moved.any() else None
        return Move(costs, copies)


class PricesOfMeshes:
    """The prices on every mesh that was asked for."""

    def __init__(self) -> None:
        self._of: dict[LogicalMesh, MeshPrices] = {}

    def on(self, mesh: LogicalMesh) -> MeshPrices:
        """Those on a mesh."""
        if mesh not in self._of:
            self._of[mesh] = MeshPrices(mesh)
        return self._of[mesh]
