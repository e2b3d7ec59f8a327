"""Disjoint sets of factors: which indices of different operations are one index of a group."""

from collections.abc import Sequence

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from autoshard.graph.graph import Operation


def components(ends: Sequence[int], others: Sequence[int], count: int) -> list[int]:
    """For each of `count` nodes the number of its component, where each of `ends` is connected with one of `others`."""
    edges = coo_array(
        (np.ones(len(ends), bool), (np.array(ends, np.int32), np.array(others, np.int32))), (count, count)
    )
    return connected_components(edges, directed=False)[1].tolist()


class FactorSets:
    """Disjoint sets of the factors of all operations, in which two factors of one operation never meet.

    Factor f of operation o has the number `start[o] + f`. (`scipy.cluster.hierarchy.DisjointSet` knows no such
    condition.)
    """

    def __init__(self, operations: Sequence[Operation]):
        self.start: list[int] = []
        self.operation_of: list[int] = []
        for operation in operations:
            self.start.append(len(self.operation_of))
            self.operation_of += [operation.index] * len(operation.rule.factors)
        self.parent = list(range(len(self.operation_of)))
        self.operations_of: list[set[int] | None] = [None] * len(self.operation_of)
        """For each representative of several factors, the operations that they belong to."""

    def find(self, x: int) -> int:
        """The representative of the set of x."""
        parent = self.parent
        while parent[x] != x:
            parent[x] = x = parent[parent[x]]
        return x

    def would_clash(self, x: int, y: int) -> bool:
        """Whether two factors of one operation would meet if the sets of the representatives x and y became one."""
        mine, theirs = self.operations_of[x], self.operations_of[y]
        if mine is None:
            return (
                self.operation_of[x] in theirs if theirs is not None else self.operation_of[x] == self.operation_of[y]
            )
        return self.operation_of[y] in mine if theirs is None else not mine.isdisjoint(theirs)

    def join(self, x: int, y: int) -> None:
        """Makes one set of the sets of x and y, unless two factors of one operation would meet."""
        x, y = self.find(x), self.find(y)
        if x == y or self.would_clash(x, y):
            return
        mine, theirs = self.operations_of[x], self.operations_of[y]
        if mine is None or (theirs is not None and len(mine) < len(theirs)):  # the larger set stays
            x, y, mine, theirs = y, x, theirs, mine
        if mine is None:
            mine = {self.operation_of[x]}
        if theirs is None:
            mine.add(self.operation_of[y])
        else:
            mine |= theirs
        self.parent[y], self.operations_of[x], self.operations_of[y] = x, mine, None

    def join_all(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """Joins the pairs if each of them could be joined alone; returns whether that is so."""
        roots = [(self.find(x), self.find(y)) for x, y in pairs]
        for x, y in roots:
            if x != y and self.would_clash(x, y):
                return False
        for x, y in roots:
            if x != y:
                self.join(x, y)
        return True

    def labels(self) -> list[int]:
        """For every factor a number that only those of its set have."""
        return components(range(len(self.parent)), self.parent, len(self.parent))
