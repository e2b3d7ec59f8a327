"""The quotient of a problem: one node for every class of a partition into copies (`colour_refinement.py`).

Two problems can be made of it:

  * the *tied* one has the costs of all copies, which take the same choice. Its solutions are solutions of the whole
    problem with the same cost. An edge between two copies of one class becomes a cost of that class.
  * the *lifted* one has the costs of one copy of each class, and is read together with how many copies there are and
    which of them each edge joins (`Network.lift`). On an equitable partition every choice of messages and prices for
    it is one for the whole problem with the same value: each copy of an edge takes an equal share of its class's
    messages. So message passing on it bounds the whole problem, without ties. Presolve must keep to what could be done
    to every copy alone; an integer program, which sees one node, would prove something about the tied problem only. An
    edge between two copies of one class is left out, at its least cost.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from autoshard.solver.problem import Edge, EdgeUsage, Node, Problem, Usage
from autoshard.solver.reduce.colour_refinement import Partition
from autoshard.solver.reduce.columns import Columns, restricted


@dataclasses.dataclass(frozen=True, slots=True)
class LiftedProblem:
    """One copy of everything.

    Attributes:
      problem: A node for each class.
      multiplicity: int64 [classes]; how many copies each node stands for.
      copy_pairs: For each edge, which copies it joins: (of its source, of its target), one entry a copy of the edge.
      constant: The least cost of what is left out, all copies together.
    """

    problem: Problem
    multiplicity: np.ndarray
    copy_pairs: tuple[tuple[np.ndarray, np.ndarray], ...]
    constant: float


@dataclasses.dataclass(frozen=True, slots=True)
class Quotient:
    """The quotient.

    Attributes:
      tied: See above. lifted: See above; None where the partition is not equitable.
      partition: Where its nodes come from.
      instants: The instants at which the capacity counts.
    """

    tied: Problem
    lifted: LiftedProblem | None
    partition: Partition
    instants: tuple[int, ...]

    def expanded(self, choices: Sequence[int] | np.ndarray) -> np.ndarray:
        """The choice of every node of the whole problem, int64 [n], from one for every class."""
        return np.asarray(choices, np.int64)[self.partition.node_class]


def quotient_of(problem: Problem, columns: Columns, partition: Partition, instants: Sequence[int]) -> Quotient:
    """The quotient of `problem`, whose capacity is to count at the given (rising) instants only."""
    part = restricted(problem, columns, instants) if len(instants) else Problem(problem.nodes, problem.edges)
    part = part if len(instants) else dataclasses.replace(part, capacity=None)
    lifted = _lifted(part, columns, partition) if partition.is_equitable else None
    return Quotient(_tied(part, partition), lifted, partition, tuple(int(t) for t in instants))


def _tied(part: Problem, partition: Partition) -> Problem:
    nodes = [
        Node(part.nodes[first].name, part.nodes[first].costs * count)
        for first, count in zip(partition.first_node.tolist(), partition.node_count.tolist(), strict=True)
    ]
    usages = list(_counted((u, int(partition.node_class[u.node])) for u in part.usages))
    pairs = list(_counted((u, int(partition.edge_class[u.edge])) for u in part.edge_usages))
    edges: list[Edge] = []
    number: dict[int, int] = {}
    loops: dict[int, Edge] = {}
    for index, (edge, count) in enumerate(_quotient_edges(part, partition)):
        if edge.source == edge.target:
            loops[index] = edge
            own = edge.costs[edge.source_class, edge.target_class] * count
            nodes[edge.source] = dataclasses.replace(nodes[edge.source], costs=nodes[edge.source].costs + own)
        else:
            number[index] = len(edges)
            edges.append(dataclasses.replace(edge, costs=edge.costs * count))
    own_usages = [Usage(node, start, stop, amounts) for node, start, stop, amounts in usages]
    edge_usages = []
    for index, start, stop, amounts in pairs:
        if index in number:
            edge_usages.append(EdgeUsage(number[index], start, stop, amounts))
        else:
            loop = loops[index]
            own_usages.append(Usage(loop.source, start, stop, amounts[loop.source_class, loop.target_class]))
    return Problem(tuple(nodes), tuple(edges), tuple(own_usages), tuple(edge_usages), part.capacity)


def _lifted(part: Problem, columns: Columns, partition: Partition) -> LiftedProblem:
    first_node = {first: own for own, first in enumerate(partition.first_node.tolist())}
    first_edge = {first: own for own, first in enumerate(partition.first_edge.tolist())}
    pairs_of = _copy_pairs(columns, partition)
    edges, copy_pairs, constant = [], [], 0.0
    number: dict[int, int] = {}
    for index, (edge, count) in enumerate(_quotient_edges(part, partition)):
        if edge.source == edge.target:
            constant += float(edge.costs.min()) * count
        else:
            number[index] = len(edges)
            edges.append(edge)
            copy_pairs.append(pairs_of[index])
    usages = [dataclasses.replace(u, node=first_node[u.node]) for u in part.usages if u.node in first_node]
    pairs = [
        dataclasses.replace(u, edge=number[first_edge[u.edge]])
        for u in part.edge_usages
        if first_edge.get(u.edge) in number
    ]
    nodes = tuple(part.nodes[first] for first in first_node)
    problem = Problem(nodes, tuple(edges), tuple(usages), tuple(pairs), part.capacity)
    return LiftedProblem(problem, partition.node_count, tuple(copy_pairs), constant)


def _quotient_edges(part: Problem, partition: Partition) -> Iterator[tuple[Edge, int]]:
    """Of each edge class, one edge between the nodes of the quotient, and how many copies it has."""
    for first, count in zip(partition.first_edge.tolist(), partition.edge_count.tolist(), strict=True):
        edge = part.edges[first]
        source, target = int(partition.node_class[edge.source]), int(partition.node_class[edge.target])
        yield Edge(source, target, edge.source_class, edge.target_class, edge.costs), count


def _counted(usages: Iterable[tuple[Usage | EdgeUsage, int]]) -> Iterator[tuple[int, int, int, np.ndarray]]:
    """(class, start, stop, amounts of all copies together) for usages with the class of their owner."""
    counts: dict[tuple[int, int, int, int], list] = {}
    for u, own in usages:
        counts.setdefault((own, u.start, u.stop, id(u.amounts)), [u.amounts, 0])[1] += 1
    for (own, start, stop, _), (amounts, count) in counts.items():
        yield own, start, stop, amounts * count


def _copy_pairs(columns: Columns, partition: Partition) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each edge class, which copies of its ends its edges join."""
    by_class = np.argsort(partition.node_class, kind="stable")
    starts = np.concatenate([[0], np.cumsum(partition.node_count)])
    number = np.empty(len(by_class), np.int64)
    number[by_class] = np.arange(len(by_class)) - starts[partition.node_class[by_class]]
    edges = np.argsort(partition.edge_class, kind="stable")
    ends = np.cumsum(partition.edge_count)[:-1]
    sources, targets = (np.split(number[end[edges]], ends) for end in (columns.source, columns.target))
    return list(zip(sources, targets, strict=True))
