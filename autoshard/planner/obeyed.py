"""What became of annotated blocks in a plan."""

import dataclasses
from collections.abc import Sequence

from autoshard.planner.asked import Asked, obeys
from autoshard.planner.build import Formulation
from autoshard.planner.choices import Choice


@dataclasses.dataclass(frozen=True, slots=True)
class Obeyed:
    """What became of a block in a plan.

    Attributes:
      asked: The block as text. line: Where it stands.
      axes: The mesh axes that carry it. groups: How many groups of operations obey it. free: How many inside could not.
    """

    asked: str
    line: str
    axes: tuple[str, ...]
    groups: int
    free: int


def obeyed(f: Formulation, choices: Sequence[Choice], asked: Asked) -> tuple[Obeyed, ...]:
    """What became of each block in a solution; blocks that ask for the same on one line are one."""
    names, sizes = f.mesh.axis_names, f.mesh.shape
    found = []
    for block in asked.blocks:
        axes: set[str] = set()
        groups = free = 0
        for demands, choice in zip(asked.of_groups, choices, strict=True):
            own = next((d for d in demands if (str(d.block), d.block.line) == (str(block), block.line)), None)
            if own is None:
                continue
            if obeys(demands, choice.assignment, sizes):
                groups += 1
                split = zip(names, choice.assignment, sizes, strict=True)
                axes.update(name for name, factor, size in split if factor in own.factors and size > 1)
            else:
                free += 1
        carried = tuple(n for n in names if n in axes)
        found.append(Obeyed(str(block), block.line, carried, groups, free))
    return tuple(found)
