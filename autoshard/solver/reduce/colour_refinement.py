"""Colour refinement: which nodes of a problem are copies of one another.

Nodes start with a colour for what they are (costs, and usage at the chosen instants). In each round a node's colour
takes in the colours of its neighbours and the kinds of the edges between, until no round tells more nodes apart
(Weisfeiler and Leman 1968). Then the partition is *equitable*: all nodes of a class have, for every kind of edge and
every class, equally many such edges to nodes of that class.

Linear programs are blind to what colour refinement does not see: averaging a solution over the classes of an equitable
partition gives a solution of the same cost (Grohe, Kersting, Mladenov and Selman, "Dimension reduction via colour
refinement", 2014). That is why the small problem of `quotient.py`, with one node a class, bounds the whole one.

A long chain of layers is told apart layer by layer, from both ends. Refinement therefore stops after `ROUNDS` rounds;
then the classes are still good for a first solution, but prove nothing by themselves (`copied_messages.py`).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autoshard.solver.reduce.columns import Columns

ROUNDS = 12
"""Most rounds. The surroundings of a copy are told apart up to this many edges away."""


@dataclasses.dataclass(frozen=True, slots=True)
class Partition:
    """Classes of nodes and of edges.

    Attributes:
      node_class: int64 [n]; classes are numbered by their first node.
      first_node: int64 [classes]; the first node of each class.
      node_count: int64 [classes]; how many nodes each class has.
      edge_class: int64 [m]; edges of one class have equal kinds and usages, and ends of equal classes.
      first_edge, edge_count: int64 [edge classes]; likewise.
      is_equitable: Whether all nodes of a class see the same: checked, not assumed.
    """

    node_class: np.ndarray
    first_node: np.ndarray
    node_count: np.ndarray
    edge_class: np.ndarray
    first_edge: np.ndarray
    edge_count: np.ndarray
    is_equitable: bool


def refine(columns: Columns, instants: Sequence[int], rounds: int = ROUNDS) -> Partition:
    """Partitions the nodes and edges of a problem whose capacity counts at the given (rising) instants only."""
    at = np.asarray(instants, np.int64)
    nodes, edges = len(columns.node_kind), len(columns.source)
    own = _own_patterns(columns.usage_owner, columns.usage_start, columns.usage_stop, columns.usage_kind, at, nodes)
    pair = _own_patterns(columns.pair_owner, columns.pair_start, columns.pair_stop, columns.pair_kind, at, edges)
    node_kind = _renumbered(columns.node_kind, own)
    edge_kind = _renumbered(columns.edge_kind, pair)
    colour, count = node_kind, int(node_kind.max(initial=-1)) + 1
    for _ in range(rounds):
        finer = _round(columns, edge_kind, colour)
        found = int(finer.max(initial=-1)) + 1
        colour = finer
        if found == count:
            break
        count = found
    node_class, first_node, node_count = _classes(colour)
    edge_class, first_edge, edge_count = _classes(
        _renumbered(edge_kind, node_class[columns.source], node_class[columns.target])
    )
    return Partition(
        node_class,
        first_node,
        node_count,
        edge_class,
        first_edge,
        edge_count,
        bool((node_kind == node_kind[first_node][node_class]).all())
        and _is_regular(columns, node_class, node_count, edge_class),
    )


def _own_patterns(
    owner: np.ndarray, start: np.ndarray, stop: np.ndarray, kind: np.ndarray, at: np.ndarray, count: int
) -> np.ndarray:
    """Numbers owners so that equal numbers mean equal usages at the instants `at`; int64 [count]."""
    pattern = np.zeros(count, np.int64)
    first, last = np.searchsorted(at, start), np.searchsorted(at, stop)
    live = np.flatnonzero(first < last)
    entries: dict[int, list[tuple[int, int, int]]] = {}
    for node, *entry in zip(
        owner[live].tolist(), kind[live].tolist(), first[live].tolist(), last[live].tolist(), strict=True
    ):
        entries.setdefault(node, []).append(tuple(entry))
    numbers: dict[tuple, int] = {}
    for node, own in entries.items():
        pattern[node] = numbers.setdefault(tuple(sorted(own)), len(numbers) + 1)
    return pattern


def _renumbered(*parts: np.ndarray) -> np.ndarray:
    """Numbers 0.. for the distinct rows of non-negative columns."""
    joined = parts[0]
    for part in parts[1:]:
        joined = joined * (int(part.max(initial=0)) + 1) + part
        joined = np.unique(joined, return_inverse=True)[1]
    return np.unique(joined, return_inverse=True)[1] if len(parts) == 1 else joined


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """A hash of each number (Steele, Lea and Flood's SplitMix64, 2014); uint64."""
    x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _round(columns: Columns, edge_kind: np.ndarray, colour: np.ndarray) -> np.ndarray:
    """Colours that take in the neighbours'; a node's sum of hashes stands for the multiset of what it sees."""
    own = _mixed(colour)
    kind = _mixed(edge_kind)
    seen = _mixed(own)
    np.add.at(seen, columns.source, _mixed(kind + _mixed(own[columns.target] + np.uint64(1))))
    np.add.at(seen, columns.target, _mixed(kind + _mixed(own[columns.source] + np.uint64(2))))
    return np.unique(seen, return_inverse=True)[1]


def _classes(colour: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Classes of equal colour, numbered by first member: (class of each, first member, count)."""
    _, first, inverse, count = np.unique(colour, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank[inverse], first[order], count[order]


def _is_regular(columns: Columns, node_class: np.ndarray, node_count: np.ndarray, edge_class: np.ndarray) -> bool:
    """Whether every node of a class has as many edges of each class, at each end, as the others."""
    classes = int(edge_class.max(initial=-1)) + 1
    for end in (columns.source, columns.target):
        nodes, edges = np.divmod(np.unique(end * max(classes, 1) + edge_class), max(classes, 1))
        per_node = np.bincount(edge_class, minlength=classes)  # edges of each class
        holders = np.bincount(edges, minlength=classes)  # nodes that have some
        own = np.zeros(classes, np.int64)
        own[edges] = node_count[node_class[nodes]]
        if (holders != own).any() or (per_node % np.maximum(holders, 1) != 0).any():
            return False
        each = np.unique(end * max(classes, 1) + edge_class, return_counts=True)[1]
        if (each != per_node[edges] // holders[edges]).any():
            return False
    return True
