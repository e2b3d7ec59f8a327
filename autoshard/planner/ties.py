"""Settles ties between layouts of arguments: of layouts that cost the same, the one that takes least memory.

A batch that every device could slice for itself for nothing is still better fed in pieces: less memory, and less to
copy from the host. The solver has no reason to care, so its choice among equals is settled afterwards.
"""

from collections.abc import Sequence

import numpy as np

from autoshard.graph.layout import shard_bytes
from autoshard.planner.build import Formulation
from autoshard.solver import evaluate

TOLERANCE = 1e-9
"""Costs that differ by less than this share of the objective are equal."""


def argument_costs(f: Formulation, picks: Sequence[int]) -> list[np.ndarray]:
    """For each argument, the cost of each of its choices while everything else stays as picked (up to a constant)."""
    costs = [f.problem.nodes[i].costs.copy() for i in range(len(f.program.graph.arguments))]
    for edge in f.problem.edges:
        if edge.source < len(costs):
            costs[edge.source] += edge.costs[edge.source_class, edge.target_class[picks[edge.target]]]
        if edge.target < len(costs):
            costs[edge.target] += edge.costs[edge.source_class[picks[edge.source]], edge.target_class]
    return costs


def settle_ties(f: Formulation, picks: Sequence[int]) -> tuple[int, ...]:
    """`picks` with ties settled; never costlier, and within the capacity if `picks` was."""
    before = evaluate(f.problem, picks)
    margin = TOLERANCE * abs(before.objective)
    sizes = f.mesh.shape
    settled = list(picks)
    for i, cost in enumerate(argument_costs(f, picks)):
        size_bytes = float(f.program.graph.values[f.program.graph.arguments[i].value].size_bytes)
        held = [shard_bytes(size_bytes, f.argument_layouts[i][row], sizes) for row in f.decisions[i].rows]
        equal = [k for k in range(len(cost)) if cost[k] <= cost[picks[i]] + margin / len(settled)]
        best = min(equal, key=lambda k: (held[k], k))
        if held[best] < held[picks[i]]:
            settled[i] = best
    after = evaluate(f.problem, settled)
    is_no_worse = after.objective <= before.objective + margin and (after.feasible or not before.feasible)
    return tuple(settled) if is_no_worse else tuple(picks)
