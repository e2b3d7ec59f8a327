"""The solver's working copy of a problem: arrays that presolve may shrink, and a stack that leads back (postsolve).

A `Network` holds, for every node still undecided, the labels that remain (original choice indices), their unary costs
and their capacity usages; and for every remaining pair of nodes a factor: a table over classes of labels. Arrays are
*interned*: equal content is the same object, so that work done once for a layer is looked up for its copies by
identity. Nothing here searches; `presolve.py` simplifies, `factor_graph.py` lays the rest out for compiled kernels.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from autoshard.solver.evaluate import CAPACITY_TOLERANCE
from autoshard.solver.problem import Problem, Usage


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """Capacity taken during instants `start <= t < stop`; amounts per label (node) or per class pair (factor)."""

    start: int
    stop: int
    amounts: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class CopyPairs:
    """Pairs (copy of i, copy of j), one for each copy of a factor, in rising order; int64 each."""

    i: np.ndarray
    j: np.ndarray

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CopyPairs) and np.array_equal(self.i, other.i) and np.array_equal(self.j, other.j)

    @classmethod
    def of(cls, i: np.ndarray, j: np.ndarray) -> "CopyPairs":
        """The pairs, sorted."""
        order = np.lexsort((j, i))
        return cls(i[order], j[order])


@dataclasses.dataclass(slots=True)
class Factor:
    """A pairwise cost: `table[map_i[x_i], map_j[x_j]]` for labels x_i, x_j of nodes i < j, with its usages.

    In a lifted network (`Network.multiplicity`), `copy_pairs` tells which copies of i and j each of its copies joins.
    """

    i: int
    j: int
    map_i: np.ndarray
    map_j: np.ndarray
    table: np.ndarray
    demands: list[Demand]
    copy_pairs: CopyPairs | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Elimination:
    """How to choose for a node that left: least unary + tables against its neighbours at that time.

    `labels` are the node's choices then; each link is (neighbour, its labels then, their classes, own classes, table
    with the own class on the rows).
    """

    node: int
    labels: np.ndarray
    unary: np.ndarray
    links: tuple[tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray], ...]


class InternPool:
    """Keeps one copy of arrays with equal content, so that identity can be used as a key."""

    def __init__(self) -> None:
        self._by_content: dict[tuple, np.ndarray] = {}
        self._canonical: dict[int, np.ndarray] = {}
        self._kept_alive: list[np.ndarray] = []
        self._transposed: dict[int, np.ndarray] = {}

    def intern(self, array: np.ndarray, dtype: type = np.float64) -> np.ndarray:
        """Returns the pool's copy of `array` as `dtype`; the argument must not be changed afterwards."""
        known = self._canonical.get(id(array))
        if known is not None:
            return known
        plain = np.ascontiguousarray(array, dtype=dtype)
        if dtype is np.float64:
            plain = plain + 0.0  # -0.0 and 0.0 are one number; a copy, so that callers may change theirs
        key = (plain.shape, plain.dtype.char, plain.tobytes())
        known = self._by_content.setdefault(key, plain)
        for alias in (array, known):
            if id(alias) not in self._canonical:
                self._canonical[id(alias)] = known
                self._kept_alive.append(alias)
        return known

    def transposed(self, table: np.ndarray) -> np.ndarray:
        """The pool's copy of the transpose of an interned table."""
        key = id(table)
        if key not in self._transposed:
            self._transposed[key] = self.intern(np.ascontiguousarray(table.T))
        return self._transposed[key]


