"""A problem in which every node chooses among what some known solutions choose."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autoshard.solver.problem import Edge, EdgeUsage, Node, Problem, Usage


@dataclasses.dataclass(frozen=True, slots=True)
class Among:
    """A part of a problem.

    Attributes:
      problem: With fewer choices. labels: Of each node, int64; its choices in the whole problem, rising.
    """

    problem: Problem
    labels: tuple[np.ndarray, ...]

    def whole(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Choices of the part as choices of the whole problem."""
        return tuple(int(own[choice]) for own, choice in zip(self.labels, choices, strict=True))


def among(problem: Problem, solutions: Sequence[Sequence[int]]) -> Among:
    """The part of `problem` in which each node has the choices that it has in one of `solutions`."""
    labels = tuple(np.unique(column) for column in np.array(solutions, np.int64).T)
    made: dict[tuple[int, bytes], np.ndarray] = {}

    def part(whole: np.ndarray, own: np.ndarray) -> np.ndarray:  # equal parts are one object, as equal wholes are
        return made.setdefault((id(whole), own.tobytes()), whole[own])

    nodes = [Node(node.name, part(node.costs, own)) for node, own in zip(problem.nodes, labels, strict=True)]
    edges = [
        Edge(
            e.source, e.target, part(e.source_class, labels[e.source]), part(e.target_class, labels[e.target]), e.costs
        )
        for e in problem.edges
    ]
    usages = [Usage(u.node, u.start, u.stop, part(u.amounts, labels[u.node])) for u in problem.usages]
    pairs: tuple[EdgeUsage, ...] = problem.edge_usages
    return Among(Problem(tuple(nodes), tuple(edges), tuple(usages), pairs, problem.capacity), labels)
