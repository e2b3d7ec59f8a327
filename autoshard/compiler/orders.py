"""The orders of a plan one by one, for people: what waits, is stored, or is kept in some order, and how large it is."""

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence

from autoshard.compiler.early_products import is_summed_alone
from autoshard.compiler.planned_graph import PlannedGraph
from autoshard.graph.computations import Computation, Instruction
from autoshard.graph.graph import ValueKind
from autoshard.graph.layout import SpecEntries


class OrderKind(enum.Enum):
    """What is ordered or kept; the values are words for people."""

    DELAYED = "copied or filled only when it is read"
    WAITS = "read next only when its reader is done"
    WAITS_FOR_SUM = "read next only when its product is reduced, alone"
    WAITS_FOR_PART = "read next only when its product is made, reduced or not"
    HELD_BACK = "gathered or read only when an earlier product or sum is made, reduced or not"
    GATHERED_FIRST = "gathered before what is read with it is sent"
    GATHERED_NEXT = "gathered only when what is gathered before it is there"
    HANDED_ON_LATE = "handed on only when a sum is made, reduced or not"
    REDUCED_BEFORE = "reduced before a later product begins"
    FETCHED = "copied from the host when the update before is made"
    COPIED_OUT = "copied to the host before a later product begins"
    COPIED_BACK = "copied back from the host when an earlier product could begin"
    MOVED = "made earlier or later than the program does"
    MATERIALIZED = "stored before anything reads it"
    ROW_MAJOR = "kept row by row"
    TRANSPOSED = "made as its transposition wants it"
    IN_STAGES = "summed in two stages"
    EXCHANGED = "summed by an exchange of parts"


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """One order of a plan.

    Attributes:
      kind: What is ordered.
      tensor: The argument that it is about, or the operand or result of an operation. shape: Its shape.
      size_bytes: Of a device's piece, as it is read or made.
      source: The user's line. equation: The equation that it belongs to.
    """

    kind: OrderKind
    tensor: str
    shape: tuple[int, ...]
    size_bytes: float
    source: str
    equation: int


def orders(planned: PlannedGraph) -> tuple[Order, ...]:
    """All orders of a plan, by equation."""
    found: list[Order] = []

    def visit(computation: Computation, results: Sequence[int | None]) -> None:
        named = {i.equation: i for i in computation}
        for instruction in computation:
            if planned.plan_of(instruction).has_orders:
                found.extend(_of_instruction(planned, instruction))
                found.extend(_of_others(planned, instruction, named, results))
            for nested in instruction.nested:
                visit(nested, instruction.results)

    visit(planned.entry, ())
    return tuple(sorted(found, key=lambda order: order.equation))


def _order(
    planned: PlannedGraph,
    kind: OrderKind,
    value: int | None,
    place: tuple[Instruction, str],
    entries: SpecEntries | None,
) -> Iterator[Order]:
    """An order about a value that lies as `entries` say, which is an operand or a result (`place`) of an operation;
    none, if that nests others."""
    instruction, role = place
    if value is None or instruction.operation is None:
        return
    own = planned.graph.values[value]
    name = own.name if own.kind is ValueKind.ARGUMENT else f"{role} of {instruction.name}"
    size_bytes = planned.shard_bytes(value, entries or ())
    yield Order(kind, name, own.shape, size_bytes, instruction.operation.source, instruction.equation)


def _of_instruction(planned: PlannedGraph, instruction: Instruction) -> Iterator[Order]:
    plan = planned.plan_of(instruction)
    summed = bool(plan.waits) and instruction.name == "dot_general" and is_summed_alone(planned, instruction)
    for kind, slots in (
        (OrderKind.DELAYED, plan.delayed),
        (OrderKind.WAITS_FOR_SUM if summed else OrderKind.WAITS, plan.waits),
        (OrderKind.WAITS_FOR_PART, plan.waits_for_part),
        (OrderKind.GATHERED_FIRST, plan.gathered_first),
        (OrderKind.FETCHED, plan.fetches),
        (OrderKind.ROW_MAJOR, (*plan.row_major, *plan.row_major_copies)),
        (OrderKind.IN_STAGES, (0,) if plan.sums_first else ()),
    ):
        for slot in slots:
            yield from _of_operand(planned, kind, instruction, slot)
    results = [(OrderKind.MATERIALIZED, slot) for slot in plan.materialized]
    results += [(OrderKind.TRANSPOSED, 0)] * plan.is_transposed_at_once
    results += [(OrderKind.EXCHANGED, 0)] * plan.exchanges_parts
    results += [(OrderKind.MOVED, 0)] * bool(plan.evaluated_at)
    for kind, slot in results:
        entries = dict(plan.results).get(slot)
        yield from _order(planned, kind, instruction.results[slot], (instruction, "result"), entries)


def _of_operand(planned: PlannedGraph, kind: OrderKind, instruction: Instruction, slot: int) -> Iterator[Order]:
    """An order about an operand, as it is read."""
    read_as = {s: steps[-1] for s, steps in planned.plan_of(instruction).operands}
    lies = read_as.get(slot, planned.layout_of(instruction, slot))
    yield from _order(planned, kind, instruction.operands[slot], (instruction, "operand"), lies)


def _of_others(
    planned: PlannedGraph, instruction: Instruction, named: Mapping[int, Instruction], results: Sequence[int | None]
) -> Iterator[Order]:
    """What an instruction orders of others of its computation, which are `named`, and of what that hands on."""
    plan, number = planned.plan_of(instruction), instruction.equation
    for later, slot in plan.holds_back:
        yield from _of_operand(planned, OrderKind.HELD_BACK, named[number + later], slot)
    for _, later, slot in plan.gathers_next:
        yield from _of_operand(planned, OrderKind.GATHERED_NEXT, named[number + later], slot)
    for slot in plan.holds_results:
        made = next(i for i in named.values() if results[slot] in i.results)
        entries = dict(planned.plan_of(made).results).get(made.results.index(results[slot]))
        yield from _order(planned, OrderKind.HANDED_ON_LATE, results[slot], (made, "result"), entries)
    others = [(OrderKind.REDUCED_BEFORE, earlier, 0) for earlier, _ in plan.follows]
    others += [(OrderKind.COPIED_OUT, m.made_before, m.result) for m in plan.copies_out]
    others += [(OrderKind.COPIED_BACK, m.made_before, m.result) for m in plan.copies_back]
    for kind, earlier, slot in others:
        made = named[number - earlier]
        entries = dict(planned.plan_of(made).results).get(slot)
        yield from _order(planned, kind, made.results[slot], (made, "result"), entries)
