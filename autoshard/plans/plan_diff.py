"""The difference of two plans: what differs and what that costs, as data, as JSON, and as text for a terminal."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from autoshard.plans.differences import (
    CommunicationChange,
    ComputeChange,
    Difference,
    LayoutChange,
    MemoryChange,
    OrderChange,
    Side,
)
from autoshard.printing import PAGE_WIDTH, TextConsole, amount, seconds, table

_MOST_DEVICES = 8
"""Of an order of devices, how many are shown."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlanDiff(Difference[Side]):
    """What differs between plan A and plan B; every difference is B less A, largest first.

    Attributes:
      is_same_program: Whether both were made for the same equations and arguments.
      inside: How many equations enforce other layouts inside the program; None where programs or meshes differ.
      layouts: Arguments and outputs with other layouts.
      communication: Collectives of other tensors. compute: Computation. memory: Other tensors at the peak.
      orders: What the compiler is made to order or keep.
      rest_s, rest_bytes: What of the differences of step time and peak the items of the estimates do not account for.
    """

    FORMAT = "autoshard-diff"

    is_same_program: bool
    inside: int | None
    layouts: tuple[LayoutChange, ...]
    communication: tuple[CommunicationChange, ...]
    compute: tuple[ComputeChange, ...]
    memory: tuple[MemoryChange, ...]
    orders: tuple[OrderChange, ...]
    rest_s: float
    rest_bytes: float

    @property
    def is_empty(self) -> bool:
        """Whether the plans decide the same and cost the same."""
        return not (
            self.layouts
            or self.communication
            or self.compute
            or self.memory
            or self.orders
            or self.inside
            or self.rest_s
            or self.rest_bytes
            or not self.is_same_program
            or dataclasses.replace(self.a, name=self.b.name) != self.b
        )

    def text(self, width: int = PAGE_WIDTH, most: int = 20) -> str:
        """The whole difference, in lines of `width`; of each table the `most` largest rows, and the rest summed."""
        console = TextConsole(width)
        _summary(console, self)
        if self.is_empty:
            console.print("The plans decide the same and cost the same.")
            return console.text
        _table(
            console,
            "Layouts that differ",
            ("communication", "sent", "memory", "n", "shape", "in A", "in B", "path"),
            self.layouts,
            lambda c: (
                signed(c.comm_s, seconds),
                signed(c.comm_bytes, amount),
                signed(c.memory_bytes, amount),
                str(c.count),
                "x".join(map(str, c.shape)) or "scalar",
                c.before or "absent",
                c.after or "absent",
                c.path,
            ),
            4,
            lambda rest: f"{_sum(rest, 'comm_s', seconds)}, {_sum(rest, 'memory_bytes', amount)}",
            most,
        )
        _table(
            console,
            "Communication of other tensors, by the operation that makes them",
            ("time", "sent", "in A", "in B", "tensor", "line"),
            self.communication,
            lambda c: (
                signed(c.comm_s, seconds),
                signed(c.comm_bytes, amount),
                c.before or "none",
                c.after or "none",
                c.tensor,
                c.source,
            ),
            2,
            lambda rest: _sum(rest, "comm_s", seconds),
            most,
        )
        _table(
            console,
            "Computation",
            ("time", "work", "operation", "line"),
            self.compute,
            lambda c: (signed(c.compute_s, seconds), signed(c.flops, _flops), c.operation, c.source),
            2,
            lambda rest: _sum(rest, "compute_s", seconds),
            most // 2,
        )
        _table(
            console,
            "Memory at the peak, of other tensors",
            ("memory", "class", "tensor"),
            self.memory,
            lambda c: (signed(c.memory_bytes, amount), c.memory_class, c.tensor),
            1,
            lambda rest: _sum(rest, "memory_bytes", amount),
            most // 2,
        )
        _table(
            console,
            "What the compiler is made to order or keep",
            ("in A", "in B", "order", "tensor", "line"),
            self.orders,
            lambda c: (str(c.before), str(c.after), c.order, c.tensor, c.source),
            2,
            lambda rest: f"{sum(c.after - c.before for c in rest):+d} orders",
            most // 2,
        )
        _totals(console, self)
        return console.text

    def __str__(self) -> str:
        return self.text()


