"""Figures with their units, and plain tables: what every account for people shares."""

from collections.abc import Sequence

from rich.table import Table


def seconds(value: float) -> str:
    """Seconds in a readable unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns" if value else "0"


def amount(value: float, unit: str = "B") -> str:
    """A quantity with its decimal SI prefix."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def table(title: str, columns: Sequence[tuple[str, str]]) -> Table:
    """An empty table without lines; `columns` are names and how they are justified."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0), title_style="bold")
    for name, justify in columns:
        made.add_column(name, justify=justify, overflow="fold", no_wrap=justify == "right")
    return made
