"""A program whose layouts are all chosen, as the compiler is given it."""

import dataclasses
from collections.abc import Mapping, Sequence, Set

from autoshard.cluster import LogicalMesh
from autoshard.compiler.analysis import ProgramAnalysis
from autoshard.cost.collectives import Collective
from autoshard.graph.layout import Layout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A value on its way to one way of reading it; nothing moves where it has that layout.

    Attributes:
      value: The value. group, read: Who reads it: `groups[group].reads[read]`; None where it becomes an argument of the
        next call.
      itemsize_bytes: Of an element as it is moved. trips: How often it is moved in one call.
      target: The layout in which it is read. collectives: What makes it so.
    """

    value: int
    group: int | None
    read: int | None
    itemsize_bytes: int
    trips: float
    target: Layout
    collectives: Sequence[Collective]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SolvedProgram:
    """What a solution makes of a program.

    Attributes:
      analysis: The program. mesh: What it is split over.
      layouts: The layout of each value that has one.
      sums: For each group, the collectives that sum its partial results.
      moves: The ways of all values to their readers.
    """

    analysis: ProgramAnalysis
    mesh: LogicalMesh
    layouts: Mapping[int, Layout]
    sums: tuple[Sequence[Collective], ...]
    moves: tuple[Move, ...]

    def readers(self, move: Move) -> tuple[int, ...]:
        """The operations that read what `move` brings; none where it becomes an argument of the next call."""
        if move.group is None or move.read is None:
            return ()
        return self.analysis.groups[move.group].reads[move.read].operations

    def resharded(self) -> Set[int]:
        """The values that something reads in another layout than they have."""
        return {move.value for move in self.moves if self.layouts[move.value] != move.target}
