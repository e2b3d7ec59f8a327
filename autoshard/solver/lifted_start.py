"""What a search over folded copies leaves to the next: instants that bind, their prices, and messages.

Problems that are solved one after another often have the same nodes and edges, and other costs or another capacity;
and within one search, more and more instants tell copies apart. What was found for one partition is a good start for
the next: every class takes the messages of the class that its first copy was in.
"""

from collections.abc import Mapping

import numpy as np

from autoshard.solver.copied_messages import WholeBound
from autoshard.solver.factor_graph import FactorGraph, message_count, ordered_factors
from autoshard.solver.problem import Problem
from autoshard.solver.reduce.columns import Columns, columns_like, columns_of, differ_in_costs_alone
from autoshard.solver.reduce.network import Factor, Network
from autoshard.solver.reduce.quotient import Quotient


class LiftedStart:
    """Where a search over folded copies begins. For problems with the same nodes, edges and usages.

    Attributes:
      prices: Latest price of each instant that counted, by instant of the whole problem.
      binding: The instants that had a price at last, or are to count from the beginning.
      whole: Proves bounds of the whole problems.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.prices: dict[int, float] = {}
        self.binding: set[int] = set()
        self.whole = WholeBound()
        self._class_of: np.ndarray | None = None
        self._solved: tuple[Problem, Columns] | None = None
        self._messages: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def is_like(self, problem: Problem) -> bool:
        """Whether a problem differs in its costs alone from the one that was solved last."""
        return self._solved is not None and differ_in_costs_alone(problem, self._solved[0])

    def columns(self, problem: Problem) -> Columns:
        """The columns of a problem that is to be solved."""
        if self._solved is None or problem is not self._solved[0]:
            known = None if self._solved is None or not self.is_like(problem) else self._solved[1]
            self._solved = problem, columns_of(problem) if known is None else columns_like(problem, known)
        return self._solved[1]

    def price(self, prices: Mapping[int, float]) -> None:
        """Takes the prices of all instants that count."""
        self.prices.update(prices)
        self.binding = {instant for instant, price in prices.items() if price > 0}

    def restart(self, prices: Mapping[int, float]) -> None:
        """Takes prices that were found elsewhere in place of all others."""
        self.prices = {}
        self.price(prices)

    def keep(self, quotient: Quotient, network: Network, graph: FactorGraph, messages: np.ndarray) -> None:
        """Takes the messages of a lifted problem.

        Args:
          quotient: Of which the problem is a part. network, graph: The problem as it was solved.
          messages: Of `graph`.
        """
        self._class_of = quotient.partition.node_class
        self._messages = {
            (factor.i, factor.j): (messages[one] / count, messages[other] / count)
            for factor, one, other, count in _ends(network, graph)
        }

    def messages(self, quotient: Quotient, network: Network, graph: FactorGraph) -> np.ndarray:
        """Messages for a lifted problem to begin with; arguments as for `keep`."""
        found = np.zeros(message_count(graph))
        if self._class_of is None:
            return found
        first = self._class_of[quotient.partition.first_node].tolist()
        for factor, one, other, count in _ends(network, graph):
            i, j = first[factor.i], first[factor.j]
            known = self._messages.get((i, j)) or self._messages.get((j, i), ())[::-1]
            if not known or (len(known[0]), len(known[1])) != (one.stop - one.start, other.stop - other.start):
                continue
            if np.isfinite(known[0]).all() and np.isfinite(known[1]).all():
                found[one], found[other] = count * known[0], count * known[1]
        return found


def _ends(network: Network, graph: FactorGraph) -> list[tuple[Factor, slice, slice, int]]:
    """Each factor, where the messages of its two ends stand, and how many copies it has."""
    return [
        (factor, slice(source, source + rows), slice(target, target + columns), network.factor_multiplicity(factor))
        for factor, source, target, rows, columns in zip(
            ordered_factors(network),
            graph.source_message.tolist(),
            graph.target_message.tolist(),
            graph.rows.tolist(),
            graph.columns.tolist(),
            strict=True,
        )
    ]
