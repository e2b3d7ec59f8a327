"""Decisions that were nearly ties: for each, the cheapest other choice when everything else stays as planned."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autoshard.graph.layout import Layout, spec_entries
from autoshard.planner.allowed import ArgumentDecision
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
        decision, layouts = f.argument_decision(i), f.argument_layouts[i]
        text = lambda k, d=decision, own=layouts, rank=rank: _text(d, d.rows[k], own, rank, names)
        ties.append(NearTie(argument.name, text(picks[i]), text(k), float(extra[k])))
    return tuple(sorted(ties, key=lambda t: t.extra_s))


def _text(decision: ArgumentDecision, row: int, layouts: Sequence[Layout], rank: int, names: Sequence[str]) -> str:
    """A choice of an argument as people write it: `(data, -)`, and where it lies."""
    layout = "(" + ", ".join("+".join(e) or "-" for e in spec_entries(layouts[row], rank, names)) + ")"
    return f"{layout} in host memory" if decision.is_in_host(row) else layout
