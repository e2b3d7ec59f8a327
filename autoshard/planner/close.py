"""Decisions that were nearly ties: for each, the cheapest other choice when everything else stays as planned."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autoshard.graph.layout import Layout, spec_entries
from autoshard.planner.build import Formulation
from autoshard.planner.ties import argument_costs


@dataclasses.dataclass(frozen=True, slots=True)
class NearTie:
    """An argument whose layout could be `alternative` for `extra_s` more seconds a call."""

    name: str
    chosen: str
    alternative: str
    extra_s: float


def close_choices(f: Formulation, picks: Sequence[int]) -> tuple[NearTie, ...]:
    """The alternatives to each argument's layout, cheapest first; choices of equal cost are left out."""
    ties = []
    names = f.mesh.axis_names
    for i, (argument, cost) in enumerate(zip(f.program.graph.arguments, argument_costs(f, picks), strict=True)):
        extra = cost - cost[picks[i]]
        extra[extra <= 1e-12] = np.inf
        if not np.isfinite(extra).any():
            continue
        k = int(np.argmin(extra))
        rank = len(f.program.graph.values[argument.value].shape)
        text = lambda row, i=i, rank=rank: _text(f.argument_layouts[i][f.decisions[i].rows[row]], rank, names)
        ties.append(NearTie(argument.name, text(picks[i]), text(k), float(extra[k])))
    return tuple(sorted(ties, key=lambda t: t.extra_s))


def _text(layout: Layout, rank: int, names: Sequence[str]) -> str:
    """A layout as people write it: `(data, -)`."""
    return "(" + ", ".join("+".join(e) or "-" for e in spec_entries(layout, rank, names)) + ")"
