"""Labels that no optimal solution needs: those without support, and dominated ones (dead-end elimination).

A label is dominated by another that never costs more, whatever the neighbours do, and never takes more capacity
(Goldstein, Efficient rotamer elimination applied to protein side-chains, 1994):

    unary(y) - unary(x) + sum over factors of max over columns of (row of y - row of x) <= 0   =>   drop x.
"""

import numpy as np

from autoshard.solver.reduce.network import Network

PAIRWISE_WORK = 20_000_000
"""Labels are compared pair by pair only while (labels^2 x factors) is at most this; else only those alike to others."""
DOMINANCE_WORK = 60_000_000
"""Row differences of a table are compared only while (rows^2 x columns) is at most this."""

AT_ONCE = 20_000
"""So many entries of row differences are made at once."""


def supported_labels(network: Network, node: int) -> np.ndarray:
    """bool [labels]: those with a finite cost and a finite row in every factor."""
    keep = np.isfinite(network.unary[node])
    for key in network.incident[node]:
        factor = network.factors[key]
        table, own = network.from_side(factor, node)
        memo = ("supported", id(table))
        if memo not in network.memo:
            rows = np.isfinite(table).any(axis=1)
            network.memo[memo] = None if rows.all() else rows
        rows = network.memo[memo]
        if rows is not None:
            keep = keep & rows[own]
    return keep


def undominated_labels(network: Network, node: int) -> np.ndarray:
    """bool [labels]: those that no other dominates; of equals the first stays."""
    count = len(network.labels[node])
    sides: dict[tuple, list] = {}  # alike factors count together: a hub has hundreds
    for key in network.incident[node]:
        factor = network.factors[key]
        table, own = network.from_side(factor, node)
        demands = tuple(id(demand.amounts) for demand in factor.demands)
        alike = (id(table), id(own), factor.i == node, demands)
        sides.setdefault(alike, [factor, table, own, 0])[3] += network.times(factor, node)
    parts = frozenset((alike, times) for alike, (_, _, _, times) in sides.items())
    memo = ("undominated", id(network.unary[node]), parts, *(id(r.amounts) for r in network.demands[node]))
    if memo in network.memo:
        return network.memo[memo]
    unary = network.unary[node]
    if count * count * max(len(sides), 1) > PAIRWISE_WORK:
        columns = [own for _, _, own, _ in sides.values()]
        amounts = [demand.amounts for demand in network.demands[node]]
        network.memo[memo] = _cheapest_of_alike(unary, columns, amounts)
        return network.memo[memo]
    worse = unary[:, None] - unary[None, :]  # [y, x]: how much more y can cost than x
    possible = np.ones((count, count), bool)
    for demand in network.demands[node]:
        possible &= demand.amounts[:, None] <= demand.amounts[None, :]
    for factor, table, own, times in sides.values():
        difference = _row_differences(network, table)
        if difference is None:
            possible &= own[:, None] == own[None, :]
            continue
        worse += times * _at(difference, own)
        for demand in factor.demands:
            amounts = demand.amounts if factor.i == node else demand.amounts.T
            less = (amounts[:, None, :] <= amounts[None, :, :]).all(axis=2)
            possible &= _at(less, own)
    dominates = possible & (worse <= 0)
    np.fill_diagonal(dominates, False)
    keep = np.ones(count, bool)
    for x in np.flatnonzero(dominates.any(axis=0))[::-1].tolist():  # of equals the first stays
        if (dominates[:, x] & keep).any():
            keep[x] = False
    network.memo[memo] = keep
    return keep


def _at(square: np.ndarray, own: np.ndarray) -> np.ndarray:
    """[y, x]: the entry of a matrix over rows of a table for each pair of labels, which have the rows `own`."""
    return square.take(own, axis=0).take(own, axis=1)


def _row_differences(network: Network, table: np.ndarray) -> np.ndarray | None:
    """[a, a']: max over columns of table[a] - table[a'] where table[a'] is finite; None if too much work."""
    memo = ("differences", id(table))
    if memo not in network.memo:
        rows, columns = table.shape
        if rows * rows * columns > DOMINANCE_WORK:
            network.memo[memo] = None
        else:
            result = np.empty((rows, rows))
            finite = np.isfinite(table)
            safe = table if finite.all() else np.where(finite, table, 0.0)
            several = max(AT_ONCE // table.size, 1)
            for first in range(0, rows, several):
                own = slice(first, first + several)
                more = table[own, None, :] - safe
                result[own] = (more if safe is table else np.where(finite, more, -np.inf)).max(axis=2)
            network.memo[memo] = result
    return network.memo[memo]


def _cheapest_of_alike(unary: np.ndarray, classes: list[np.ndarray], amounts: list[np.ndarray]) -> np.ndarray:
    """bool [labels]: of labels with equal classes in every factor and equal usages, only the (first) cheapest."""
    alike = np.zeros(len(unary), np.int64)
    for column in (*classes, *amounts):
        numbers = np.unique(column, return_inverse=True)[1]
        alike = np.unique(alike * (int(numbers.max()) + 1) + numbers, return_inverse=True)[1]
    order = np.lexsort((np.arange(len(unary)), unary, alike))
    first = np.ones(len(unary), bool)
    first[1:] = alike[order][1:] != alike[order][:-1]
    keep = np.zeros(len(unary), bool)
    keep[order[first]] = True
    return keep
