"""Words that every account of a plan shares: paths folded over layers, layouts."""

import re
from collections.abc import Sequence

from autoshard.graph.layout import SpecEntries


def pattern(name: str) -> str:
    """A path with every number replaced by `*`, so that layers fall together; the number of a source line stays."""
    return re.sub(r"(?<![A-Za-z0-9_:])\d+(?![A-Za-z0-9_])|(?<=_)\d+(?=\.|$)", "*", name)


def folded(names: Sequence[str]) -> str:
    """How names of one pattern are shown: a single one as it is, so that it can be pinned, several as the pattern."""
    return names[0] if len(names) == 1 else pattern(names[0])


def lineless(name: str) -> str:
    """`pattern` with the numbers of source lines replaced as well, for plans of code that may have moved."""
    return re.sub(r"(?<=:)\d+", "*", pattern(name))


def inner_path(path: str) -> str:
    """A path below its first two components: what a parameter and its optimizer moments have in common.

    `state.params.up.kernel` and `state.opt_state.0.mu.up.kernel` both end in `up.kernel`. Empty for shorter paths.
    """
    return ".".join(path.split(".")[2:])


def is_companion(path: str, leader: str) -> bool:
    """Whether `path` looks like an optimizer moment of the parameter at `leader`: it repeats the inner path."""
    inner = inner_path(leader)
    return bool(inner) and path != leader and f".{path}".endswith(f".{inner}")


def layout_text(entries: SpecEntries) -> str:
    """`(data, -)`: the mesh axes on each dimension."""
    return "(" + ", ".join("+".join(e) or "-" for e in entries) + ")"
