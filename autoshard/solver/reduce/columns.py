"""A problem as columns: one integer array per attribute, with equal arrays of costs or amounts under one number.

What looks at all nodes and edges at once (colour refinement, usage over time) reads these instead of the objects of
`problem.py`, in time that is small beside that of building the problem.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autoshard.solver.array_numbers import ArrayNumbers
from autoshard.solver.problem import EdgeUsage, Problem, Usage

PEAKS = 3
"""Instants that are looked at where the capacity is exceeded."""
APART = 0.02
"""They are at least this share of all apart."""


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a problem; all int64.

    Attributes:
      node_kind: [n]; nodes with equal costs have equal kinds.
      source, target: [m]; the ends of each edge.
      edge_kind: [m]; edges with equal costs and equal classes have equal kinds.
      usage_owner, usage_start, usage_stop, usage_kind: [u]; of each usage: node, interval, number of its amounts.
      pair_owner, pair_start, pair_stop, pair_kind: [v]; the same of each edge usage, the owner being an edge.
      instants: One past the last instant at which anything is used.
    """

    node_kind: np.ndarray
    source: np.ndarray
    target: np.ndarray
    edge_kind: np.ndarray
    usage_owner: np.ndarray
    usage_start: np.ndarray
    usage_stop: np.ndarray
    usage_kind: np.ndarray
    pair_owner: np.ndarray
    pair_start: np.ndarray
    pair_stop: np.ndarray
    pair_kind: np.ndarray
    instants: int


def columns_of(problem: Problem) -> Columns:
    """The columns of `problem`."""
    column = lambda values: np.fromiter(values, np.int64)
    edge_kinds: dict[tuple[int, int, int], int] = {}
    of = ArrayNumbers().of
    usages, pairs = problem.usages, problem.edge_usages
    stops = [0, *(u.stop for u in usages), *(u.stop for u in pairs)]
    return Columns(
        node_kind=column(of(node.costs) for node in problem.nodes),
        source=column(edge.source for edge in problem.edges),
        target=column(edge.target for edge in problem.edges),
        edge_kind=column(
            edge_kinds.setdefault((of(e.costs), of(e.source_class), of(e.target_class)), len(edge_kinds))
            for e in problem.edges
        ),
        usage_owner=column(u.node for u in usages),
        usage_start=column(u.start for u in usages),
        usage_stop=column(u.stop for u in usages),
        usage_kind=column(of(u.amounts) for u in usages),
        pair_owner=column(u.edge for u in pairs),
        pair_start=column(u.start for u in pairs),
        pair_stop=column(u.stop for u in pairs),
        pair_kind=column(of(u.amounts) for u in pairs),
        instants=max(stops),
    )


def usage_over_time(problem: Problem, columns: Columns, choices: np.ndarray) -> np.ndarray:
    """What `choices` (one per node) use at each instant; float64 [instants]."""
    taken = choices[columns.usage_owner].tolist() if len(columns.usage_owner) else []
    by_nodes = np.array([u.amounts[c] for u, c in zip(problem.usages, taken, strict=True)], np.float64)
    by_edges = np.empty(len(columns.pair_owner))
    if len(columns.pair_owner):
        rows = choices[columns.source[columns.pair_owner]].tolist()
        places = choices[columns.target[columns.pair_owner]].tolist()
        for index, (usage, row, place) in enumerate(zip(problem.edge_usages, rows, places, strict=True)):
            edge = problem.edges[usage.edge]
            by_edges[index] = usage.amounts[edge.source_class[row], edge.target_class[place]]
    return summed_over_time(columns, by_nodes, by_edges)


def summed_over_time(columns: Columns, by_nodes: np.ndarray, by_edges: np.ndarray) -> np.ndarray:
    """What is used at each instant, float64 [instants], by usages that take `by_nodes`, and edge usages `by_edges`."""
    steps = np.zeros(columns.instants + 1)
    np.add.at(steps, columns.usage_start, by_nodes)
    np.subtract.at(steps, columns.usage_stop, by_nodes)
    np.add.at(steps, columns.pair_start, by_edges)
    np.subtract.at(steps, columns.pair_stop, by_edges)
    return np.cumsum(steps)[:-1]


def worst_instants(usage: np.ndarray, capacity: float) -> list[int]:
    """Up to `PEAKS` instants that exceed the capacity most, some way apart."""
    over = np.where(usage > capacity, usage, 0.0)
    apart = max(int(APART * len(over)), 1)
    found: list[int] = []
    for _ in range(PEAKS if len(over) else 0):
        at = int(np.argmax(over))
        if over[at] <= 0:
            break
        found.append(at)
        over[max(0, at - apart) : at + apart] = 0.0
    return found


def restricted(problem: Problem, columns: Columns, instants: Sequence[int]) -> Problem:
    """The problem with its capacity at the given (rising) instants only, renumbered from 0.

    A bound for it is a bound for `problem`, since constraints are missing.
    """
    at = np.asarray(instants, np.int64)
    spans = lambda start, stop: zip(
        np.searchsorted(at, start).tolist(), np.searchsorted(at, stop).tolist(), strict=True
    )
    usages = tuple(
        Usage(u.node, first, last, u.amounts)
        for u, (first, last) in zip(problem.usages, spans(columns.usage_start, columns.usage_stop), strict=True)
        if first < last
    )
    pairs = tuple(
        EdgeUsage(u.edge, first, last, u.amounts)
        for u, (first, last) in zip(problem.edge_usages, spans(columns.pair_start, columns.pair_stop), strict=True)
        if first < last
    )
    return Problem(problem.nodes, problem.edges, usages, pairs, problem.capacity)
