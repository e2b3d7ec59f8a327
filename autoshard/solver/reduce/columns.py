"""A problem as columns: one integer array per attribute, with equal arrays of costs or amounts under one number.

What looks at all nodes and edges at once (colour refinement, usage over time) reads these instead of the objects of
`problem.py`, in time that is small beside that of building the problem.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autoshard.solver.array_numbers import ArrayNumbers
from autoshard.solver.problem import Edge, EdgeUsage, Problem, Usage

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
      edge_classes: [m]; edges with equal classes at both ends have equal numbers.
      edge_kind: [m]; edges with equal costs and equal classes have equal kinds.
      usage_owner, usage_start, usage_stop, usage_kind: [u]; of each usage: node, interval, number of its amounts.
      pair_owner, pair_start, pair_stop, pair_kind: [v]; the same of each edge usage, the owner being an edge.
      instants: One past the last instant at which anything is used.
    """

    node_kind: np.ndarray
    source: np.ndarray
    target: np.ndarray
    edge_classes: np.ndarray
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
    classes: dict[tuple[int, int], int] = {}
    of = ArrayNumbers().of
    usages, pairs = problem.usages, problem.edge_usages
    stops = [0, *(u.stop for u in usages), *(u.stop for u in pairs)]
    edge_classes = column(
        classes.setdefault((of(e.source_class), of(e.target_class)), len(classes)) for e in problem.edges
    )
    node_kind, edge_kind = _kinds(problem, edge_classes)
    return Columns(
        node_kind=node_kind,
        source=column(edge.source for edge in problem.edges),
        target=column(edge.target for edge in problem.edges),
        edge_classes=edge_classes,
        edge_kind=edge_kind,
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


def columns_like(problem: Problem, columns: Columns) -> Columns:
    """The columns of a problem that differs in its costs alone from one that has these."""
    node_kind, edge_kind = _kinds(problem, columns.edge_classes)
    return dataclasses.replace(columns, node_kind=node_kind, edge_kind=edge_kind)


def _kinds(problem: Problem, edge_classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The kinds of nodes and of edges."""
    of = ArrayNumbers().of
    nodes = np.fromiter((of(node.costs) for node in problem.nodes), np.int64)
    tables = np.fromiter((of(edge.costs) for edge in problem.edges), np.int64)
    kinds = edge_classes * (int(tables.max(initial=0)) + 1) + tables
    return nodes, np.unique(kinds, return_inverse=True)[1].astype(np.int64)


def differ_in_costs_alone(one: Problem, other: Problem) -> bool:
    """Whether two problems have the same nodes, edges, usages and capacity; arrays and usages as the same objects."""
    return (
        one.usages is other.usages
        and one.edge_usages is other.edge_usages
        and one.capacity == other.capacity
        and len(one.nodes) == len(other.nodes)
        and len(one.edges) == len(other.edges)
        and all(a.costs.shape == b.costs.shape for a, b in zip(one.nodes, other.nodes, strict=True))
        and all(a is b or _are_alike(a, b) for a, b in zip(one.edges, other.edges, strict=True))
    )


def _are_alike(one: Edge, other: Edge) -> bool:
    """Whether two edges join the same classes of the same nodes."""
    return (
        (one.source, one.target, one.costs.shape) == (other.source, other.target, other.costs.shape)
        and one.source_class is other.source_class
        and one.target_class is other.target_class
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
