"""What a plan says of one equation, as plain data: the contract between the planner and execution, which obeys it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from autoshard.graph.layout import SpecEntries

SCATTERING = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general", "reduce_sum"})
"""Operations that execution runs by shards where their partial sums are scattered. XLA, left alone, sums whole first
where two axes go onto two dimensions, and may gather an operand where an axis joins a dimension in front of another.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class IndexExchange:
    """A look-up of which devices send each other ids and rows.

    Attributes:
      axes: The mesh axes, major to minor, along which each device owns a part of the rows and has a part of the ids.
      slots: How many ids a device sends to each owner in a round; what is left goes in further rounds.
      num_ids: How many ids a device has, duplicates counted.
      expected: How many distinct ids a device is expected to have for the busiest owner, in the mean.
    """

    axes: tuple[str, ...]
    slots: int
    num_ids: int
    expected: float


@dataclasses.dataclass(frozen=True, slots=True)
class ProductPieces:
    """A matrix product that runs in as many pieces as a mesh axis has devices, each beside the transfer of another.

    Attributes:
      axis: The mesh axis along which pieces are sent.
      slot: The operand that is read in pieces along this axis, and gathered; None where the sum over the axis is
        scattered, piece by piece.
      dim: The dimension, of that operand or of the result, along which pieces lie.
    """

    axis: str
    slot: int | None
    dim: int


@dataclasses.dataclass(frozen=True, slots=True)
class SumStage:
    """What a sum in two stages sums first.

    Attributes:
      dim: A dimension of the operand that is summed.
      num_first: How many of its elements are summed in the first stage, one after another in memory; on each device it
        has a multiple of that.
    """

    dim: int
    num_first: int


@dataclasses.dataclass(frozen=True, slots=True)
class HostMove:
    """A result of an earlier equation on its way to the memory of the host, or back.

    Attributes:
      made_before: How much lower the number of the equation of the same computation is that makes it.
      result: Its result slot.
      operand: The slot of the own operand that waits for the copy, or for which the copy waits.
    """

    made_before: int
    result: int
    operand: int