class Network:
    """See the module's docstring. Attributes are plain; only this room's own modules use them.

    A *lifted* network has a node for each class of copies, with the costs of one of them, and `multiplicity` tells how
    many they are. Presolve then does only what could be done to each copy alone; costs and amounts are multiplied
    where they leave it: in `constant`, `capacity` and `factor_graph.py`.
    """

    def __init__(self, problem: Problem, like: "Network | None" = None) -> None:
        self.pool = InternPool() if like is None else like.pool
        self.memo: dict[tuple, Any] = {} if like is None else like.memo
        self.constant = 0.0
        self.is_cut_by_capacity = False
        self.infeasible = False
        self.postsolve_stack: list[Elimination] = []
        self.multiplicity: np.ndarray | None = None
        count = len(problem.nodes)
        self.labels: list[np.ndarray] = [self._range(len(node.costs)) for node in problem.nodes]
        self.unary: list[np.ndarray] = [self.pool.intern(node.costs) for node in problem.nodes]
        self.demands: list[list[Demand]] = [[] for _ in range(count)]
        self.alive = [True] * count
        self.factors: dict[int, Factor] = {}
        self.incident: list[dict[int, None]] = [{} for _ in range(count)]
        self.next_factor = 0
        self.capacity = np.zeros(0)
        self.instants = np.zeros(0, np.int64)
        """Original instant of each remaining one."""
        factor_of: dict[int, Factor] = {}
        for index, edge in enumerate(problem.edges):
            factor_of[index] = self._oriented(
                edge.source, edge.target, edge.source_class, edge.target_class, edge.costs
            )
        if problem.capacity is not None:
            self._take_usages(problem, problem.capacity, factor_of)
        for factor in factor_of.values():
            self.attach(factor)

    def attach(self, factor: Factor) -> int:
        """Adds a factor and returns its key."""
        key = self.next_factor
        self.next_factor += 1
        self.factors[key] = factor
        self.incident[factor.i][key] = None
        self.incident[factor.j][key] = None
        return key

    def lift(
        self, problem: Problem, multiplicity: np.ndarray, copy_pairs: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> None:
        """Makes this, the untouched network of `problem`, a lifted one.

        Args:
          multiplicity: How many copies each node stands for.
          copy_pairs: For each edge, which copies of (source, target) it joins.
        """
        self.multiplicity = multiplicity
        for factor, edge, (source, target) in zip(self.factors.values(), problem.edges, copy_pairs, strict=True):
            factor.copy_pairs = CopyPairs.of(*((source, target) if edge.source < edge.target else (target, source)))

    def factor_multiplicity(self, factor: Factor) -> int:
        """How many copies of a factor there are."""
        return 1 if factor.copy_pairs is None else len(factor.copy_pairs.i)

    def times(self, factor: Factor, node: int) -> int:
        """How many copies of a factor each copy of one of its nodes has."""
        return 1 if self.multiplicity is None else self.factor_multiplicity(factor) // int(self.multiplicity[node])

    def detach(self, key: int) -> Factor:
        """Removes a factor and returns it."""
        factor = self.factors.pop(key)
        del self.incident[factor.i][key]
        del self.incident[factor.j][key]
        return factor

    def postsolve(self, choices: dict[int, int]) -> tuple[int, ...]:
        """Extends original choices of the remaining nodes to all nodes, undoing the stack from its top."""
        result = dict(choices)
        for step in reversed(self.postsolve_stack):
            cost = step.unary
            for neighbour, labels, classes, own, table in step.links:
                position = int(np.searchsorted(labels, result[neighbour]))
                cost = cost + table[own, classes[position]]
            result[step.node] = int(step.labels[int(np.argmin(cost))])
        return tuple(result[node] for node in range(len(self.labels)))

    def postsolve_labels(self, nodes: np.ndarray, labels: np.ndarray) -> tuple[int, ...]:
        """Original choices of all nodes, from local labels (positions among those that remain) of the given nodes."""
        return self.postsolve({int(n): int(self.labels[n][label]) for n, label in zip(nodes, labels, strict=True)})

    def _range(self, count: int) -> np.ndarray:
        return self.pool.intern(np.arange(count), np.int64)

    def _oriented(self, i: int, j: int, map_i: np.ndarray, map_j: np.ndarray, table: np.ndarray) -> Factor:
        map_i, map_j = self.pool.intern(map_i, np.int64), self.pool.intern(map_j, np.int64)
        table = self.pool.intern(table)
        if i < j:
            return Factor(i, j, map_i, map_j, table, [])
        return Factor(j, i, map_j, map_i, self.pool.transposed(table), [])

    def from_side(self, factor: Factor, node: int) -> tuple[np.ndarray, np.ndarray]:
        """(table with the node's classes on the rows, the node's class map)."""
        if factor.i == node:
            return factor.table, factor.map_i
        return self.pool.transposed(factor.table), factor.map_j

    def _take_usages(self, problem: Problem, capacity: float, factor_of: dict[int, Factor]) -> None:
        """Numbers the instants 0.. (one per start) and hangs every usage on its node or factor."""
        usages = [usage for usage in (*problem.usages, *problem.edge_usages) if usage.start < usage.stop]
        if not usages:
            if capacity < 0:
                self.infeasible = True
            return
        starts = np.array([usage.start for usage in usages], np.int64)
        self.instants = np.unique(starts)
        self.capacity = np.full(len(self.instants), capacity * (1 + CAPACITY_TOLERANCE))
        begins = np.searchsorted(self.instants, starts).tolist()
        ends = np.searchsorted(self.instants, np.array([usage.stop for usage in usages], np.int64)).tolist()
        for usage, start, stop in zip(usages, begins, ends, strict=True):
            amounts = self.pool.intern(usage.amounts)
            if isinstance(usage, Usage):
                self.demands[usage.node].append(Demand(start, stop, amounts))
                continue
            edge = problem.edges[usage.edge]
            if edge.source > edge.target:
                amounts = self.pool.transposed(amounts)
            factor_of[usage.edge].demands.append(Demand(start, stop, amounts))
