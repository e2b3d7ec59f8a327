"""The orders of a plan one by one, for people: what waits, is stored, or is kept in some order, and how large it is."""

import dataclasses
import enum
from collections.abc import Iterator

from autoshard.compiler.early_products import is_summed_alone
from autoshard.compiler.planned_graph import PlannedGraph
from autoshard.graph.computations import Instruction, all_computations
from autoshard.graph.graph import ValueKind
from autoshard.graph.layout import SpecEntries


class OrderKind(enum.Enum):
    """What is ordered or kept; the values are words for people."""

    DELAYED = "copied or filled only when it is read"
    WAITS = "read next only when its reader is done"
    WAITS_FOR_SUM = "read next only when its product is reduced, alone"
    WAITS_FOR_PART = "read next only when its product is made, reduced or not"
    MATERIALIZED = "stored for the products that read it"
    ROW_MAJOR = "kept row by row"
    TRANSPOSED = "made as its transposition wants it"


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
    found = [o for c in all_computations(planned.entry) for i in c if i.operation for o in _of_instruction(planned, i)]
    return tuple(sorted(found, key=lambda order: order.equation))


def _of_instruction(planned: PlannedGraph, instruction: Instruction) -> Iterator[Order]:
    plan = planned.plan_of(instruction)
    if not plan.has_orders:
        return
    read_as, made_as = {slot: steps[-1] for slot, steps in plan.operands}, dict(plan.results)

    def order(kind: OrderKind, role: str, value: int | None, entries: SpecEntries | None) -> Iterator[Order]:
        if value is None or instruction.operation is None:
            return
        own = planned.graph.values[value]
        name = own.name if own.kind is ValueKind.ARGUMENT else f"{role} of {instruction.name}"
        size_bytes = planned.shard_bytes(value, entries or ())
        yield Order(kind, name, own.shape, size_bytes, instruction.operation.source, instruction.equation)

    summed = bool(plan.waits) and instruction.name == "dot_general" and is_summed_alone(planned, instruction)
    for kind, slots in (
        (OrderKind.DELAYED, plan.delayed),
        (OrderKind.WAITS_FOR_SUM if summed else OrderKind.WAITS, plan.waits),
        (OrderKind.WAITS_FOR_PART, plan.waits_for_part),
        (OrderKind.ROW_MAJOR, (*plan.row_major, *plan.row_major_copies)),
    ):
        for slot in slots:
            lies = read_as.get(slot, planned.layout_of(instruction, slot))
            yield from order(kind, "operand", instruction.operands[slot], lies)
    for slot in plan.materialized:
        yield from order(OrderKind.MATERIALIZED, "result", instruction.results[slot], made_as.get(slot))
    if plan.is_transposed_at_once:
        yield from order(OrderKind.TRANSPOSED, "result", instruction.results[0], made_as.get(0))
