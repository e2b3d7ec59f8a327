"""Figures with their units, plain tables, and text for a terminal: what every account for people shares."""

import io
from collections.abc import Sequence
from typing import cast

from rich.console import Console, JustifyMethod
from rich.table import Table

PAGE_WIDTH = 118
"""Columns of an account where nothing else is asked for."""


class TextConsole(Console):
    """A console that prints into a string, without colours; names of the user are shown as they are."""

    def __init__(self, width: int = PAGE_WIDTH) -> None:
        self._written = io.StringIO()
        super().__init__(
            file=self._written,
            width=width,
            color_system=None,
            highlight=False,
            soft_wrap=False,
            markup=False,
            emoji=False,
        )

    @property
    def text(self) -> str:
        """What was printed: lines without blanks at their ends, and no empty ones at the end."""
        return "\n".join(line.rstrip() for line in self._written.getvalue().rstrip().splitlines()) + "\n"


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


def counted(number: int, one: str, many: str = "") -> str:
    """A number with the word for what it counts, such as `1 stage` and `2 stages`; `many` where that is not `one` and
    an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def table(title: str, columns: Sequence[tuple[str, str]]) -> Table:
    """An empty table without lines; `columns` are names and how they are justified."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0), title_style="bold")
    for name, justify in columns:
        made.add_column(name, justify=cast(JustifyMethod, justify), overflow="fold", no_wrap=justify == "right")
    return made


def duration(value: float) -> str:
    """Seconds as people say them, up to days: `42.5 s`, `6 min 52 s`, `3 h 07 min`, `53 d 4 h`."""
    if value < 59.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(value / 60), 60)
    if hours < 24:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(round(value / 3600), 24)
    return f"{days} d {hours} h"
