"""Settles ties between layouts of arguments: of layouts that cost the same, the one that takes least memory.

A batch that every device could slice for itself for nothing is still better fed in pieces: less memory, and less to
copy from the host. The solver has no reason to care, so its choice among equals is settled afterwards. What reads the
batch may be as free, such as its conversion to another type: an argument is settled together with its only reader.
"""

from collections.abc import Sequence

import numpy as np

from autoshard.graph.layout import shard_bytes
from autoshard.planner.build import Formulation
from autoshard.solver import evaluate
from autoshard.solver.problem import Edge

TOLERANCE = 1e-9
"""Costs that differ by less than this share of the objective are equal."""


def argument_costs(f: Formulation, picks: Sequence[int]) -> list[np.ndarray]:
    """For each argument, the cost of each of its choices while everything else stays as picked (up to a constant)."""
    edges_of = _edges_of(f)
    return [_costs(f, picks, i, edges_of[i]) for i in range(len(f.program.graph.arguments))]


def settle_ties(f: Formulation, picks: Sequence[int]) -> tuple[int, ...]:
    """`picks` with ties settled; never costlier, and within the capacity if `picks` was."""
    before = evaluate(f.problem, picks)
    margin = TOLERANCE * abs(before.objective)
    sizes = f.mesh.shape
    settled = list(picks)
    edges_of = _edges_of(f)
    share = margin / max(2 * len(f.program.graph.arguments), 1)
    for i, argument in enumerate(f.program.graph.arguments):
        cost = _costs(f, settled, i, edges_of[i])
        size_bytes = float(f.program.graph.values[argument.value].size_bytes)
        decision = f.argument_decision(i)
        held = [
            0.0 if decision.is_in_host(row) else shard_bytes(size_bytes, f.argument_layouts[i][row], sizes)
            for row in decision.rows
        ]
        equal = [k for k in range(len(cost)) if cost[k] <= cost[settled[i]] + share]
        best = min(equal, key=lambda k: (held[k], k))
        if held[best] < held[settled[i]]:
            settled[i] = best
        if held[best] > min(held) and len(edges_of[i]) == 1:
            pair = _with_reader(f, settled, i, edges_of, held, share)
            if pair is not None:
                reader, choice, read_as = pair
                settled[i], settled[reader] = choice, read_as
    after = evaluate(f.problem, settled)
    is_no_worse = after.objective <= before.objective + margin and (after.feasible or not before.feasible)
    return tuple(settled) if is_no_worse else tuple(picks)


def _edges_of(f: Formulation) -> list[list[Edge]]:
    """The edges of each node."""
    found: list[list[Edge]] = [[] for _ in f.problem.nodes]
    for edge in f.problem.edges:
        found[edge.source].append(edge)
        found[edge.target].append(edge)
    return found


def _costs(f: Formulation, picks: Sequence[int], node: int, edges: Sequence[Edge]) -> np.ndarray:
    """The cost of each choice of a node, with those of `edges`, whose other ends stay as picked."""
    costs = f.problem.nodes[node].costs.copy()
    for edge in edges:
        if edge.source == node:
            costs += edge.costs[edge.source_class, edge.target_class[picks[edge.target]]]
        else:
            costs += edge.costs[edge.source_class[picks[edge.source]], edge.target_class]
    return costs


def _with_reader(
    f: Formulation,
    picks: Sequence[int],
    argument: int,
    edges_of: Sequence[Sequence[Edge]],
    held: Sequence[float],
    margin: float,
) -> tuple[int, int, int] | None:
    """(reader, choice of the argument, choice of the reader) that cost no more than those picked, all else being as
    picked, if the argument then takes less memory; None if there are none.
    """
    (own,) = edges_of[argument]
    reader = own.target if own.source == argument else own.source
    read_s = _costs(f, picks, reader, [edge for edge in edges_of[reader] if edge is not own])
    moved_s = own.costs[np.ix_(own.source_class, own.target_class)]
    moved_s = moved_s if own.source == argument else moved_s.T
    both_s = f.problem.nodes[argument].costs[:, None] + read_s + moved_s
    before_s = both_s[picks[argument], picks[reader]]
    options = np.argwhere(both_s <= before_s + margin).tolist()
    k, choice = min(options, key=lambda kl: (held[kl[0]], both_s[kl[0], kl[1]], kl))
    return (reader, k, choice) if held[k] < held[picks[argument]] else None
