"""The folded problem: one node for every class of a partition (`refinement.py`), with the costs of all its copies.

Two problems can be made of it:

  * the *tied* one, in which all copies take the same choice. Its solutions are solutions of the whole problem with the
    same cost. An edge between two copies becomes a cost of their class.
  * the *relaxed* one, in which such an edge, if there is any, costs its least entry. On an equitable partition every
    choice of messages and prices for it is one for the whole problem with the same value (each copy of an edge takes an
    equal share of its class's messages), so that a bound by message passing on the relaxed problem is a bound on the
    whole problem, without ties. Presolve must keep to what could be done to every copy alone, for which `copies` tells
    which copies each edge joins (`Network.fold`); an integer program, which sees one node, would prove something about
    the tied problem only.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autoshard.solver.columns import Columns, restricted
from autoshard.solver.problem import Edge, EdgeUsage, Node, Problem, Usage
from autoshard.solver.refinement import Partition


@dataclasses.dataclass(frozen=True, slots=True)
class Folded:
    """The folded problem.

    Attributes:
      tied, relaxed: See above; the same object where no edge joins two copies.
      constant: What the relaxed problem leaves out.
      copies: For each edge of the relaxed problem, the numbers of the copies that it joins: (of its source, of its
        target), one entry for every copy of the edge.
      partition: Where its nodes come from.
      instants: The instants at which the capacity counts.
    """

    tied: Problem
    relaxed: Problem
    constant: float
    copies: tuple[tuple[np.ndarray, np.ndarray], ...]
    partition: Partition
    instants: tuple[int, ...]

    def unfolded(self, choices: Sequence[int]) -> np.ndarray:
        """The choice of every node of the whole problem, int64 [n], from one for every class."""
        return np.asarray(choices, np.int64)[self.partition.node_class]


def fold(problem: Problem, columns: Columns, partition: Partition, instants: Sequence[int]) -> Folded:
    """Folds `problem`, whose capacity is to count at the given (rising) instants only."""
    part = restricted(problem, columns, instants) if len(instants) else Problem(problem.nodes, problem.edges)
    costs = [
        problem.nodes[first].costs * count
        for first, count in zip(partition.first_node.tolist(), partition.node_count.tolist(), strict=True)
    ]
    names = [problem.nodes[first].name for first in partition.first_node.tolist()]
    own_usages = _folded_usages(part.usages, partition.node_class)
    pair_usages = _folded_pair_usages(part.edge_usages, partition.edge_class)
    edges: list[Edge] = []
    number: dict[int, int] = {}
    loops: list[tuple[int, Edge, int]] = []
    for index, (first, count) in enumerate(
        zip(partition.first_edge.tolist(), partition.edge_count.tolist(), strict=True)
    ):
        edge = problem.edges[first]
        source, target = int(partition.node_class[edge.source]), int(partition.node_class[edge.target])
        if source == target:
            loops.append((index, edge, count))
            continue
        number[index] = len(edges)
        edges.append(Edge(source, target, edge.source_class, edge.target_class, edge.costs * count))
    pairs = tuple(EdgeUsage(number[e], s, t, amounts) for e, s, t, amounts in pair_usages if e in number)
    capacity = problem.capacity if len(instants) else None
    nodes = tuple(map(Node, names, costs))
    relaxed = Problem(nodes, tuple(edges), own_usages, pairs, capacity)
    constant = float(sum(edge.costs.min() * count for _, edge, count in loops))
    tied = relaxed if not loops else _with_loops(relaxed, loops, pair_usages, partition)
    copies = tuple(pairs for index, pairs in enumerate(_joined_copies(columns, partition)) if index in number)
    return Folded(tied, relaxed, constant, copies, partition, tuple(int(t) for t in instants))


def _joined_copies(columns: Columns, partition: Partition) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each edge class, which copies of its ends its edges join."""
    by_class = np.argsort(partition.node_class, kind="stable")
    starts = np.concatenate([[0], np.cumsum(partition.node_count)])
    number = np.empty(len(by_class), np.int64)
    number[by_class] = np.arange(len(by_class)) - starts[partition.node_class[by_class]]
    edges = np.argsort(partition.edge_class, kind="stable")
    ends = np.cumsum(partition.edge_count)[:-1]
    sources, targets = (np.split(number[end[edges]], ends) for end in (columns.source, columns.target))
    return list(zip(sources, targets, strict=True))


def _with_loops(
    relaxed: Problem,
    loops: Sequence[tuple[int, Edge, int]],
    pair_usages: Sequence[tuple[int, int, int, np.ndarray]],
    partition: Partition,
) -> Problem:
    """`relaxed` with the edges between copies as costs and usages of their class: both ends take the same choice."""
    costs = [node.costs for node in relaxed.nodes]
    usages = list(relaxed.usages)
    edge_of = {index: edge for index, edge, _ in loops}
    for _, edge, count in loops:
        own = int(partition.node_class[edge.source])
        costs[own] = costs[own] + edge.costs[edge.source_class, edge.target_class] * count
    for index, start, stop, amounts in pair_usages:
        if index in edge_of:
            edge = edge_of[index]
            own = int(partition.node_class[edge.source])
            usages.append(Usage(own, start, stop, amounts[edge.source_class, edge.target_class]))
    nodes = tuple(Node(node.name, own) for node, own in zip(relaxed.nodes, costs, strict=True))
    return dataclasses.replace(relaxed, nodes=nodes, usages=tuple(usages))


def _folded_usages(usages: Sequence[Usage], node_class: np.ndarray) -> tuple[Usage, ...]:
    counts: dict[tuple[int, int, int, int], list] = {}
    for u in usages:
        entry = counts.setdefault((int(node_class[u.node]), u.start, u.stop, id(u.amounts)), [u.amounts, 0])
        entry[1] += 1
    return tuple(Usage(own, s, t, amounts * count) for (own, s, t, _), (amounts, count) in counts.items())


def _folded_pair_usages(usages: Sequence[EdgeUsage], edge_class: np.ndarray) -> list[tuple[int, int, int, np.ndarray]]:
    """(edge class, start, stop, amounts of all copies together)."""
    counts: dict[tuple[int, int, int, int], list] = {}
    for u in usages:
        entry = counts.setdefault((int(edge_class[u.edge]), u.start, u.stop, id(u.amounts)), [u.amounts, 0])
        entry[1] += 1
    return [(own, s, t, amounts * count) for (own, s, t, _), (amounts, count) in counts.items()]
