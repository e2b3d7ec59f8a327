"""The look-ups of a plan that exchange ids and rows, as text."""

import collections

from rich.console import Console

from autoshard.graph.equation_plan import IndexExchange
from autoshard.plans.program_plan import ProgramPlan
from autoshard.printing import amount, table


def print_lookups(console: Console, plan: ProgramPlan, most: int) -> None:
    """A line for each kind of exchange, those that send most first; nothing where there is none."""
    exchanges = {number: e.exchange for number, e in plan.shardings if e.exchange is not None}
    if not exchanges:
        return
    sent_bytes: dict[int, float] = collections.defaultdict(float)
    line: dict[int, tuple[str, str]] = {}
    for c in plan.estimate.communication:
        if c.equation is not None and c.equation in exchanges:
            sent_bytes[c.equation] += c.wire_bytes
            line.setdefault(c.equation, (c.value, c.source))
    kinds: dict[tuple[IndexExchange, str, str, float], int] = collections.Counter(
        (exchange, *line.get(number, ("", "")), sent_bytes[number]) for number, exchange in exchanges.items()
    )
    rows = table(
        "Look-ups that send ids to the owners of rows; what exceeds the slots goes in further rounds",
        [
            ("n", "right"),
            ("axes", "left"),
            ("ids", "right"),
            ("slots an owner", "right"),
            ("expected", "right"),
            ("factor", "right"),
            ("sent", "right"),
            ("operation", "left"),
            ("line", "left"),
        ],
    )
    ranked = sorted(kinds.items(), key=lambda kind: -kind[0][-1] * kind[1])
    for (exchange, name, source, size_bytes), count in ranked[:most]:
        rows.add_row(
            str(count),
            "+".join(exchange.axes),
            str(exchange.num_ids),
            str(exchange.slots),
            f"{exchange.expected:.4g}",
            f"{exchange.slots / exchange.expected:.3g}",
            amount(count * size_bytes),
            name,
            source,
        )
    console.print(rows)
    if ranked[most:]:
        console.print(f"and {len(ranked) - most} more kinds")
    console.print()
