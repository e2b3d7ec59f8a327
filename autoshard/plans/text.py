"""Words that every account of a plan shares: figures with their units, paths folded over layers, plain tables."""

import re
from collections.abc import Sequence

from rich.table import Table

from autoshard.planner.decisions import SpecEntries


def pattern(name: str) -> str:
    """A path with every number replaced by `*`, so that layers fall together."""
    return re.sub(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])|(?<=_)\d+(?=\.|$)", "*", name)


def inner_path(path: str) -> str:
    """A path below its first two components: what a parameter and its optimizer moments have in common.

    `state.params.up.kernel` and `state.opt_state.0.mu.up.kernel` both end in `up.kernel`. Empty for shorter paths.
    """
    return ".".join(path.split(".")[2:])


def is_companion(path: str, leader: str) -> bool:
    """Whether `path` looks like an optimizer moment of the parameter at `leader`: it repeats the inner path."""
    inner = inner_path(leader)
    return bool(inner) and path != leader and f".{path}".endswith(f".{inner}")


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


def layout_text(entries: SpecEntries) -> str:
    """`(data, -)`: the mesh axes on each dimension."""
    return "(" + ", ".join("+".join(e) or "-" for e in entries) + ")"


def table(title: str, columns: Sequence[tuple[str, str]]) -> Table:
    """An empty table without lines; `columns` are names and how they are justified."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0), title_style="bold")
    for name, justify in columns:
        made.add_column(name, justify=justify, overflow="fold", no_wrap=justify == "right")
    return made