@dataclasses.dataclass(frozen=True, slots=True)
class EquationPlan:
    """The layouts around one equation, and what must be ordered or kept there; a slot that is not named is left as it
    comes.

    Attributes:
      operands: (operand slot, the layouts it passes through; the last is the one in which the equation reads it).
      results: (result slot, layout).
      body: For loops: (input slot of the body, layout inside). A carry has this layout before and after the body too.
      delayed: Operand slots whose copy must not be made before the other operands are there: it would be kept from an
        earlier equation that made the same one, or gathered while nobody needs it yet. Of a scatter, the constant that
        it begins with, which is filled then.
      scatters: (mesh axis, dimension of the result): the partial sums over this axis are reduce-scattered onto this
        dimension, one after another. Of an equation in `SCATTERING`, which then runs by shards, all operands are named.
      waits: Operand slots whose later readers wait for the equation's results.
      waits_for_part: Operand slots whose later readers wait for what each device makes of the results, and not for the
        sum of these parts.
      holds_back: (how much higher the number of a later equation of its computation is, operand slot of that one):
        operands that nobody reads or gathers from now on before each device has made its part of the results.
      holds_results: Results of its computation that nobody reads before each device has made its part of the results.
      follows: (how much lower the number of an earlier equation of its computation is, operand slot): operands that are
        read only when the results of that equation are there, summed.
      follows_with_room: What it follows instead where there is memory to spare: sums may be there later.
      gathered_first: Operand slots that are gathered for the equation before any of its other operands is sent.
      gathers_next: (operand slot, how much higher the number of a later equation of its computation is, operand slot of
        that one): copies that are gathered only when the own copy is there. Where it narrows first, the result is that.
      in_turn: (how much lower the number of an earlier equation of its computation is, operand slot): state that is
        read only when the results of that equation are there, by updates that are made in turn.
      fetches: Operand slots that lie in the memory of the host, and are copied to the device before the equation reads
        them.
      copies_out: Results of earlier equations that are in the memory of the host when this one begins.
      copies_back: Results that lie there, and are copied back from when on this one could begin.
      back_before: Results that have been copied back when this one begins.
      opened: Operand slots of a checkpointed function that do not wait for its other operands: what is gathered of them
        inside may be gathered before.
      evaluated_at: Where it is evaluated: right before the equation of its computation whose number is higher by so
        much; 0 where the program has it.
      evaluated_with_room: Where it is evaluated instead where there is memory to spare.
      materialized: Result slots that are stored, all of them, before anything reads one.
      row_major: Operand slots that are kept row by row in memory.
      row_major_copies: Operand slots whose copies, where they are gathered for the equation, are stored row by row.
      row_major_stacks: Of a scan, the result slots whose rows are stored row by row before they are stacked.
      late_stacks: Of a scan, the result slots that it stacks in buffers which are filled when its operands are there.
      narrows_first: Whether it converts its operand to a smaller type where that lies, and the result is moved.
      is_transposed_at_once: Whether the result has no layout of its own, but gets that of the transposition behind it.
      exchange: Of a look-up, or a scatter-add: what devices exchange. It then runs by shards; all operands are named,
        but for one that the program makes from nothing.
      pieces: Of a matrix product that runs in pieces. It then runs by shards; all operands are named.
      sums_first: Of a sum that is made in two stages: what the first one sums.
      exchanges_parts: Whether its sums that are scattered are made by an exchange: each device sends every other its
        part of the piece that that one keeps, and adds up what it gets. It then runs by shards.
    """

    operands: tuple[tuple[int, tuple[SpecEntries, ...]], ...] = ()
    results: tuple[tuple[int, SpecEntries], ...] = ()
    body: tuple[tuple[int, SpecEntries], ...] = ()
    delayed: tuple[int, ...] = ()
    scatters: tuple[tuple[str, int], ...] = ()
    waits: tuple[int, ...] = ()
    waits_for_part: tuple[int, ...] = ()
    holds_back: tuple[tuple[int, int], ...] = ()
    holds_results: tuple[int, ...] = ()
    follows: tuple[tuple[int, int], ...] = ()
    follows_with_room: tuple[tuple[int, int], ...] = ()
    gathered_first: tuple[int, ...] = ()
    gathers_next: tuple[tuple[int, int, int], ...] = ()
    in_turn: tuple[tuple[int, int], ...] = ()
    fetches: tuple[int, ...] = ()
    copies_out: tuple[HostMove, ...] = ()
    copies_back: tuple[HostMove, ...] = ()
    back_before: tuple[HostMove, ...] = ()
    opened: tuple[int, ...] = ()
    evaluated_at: int = 0
    evaluated_with_room: int = 0
    materialized: tuple[int, ...] = ()
    row_major: tuple[int, ...] = ()
    row_major_copies: tuple[int, ...] = ()
    row_major_stacks: tuple[int, ...] = ()
    late_stacks: tuple[int, ...] = ()
    narrows_first: bool = False
    is_transposed_at_once: bool = False
    exchange: IndexExchange | None = None
    pieces: ProductPieces | None = None
    sums_first: tuple[SumStage, ...] = ()
    exchanges_parts: bool = False

    @property
    def unordered(self) -> "EquationPlan":
        """The same, but nothing waits for anything; what is stored or kept in some order stays so."""
        return dataclasses.replace(
            self,
            delayed=(),
            waits=(),
            waits_for_part=(),
            holds_back=(),
            holds_results=(),
            follows=(),
            follows_with_room=(),
            gathered_first=(),
            gathers_next=(),
            in_turn=(),
            opened=(),
            evaluated_at=0,
            evaluated_with_room=0,
        )

    @property
    def gathered_freely(self) -> "EquationPlan":
        """The same, but only products and their sums are ordered: the compiler gathers as it likes, and keeps that."""
        return dataclasses.replace(
            self.unordered,
            waits_for_part=self.waits_for_part,
            follows=self.follows_with_room,
            evaluated_at=self.evaluated_with_room,
        )

    @property
    def has_layouts(self) -> bool:
        """Whether it says any layout."""
        return bool(self.operands or self.results or self.body or self.scatters or self.exchange or self.pieces)

    @property
    def has_orders(self) -> bool:
        """Whether it says that anything is ordered or kept."""
        waiting = self.delayed or self.waits or self.waits_for_part or self.holds_back or self.holds_results
        return bool(
            waiting
            or self.follows
            or self.follows_with_room
            or self.gathered_first
            or self.gathers_next
            or self.in_turn
            or self.fetches
            or self.copies_out
            or self.copies_back
            or self.back_before
            or self.opened
            or self.evaluated_at
            or self.evaluated_with_room
            or self.materialized
            or self.row_major
            or self.row_major_copies
            or self.row_major_stacks
            or self.is_transposed_at_once
            or self.sums_first
            or self.exchanges_parts
        )


def evaluation_order(numbers: Sequence[int], equations: Mapping[int, EquationPlan]) -> list[int]:
    """The positions of equations in the order in which they are evaluated: those that are evaluated before the same
    equation keep the program's order.

    Args:
      numbers: The numbers of the equations of one computation, rising. equations: What a plan says of them.
    """
    moved = {n: n + equations[n].evaluated_at for n in numbers if n in equations and equations[n].evaluated_at}
    if not moved:
        return list(range(len(numbers)))

    def place(number: int) -> tuple[float, ...]:
        return (*place(moved[number])[:-1], number, math.inf) if number in moved else (number, math.inf)

    return sorted(range(len(numbers)), key=lambda k: place(numbers[k]))
