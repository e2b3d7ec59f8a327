"""Labels that no optimal solution needs: those without support, and dominated ones (dead-end elimination).

A label is dominated by another that never costs more, whatever the neighbours do, and never takes more capacity
(Goldstein, Efficient rotamer elimination applied to protein side-chains, 1994):

    unary(y) - unary(x) + sum over factors of max over columns of (row of y - row of x) <= 0   =>   drop x.
"""

import numpy as np

from autoshard.solver.kernels import FAST, kernel
from autoshard.solver.reduce.network import Factor, Network

PAIRWISE_WORK = 20_000_000
"""Labels are compared pair by pair only while (labels^2 x factors) is at most this; else only those alike to others."""
DOMINANCE_WORK = 60_000_000
"""Row differences of a table are compared only while (rows^2 x columns) is at most this."""


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
    tables, places, num_rows = [], [], []
    place = 0
    for factor, table, _, _ in sides.values():
        differences = _row_differences(network, factor, table, factor.i == node)
        places.append(place)
        num_rows.append(0 if differences is None else len(differences))
        if differences is not None:
            tables.append(differences.ravel())
            place += differences.size
    network.memo[memo] = undominated(
        unary,
        np.array([demand.amounts for demand in network.demands[node]], np.float64).reshape(-1, count),
        np.array([own for _, _, own, _ in sides.values()], np.int64).reshape(-1, count),
        np.array([times for *_, times in sides.values()], np.float64),
        np.concatenate([*tables, np.zeros(0)]),
        np.array(places, np.int64),
        np.array(num_rows, np.int64),
        np.argsort(unary, kind="stable"),
    )
    return network.memo[memo]


@kernel()
def undominated(
    unary: np.ndarray,
    amounts: np.ndarray,
    rows: np.ndarray,
    times: np.ndarray,
    differences: np.ndarray,
    places: np.ndarray,
    num_rows: np.ndarray,
    order: np.ndarray,
) -> np.ndarray:
    """bool [labels]: those of a node that no other dominates; of equals the first stays.

    Args:
      unary: [labels] costs. amounts: [usages, labels] of capacity.
      rows: [factors, labels] the row of each label. times: [factors] how often each counts.
      differences: Of rows, of all factors; `places`: [factors] where those of each begin. num_rows: [factors] of
        each; 0 where rows are not compared, and only labels with the same one are.
      order: The labels as they are tried, the cheapest first.
    """
    labels = len(unary)
    keep = np.ones(labels, np.bool_)
    only_adds = True  # as of tidied tables, whose rows have a least entry of 0
    for difference in differences:
        if difference < 0.0:
            only_adds = False
            break
    for x in range(labels - 1, -1, -1):
        for y in order:
            if only_adds and unary[y] > unary[x]:
                break  # all that follow cost more as well
            if y == x or not keep[y]:
                continue
            takes_more = False
            for usage in range(len(amounts)):
                if amounts[usage, y] > amounts[usage, x]:
                    takes_more = True
                    break
            if takes_more:
                continue
            worse = unary[y] - unary[x]
            for factor in range(len(times)):
                own, other = rows[factor, x], rows[factor, y]
                if num_rows[factor]:
                    worse += times[factor] * differences[places[factor] + other * num_rows[factor] + own]
                elif own != other:
                    worse = np.inf
                if worse == np.inf or only_adds and worse > 0.0:
                    break
            if worse <= 0.0:
                keep[x] = False
                break
    return keep


def _row_differences(network: Network, factor: Factor, table: np.ndarray, is_source: bool) -> np.ndarray | None:
    """[a, a']: max over columns of table[a] - table[a'] where table[a'] is finite, inf where row a takes more of the
    capacity in some column; None if too much work. `is_source`: Whether the rows are of the factor's first node."""
    memo = ("differences", id(table), is_source, *(id(demand.amounts) for demand in factor.demands))
    if memo not in network.memo:
        rows, columns = table.shape
        result = None
        if rows * rows * columns <= DOMINANCE_WORK:
            result = row_differences(np.ascontiguousarray(table))
            for demand in factor.demands:
                amounts = demand.amounts if is_source else demand.amounts.T
                result[(amounts[:, None, :] > amounts[None, :, :]).any(axis=2)] = np.inf
        network.memo[memo] = result
    return network.memo[memo]


@kernel(FAST)
def row_differences(table: np.ndarray) -> np.ndarray:
    """[a, a']: max over columns of table[a] - table[a'] where table[a'] is finite; -inf where none is."""
    rows, columns = table.shape
    turned = np.ascontiguousarray(table.T)
    found = np.full((rows, rows), -np.inf)  # [a', a]: all rows are compared with one side by side, as vectors
    for other in range(rows):
        most = found[other]
        for column in range(columns):
            least = table[other, column]
            if np.isfinite(least):
                line = turned[column]
                for row in range(rows):
                    most[row] = max(most[row], line[row] - least)
    return np.ascontiguousarray(found.T)


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
