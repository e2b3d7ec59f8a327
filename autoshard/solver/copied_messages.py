"""Bounds from partitions that prove nothing by themselves: messages of a few classes, given to every copy.

Layers that hang on one another in a chain, without a common neighbour, are told apart from both ends, however many
there are; classes of copies that see the same up to a few edges away are then not equitable, and the problem quotient
by them bounds nothing. Its messages and prices are good ones all the same: they only are not exactly right where copies
of a class differ, near the ends of the chain and of what is alive at an instant. Any messages prove a bound of the
whole problem, so every copy takes those of its class, and a few sweeps over the whole problem mend the ends.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from autoshard.solver.bound.dual_ascent import DualAscent
from autoshard.solver.factor_graph import (
    FactorGraph,
    factor_graph_of,
    message_count,
    ranges,
    table_entries,
    with_costs,
)
from autoshard.solver.problem import Problem
from autoshard.solver.reduce.columns import differ_in_costs_alone
from autoshard.solver.reduce.network import InternPool, Network
from autoshard.solver.reduce.quotient import Quotient
from autoshard.solver.search import Search

SWEEPS, CHUNK = 40, 4
"""Most pairs of sweeps over the whole problem, and between two looks at the bound."""
WORTHWHILE, WORTH_A_SHARE = 0.02, 0.1
"""Sweeping goes on while a chunk closes this share of the gap; and without a solution, this share of the gap wanted; as
long as the bound is farther below that of the tied problem."""


@dataclasses.dataclass(frozen=True, slots=True)
class MessageEnds:
    """Where the messages at both ends of every edge of a problem begin, for a network that nothing has changed.

    Attributes:
      source, target: int64 [m]; the first entry in a message array. rows, columns: int64 [m]; how many there are.
    """

    source: np.ndarray
    target: np.ndarray
    rows: np.ndarray
    columns: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class _Laid:
    """The whole problem laid out for message passing.

    Attributes:
      problem, graph: Whose graph. instants: int64 [T]; the original ones.
      edge: int64 [m]; of each factor. ends: Where messages of edges begin.
    """

    problem: Problem
    graph: FactorGraph
    instants: np.ndarray
    edge: np.ndarray
    ends: MessageEnds


class WholeBound:
    """Proves bounds of whole problems. What is laid out of one serves others that differ in their costs alone."""

    def __init__(self) -> None:
        """Nothing is laid out before it is needed."""
        self._laid: _Laid | None = None

    def prove(
        self, search: Search, quotient: Quotient, tied: DualAscent, prices: Mapping[int, float]
    ) -> tuple[np.ndarray, ...]:
        """Proves a bound by what an ascent found for the tied problem of a quotient.

        Args:
          search: Is told the bound. quotient: Whose tied problem was climbed, nothing having been changed in it.
          tied: The ascent. prices: Of capacity, by instant of the whole problem.

        Returns:
          The choices of all nodes that were decoded on the way, int64 [n] each. A quotient by classes that are not
          equitable has choices that are no copies' best: those of the whole problem come closer to the bound.
        """
        if not np.isfinite(tied.messages).all():  # what is forbidden leaves nothing to share
            return ()
        self._laid = laid = _laid_out(search.problem, self._laid)
        own_prices = np.zeros(len(laid.graph.capacity))
        for instant, price in prices.items():
            own_prices[np.searchsorted(laid.instants, instant, side="right") - 1] += price
        messages = np.zeros(message_count(laid.graph))
        share_messages(search.problem, quotient, tied, laid.ends, messages)
        ascent = DualAscent(laid.graph, own_prices, messages)
        done = 0
        while done < SWEEPS and search.goes_on(done):
            before = ascent.bound
            done += ascent.climb(CHUNK, search.objective, np.inf, -np.inf)
            search.budget.spend(3 * CHUNK * table_entries(laid.graph))
            search.prove(ascent.bound, "copied messages")
            search.price_capacity(float(ascent.prices.sum()), ascent.bound)
            enough = WORTH_A_SHARE * search.options.wanted_gap * abs(ascent.bound)
            if np.isfinite(search.objective):
                enough = WORTHWHILE * (search.objective - ascent.bound)
            if ascent.bound - before < enough or tied.bound - ascent.bound < enough:
                break  # where copies differ is mended: the classes bound about as much
        return tuple(ascent.decoded)


def _laid_out(problem: Problem, before: _Laid | None) -> _Laid:
    """A problem laid out: from the beginning, or with the costs that are its own."""
    if before is not None and problem is before.problem:
        return before
    if before is not None and differ_in_costs_alone(problem, before.problem):
        pool, edges = InternPool(), [problem.edges[number] for number in before.edge.tolist()]
        tables = [(e.source > e.target, pool.intern(e.costs)) for e in edges]
        turned = [pool.transposed(table) if is_turned else table for is_turned, table in tables]
        graph = with_costs(before.graph, [node.costs for node in problem.nodes], turned)
        return dataclasses.replace(before, problem=problem, graph=graph)
    network = Network(problem)
    graph, _ = factor_graph_of(network)
    return _Laid(problem, graph, network.instants, _edges_of_factors(problem), message_ends(problem, graph))


def _edges_of_factors(problem: Problem) -> np.ndarray:
    """The edge of each factor of the untouched network, int64 [m]: `factor_graph_of` sorts them by their nodes."""
    source = np.array([edge.source for edge in problem.edges], np.int64)
    target = np.array([edge.target for edge in problem.edges], np.int64)
    return np.lexsort((np.maximum(source, target), np.minimum(source, target)))


def message_ends(problem: Problem, graph: FactorGraph) -> MessageEnds:
    """The messages of every edge of `problem` in the graph of its untouched network."""
    edge_of_factor = _edges_of_factors(problem)
    is_forward = np.array([edge.source < edge.target for edge in problem.edges], bool)
    factor = np.empty(len(edge_of_factor), np.int64)
    factor[edge_of_factor] = np.arange(len(edge_of_factor))
    low, high = graph.source_message[factor], graph.target_message[factor]
    rows, columns = graph.rows[factor], graph.columns[factor]
    return MessageEnds(
        np.where(is_forward, low, high),
        np.where(is_forward, high, low),
        np.where(is_forward, rows, columns),
        np.where(is_forward, columns, rows),
    )


def share_messages(
    problem: Problem, quotient: Quotient, tied: DualAscent, ends: MessageEnds, messages: np.ndarray
) -> None:
    """Writes into `messages`, for every edge of `problem`, whose are at `ends`, its share of those of its class.

    What joins two copies of one class has none.
    """
    partition, own = quotient.partition, message_ends(quotient.tied, tied.graph)
    first = [problem.edges[edge] for edge in partition.first_edge.tolist()]
    is_loop = np.array([partition.node_class[e.source] == partition.node_class[e.target] for e in first], bool)
    number = np.where(is_loop, -1, np.cumsum(~is_loop) - 1)  # of each edge class, its place in the tied problem
    of_edge = number[partition.edge_class]
    shared = np.flatnonzero(of_edge >= 0)
    of_edge = of_edge[shared]
    share = 1.0 / partition.edge_count[partition.edge_class[shared]]
    for mine, theirs, count in (
        (ends.source[shared], own.source[of_edge], own.rows[of_edge]),
        (ends.target[shared], own.target[of_edge], own.columns[of_edge]),
    ):
        messages[ranges(mine, count)] = np.repeat(share, count) * tied.messages[ranges(theirs, count)]
