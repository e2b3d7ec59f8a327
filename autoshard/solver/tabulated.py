"""A problem's costs and usages laid end to end: what a vector of choices costs and takes, part by part, at once.

For looking at many solutions of one problem; `evaluate.py`, which shares no code with this, prices those that count.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from autoshard.solver.array_numbers import ArrayNumbers
from autoshard.solver.problem import Edge, Node, Problem
from autoshard.solver.reduce.columns import Columns, columns_of, summed_over_time


class Tables:
    """One table for each owner, equal tables stored once."""

    def __init__(self, tables: Iterable[np.ndarray], dtype: type = np.float64) -> None:
        """Takes one array for each owner, of any shape, which must outlive this call."""
        numbers = ArrayNumbers(dtype)
        own = np.fromiter((numbers.of(table) for table in tables), np.int64)
        self._values, start = numbers.joined()
        self._start = start[own]

    def at(self, index: np.ndarray) -> np.ndarray:
        """The entry of every owner's table, row-major; `index`: int64 [owners]."""
        return self._values[self._start + index]


class Tabulated:
    """The structure of a problem, in columns: its edges' classes, and what each usage takes.

    Attributes:
      columns: Of the problem.
      num_nodes, num_owners: Nodes; nodes and edges together. Owner i is node i, owner `num_nodes + e` is edge e.
    """

    def __init__(self, problem: Problem) -> None:
        """Looks at each node, edge and usage once."""
        edges, pairs = problem.edges, problem.edge_usages
        self.columns: Columns = columns_of(problem)
        self.num_nodes, self.num_owners = len(problem.nodes), len(problem.nodes) + len(edges)
        self._source_class = Tables((e.source_class for e in edges), np.int64)
        self._target_class = Tables((e.target_class for e in edges), np.int64)
        self._width = np.fromiter((e.costs.shape[1] for e in edges), np.int64)
        self._amounts = Tables(u.amounts for u in problem.usages)
        self._pair_amounts = Tables(u.amounts for u in pairs)

    def entries(self, choices: np.ndarray) -> np.ndarray:
        """Which entry of each edge's table is taken; int64 [edges]. choices: int64 [nodes]."""
        columns = self.columns
        rows = self._source_class.at(choices[columns.source])
        return rows * self._width + self._target_class.at(choices[columns.target])

    def costs(self, tables: "CostTables", choices: np.ndarray) -> np.ndarray:
        """What each owner costs by `tables`; float64 [owners]."""
        return np.concatenate([tables.nodes.at(choices), tables.edges.at(self.entries(choices))])

    def taken(self, choices: np.ndarray) -> "Taken":
        """What each usage takes."""
        columns = self.columns
        return Taken(
            self._amounts.at(choices[columns.usage_owner]),
            self._pair_amounts.at(self.entries(choices)[columns.pair_owner]),
        )

    def usage(self, taken: "Taken") -> np.ndarray:
        """What is used at each instant; float64 [instants]."""
        return summed_over_time(self.columns, taken.by_nodes, taken.by_edges)

    def used_by(self, taken: "Taken", instant: int) -> np.ndarray:
        """What each owner uses at an instant; float64 [owners]."""
        columns = self.columns
        live = (columns.usage_start <= instant) & (instant < columns.usage_stop)
        pairs = (columns.pair_start <= instant) & (instant < columns.pair_stop)
        own = np.bincount(columns.usage_owner[live], taken.by_nodes[live], self.num_owners)
        owners = self.num_nodes + columns.pair_owner[pairs]
        return own + np.bincount(owners, taken.by_edges[pairs], self.num_owners)


@dataclasses.dataclass(frozen=True, slots=True)
class CostTables:
    """The costs of a problem."""

    nodes: Tables
    edges: Tables


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """What usages take of the capacity: float64 [usages], and float64 [edge usages]."""

    by_nodes: np.ndarray
    by_edges: np.ndarray


def cost_tables(nodes: Sequence[Node], edges: Sequence[Edge]) -> CostTables:
    """The tables of nodes and edges."""
    return CostTables(Tables(node.costs for node in nodes), Tables(edge.costs for edge in edges))