def signed(value: float, unit: Callable[[float], str]) -> str:
    """A difference with its sign; 0 without."""
    return "0" if value == 0 else ("+" if value > 0 else "-") + unit(abs(value))


def _flops(value: float) -> str:
    return amount(value, "FLOP")


def _sum(rows: Sequence[Any], field: str, unit: Callable[[float], str]) -> str:
    return signed(sum(getattr(row, field) for row in rows), unit)


def _summary(console: Console, found: PlanDiff) -> None:
    a, b = found.a, found.b
    rows = table("", [("", "left"), ("A", "right"), ("B", "right"), ("B less A", "right"), ("", "left")])
    rows.title = None
    rows.add_row("plan", a.name, b.name, "", "")
    rows.add_row("cluster", a.cluster, b.cluster, "", "")
    rows.add_row("mesh", _axes(a), _axes(b), "", "")
    if a.order != b.order:
        rows.add_row("devices", _order(a), _order(b), "", "")
    for name, field, unit in (
        ("step", "step_s", seconds),
        ("computation", "compute_s", seconds),
        ("communication", "comm_s", seconds),
        ("sent", "comm_bytes", amount),
        ("memory peak", "peak_bytes", amount),
        ("memory allowed", "budget_bytes", amount),
    ):
        x, y = getattr(a, field), getattr(b, field)
        difference = share = ""
        if x is not None and y is not None:
            difference, share = signed(y - x, unit), f"{y / x - 1:+.2%}" if x and x != y else ""
        show = lambda value, unit=unit: "no limit" if value is None else unit(value)
        rows.add_row(name, show(x), show(y), difference, share)
    if a.choice != b.choice:
        rows.add_row("form", a.choice, b.choice, "", "")
    console.print(rows)
    if not found.is_same_program:
        console.print("The plans are of different programs: only tensors of one path and shape are compared.")
    if found.inside:
        console.print(f"Inside the program, {found.inside} equations run in other layouts.")
    console.print()


def _axes(side: Side) -> str:
    return ", ".join(f"{name}={size}" for name, size in side.axes)


def _order(side: Side) -> str:
    if not side.order:
        return "in turn"
    return " ".join(map(str, side.order[:_MOST_DEVICES])) + (" ..." if side.order[_MOST_DEVICES:] else "")


def _table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Any],
    cells: Callable[[Any], Sequence[str]],
    figures: int,
    total: Callable[[Sequence[Any]], str],
    most: int,
) -> None:
    """A table whose first `figures` columns are numbers; nothing for no rows."""
    if not rows:
        return
    shown = table(f"{title} (B less A)", [(c, "right" if i < figures else "left") for i, c in enumerate(columns)])
    for row in rows[:most]:
        shown.add_row(*cells(row))
    console.print(shown)
    if rows[most:]:
        console.print(f"and {len(rows) - most} more kinds, together {total(rows[most:])}")
    console.print()


def _totals(console: Console, found: PlanDiff) -> None:
    """What the differences of step time and peak are made of."""
    time = table("What the differences are made of", [("step", "right"), ("memory", "right"), ("of", "left")])
    rows = (
        (
            _sum(found.layouts, "comm_s", seconds),
            _sum(found.layouts, "memory_bytes", amount),
            "tensors with other layouts",
        ),
        (_sum(found.communication, "comm_s", seconds), "", "communication of other tensors"),
        (_sum(found.compute, "compute_s", seconds), "", "computation"),
        ("", _sum(found.memory, "memory_bytes", amount), "other tensors alive at the peak"),
        (signed(found.rest_s, seconds), signed(found.rest_bytes, amount), "not accounted for"),
        (signed(found.step_s, seconds), signed(found.peak_bytes, amount), "in all"),
    )
    for row in rows:
        time.add_row(*row)
    console.print(time)
