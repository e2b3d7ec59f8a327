"""Message passing: compiled kernels that raise a lower bound by moving cost between factors and nodes.

The state is a *reparametrisation*, an equal problem with the cost spread differently. With prices p_t >= 0 per unit of
capacity and messages m (one number per class at each end of a factor) it has

    node costs     theta_i(x)    = cost_i(x) + sum_records price(record) amount(x) + sum_factors m_(f,i)(class(x))
    factor costs   theta_f(a, b) = table_f(a, b) + sum_records price(record) amount(a, b) - m_(f,s)(a) - m_(f,t)(b)

where price(record) is the sum of p over its instants. For every p and m

    bound = sum_i min theta_i + sum_f min theta_f - sum_t p_t capacity_t   <=   the cost of every feasible solution.

A sweep visits nodes in order (TRW-S of Kolmogorov 2006, written on the factors' reparametrisation as in his SRMP of
2014): the node collects all cost that the factors towards nodes already visited can give, then spreads its own over
the factors towards nodes still to come. The sum never falls, and after a sweep every factor has minimum 0, so that the
bound is the sum of node minima. A factor sees a node through classes, hence what can be spread to it is the minimum
over each class; it is spread one factor after the other so that what one factor's classes cannot carry the next may.
"""

import numba
import numpy as np

from autoshard.solver.bound.flat import Flat

FAST = {"nnan", "nsz", "reassoc", "contract"}
"""Lets minima and sums be vectorised. Infinities stay legal; NaN never arises (only finite numbers are subtracted)."""


@numba.njit(cache=True, nogil=True)
def running_sum(values: np.ndarray) -> np.ndarray:
    """float64 [n + 1]: 0 and the sums of the first 1, 2, .. n values. (Compiles faster than numpy's.)"""
    result = np.zeros(len(values) + 1)
    for index in range(len(values)):
        result[index + 1] = result[index] + values[index]
    return result


@numba.njit(cache=True, nogil=True)
def price_unary(flat: Flat, prices: np.ndarray, unary: np.ndarray) -> None:
    """unary[label] = cost + price of the label's usages. Arguments: prices float64 [T]; unary float64 [L], written."""
    running = running_sum(prices)
    for i in range(len(flat.label_start) - 1):
        first, count = flat.label_start[i], flat.label_start[i + 1] - flat.label_start[i]
        for k in range(count):
            unary[first + k] = flat.unary[first + k]
        for r in range(flat.usage_start[i], flat.usage_start[i + 1]):
            price = running[flat.usage_last[r]] - running[flat.usage_first[r]]
            if price != 0.0:
                base = flat.usage_amounts[r]
                for k in range(count):
                    unary[first + k] += price * flat.amounts[base + k]


@numba.njit(cache=True, nogil=True)
def price_tables(flat: Flat, prices: np.ndarray, tables: np.ndarray) -> None:
    """Writes the priced tables of factors with usages into `tables` (float64, laid out as flat.tables)."""
    running = running_sum(prices)
    for f in range(len(flat.source)):
        if flat.pair_start[f] == flat.pair_start[f + 1]:
            continue
        place, size = flat.table[f], flat.rows[f] * flat.columns[f]
        for k in range(size):
            tables[place + k] = flat.tables[place + k]
        for r in range(flat.pair_start[f], flat.pair_start[f + 1]):
            price = running[flat.pair_last[r]] - running[flat.pair_first[r]]
            if price != 0.0:
                base = flat.pair_amounts[r]
                for k in range(size):
                    tables[place + k] += price * flat.amounts[base + k]


@numba.njit(cache=True, nogil=True)
def node_costs(flat: Flat, unary: np.ndarray, messages: np.ndarray, theta: np.ndarray) -> None:
    """theta = priced unary costs + messages, computed afresh (sweeps update it and gather rounding errors)."""
    theta[:] = unary
    for f in range(len(flat.source)):
        for node, start, place in (
            (flat.source[f], flat.source_map[f], flat.source_message[f]),
            (flat.target[f], flat.target_map[f], flat.target_message[f]),
        ):
            first = flat.label_start[node]
            for k in range(flat.label_start[node + 1] - first):
                theta[first + k] += messages[place + flat.classes[start + k]]


@numba.njit(cache=True, nogil=True, fastmath=FAST)
def _collect(flat, tables, messages, theta, f, at_target, scratch):
    """Sets the message at one end of factor f so that every row of theta_f on that side has minimum 0."""
    rows, columns, place = flat.rows[f], flat.columns[f], flat.table[f]
    source, target = flat.source_message[f], flat.target_message[f]
    if at_target:
        for b in range(columns):
            scratch[b] = np.inf
        for a in range(rows):
            given = messages[source + a]
            line = place + a * columns
            for b in range(columns):
                scratch[b] = min(scratch[b], tables[line + b] - given)
        node, start, own, count = flat.target[f], flat.target_map[f], target, columns
    else:
        for a in range(rows):
            best = np.inf
            line = place + a * columns
            for b in range(columns):
                best = min(best, tables[line + b] - messages[target + b])
            scratch[a] = best
        node, start, own, count = flat.source[f], flat.source_map[f], source, rows
    for c in range(count):
        new = scratch[c]
        scratch[c] = new - messages[own + c]
        messages[own + c] = new
    first = flat.label_start[node]
    for k in range(flat.label_start[node + 1] - first):
        theta[first + k] += scratch[flat.classes[start + k]]


@numba.njit(cache=True, nogil=True, fastmath=FAST)
def _spread(flat, messages, theta, f, from_source, weight, scratch):
    """Moves `weight` of the node's minimum over each class from the node into factor f."""
    if from_source:
        node, start, own, count = flat.source[f], flat.source_map[f], flat.source_message[f], flat.rows[f]
    else:
        node, start, own, count = flat.target[f], flat.target_map[f], flat.target_message[f], flat.columns[f]
    for c in range(count):
        scratch[c] = np.inf
    first = flat.label_start[node]
    labels = flat.label_start[node + 1] - first
    for k in range(labels):
        c = flat.classes[start + k]
        scratch[c] = min(scratch[c], theta[first + k])
    for c in range(count):
        scratch[c] *= weight
        messages[own + c] -= scratch[c]
    for k in range(labels):
        theta[first + k] -= scratch[flat.classes[start + k]]


@numba.njit(cache=True, nogil=True)
def sweep(
    flat: Flat,
    tables: np.ndarray,
    messages: np.ndarray,
    theta: np.ndarray,
    forward: bool,
    scratch: np.ndarray,
    labels: np.ndarray,
) -> float:
    """One sweep over all nodes, and a decoding on the way.

    Decoding: each node takes the label that is best given the labels of the nodes already visited exactly and the
    messages from the rest.

    Args:
      tables: priced tables. messages, theta: the state, updated.
      forward: nodes in rising order if True, falling otherwise. scratch: float64 [2, most classes or labels].
      labels: int64 [n], written: the decoded local label of each node.

    Returns:
      Sum of node minima: the bound, plus the price of the capacity.
    """
    count = len(flat.label_start) - 1
    total = 0.0
    for step in range(count):
        i = step if forward else count - 1 - step
        if forward:
            before, after = (
                flat.in_factors[flat.in_start[i] : flat.in_start[i + 1]],
                flat.out_factors[flat.out_start[i] : flat.out_start[i + 1]],
            )
        else:
            after, before = (
                flat.in_factors[flat.in_start[i] : flat.in_start[i + 1]],
                flat.out_factors[flat.out_start[i] : flat.out_start[i + 1]],
            )
        for f in before:
            _collect(flat, tables, messages, theta, f, forward, scratch[0])
        _decode_one(flat, tables, messages, theta, i, before, forward, scratch[1], labels)
        remaining = max(len(before), len(after))
        for f in after:
            _spread(flat, messages, theta, f, forward, 1.0 / remaining, scratch[0])
            remaining -= 1
        first, last = flat.label_start[i], flat.label_start[i + 1]
        low = np.inf
        for k in range(first, last):
            low = min(low, theta[k])
        total += low
    return total


@numba.njit(cache=True, nogil=True)
def _decode_one(flat, tables, messages, theta, i, before, forward, cost, labels):
    """Chooses for node i: theta, with the messages from visited neighbours replaced by their exact table entries."""
    first = flat.label_start[i]
    count = flat.label_start[i + 1] - first
    for k in range(count):
        cost[k] = theta[first + k]
    for f in before:
        if forward:
            j, start, own = flat.source[f], flat.target_map[f], flat.target_message[f]
            a = flat.classes[flat.source_map[f] + labels[j]]
            given = messages[flat.source_message[f] + a]
            place, stride = flat.table[f] + a * flat.columns[f], 1
        else:
            j, start, own = flat.target[f], flat.source_map[f], flat.source_message[f]
            b = flat.classes[flat.target_map[f] + labels[j]]
            given = messages[flat.target_message[f] + b]
            place, stride = flat.table[f] + b, flat.columns[f]
        for k in range(count):
            c = flat.classes[start + k]
            cost[k] += tables[place + c * stride] - given - messages[own + c]
    best, choice = np.inf, 0
    for k in range(count):
        if cost[k] < best:
            best, choice = cost[k], k
    labels[i] = choice


@numba.njit(cache=True, nogil=True, fastmath=FAST)
def factor_minima(flat: Flat, tables: np.ndarray, messages: np.ndarray) -> float:
    """Sum of the minima of theta_f; 0 after a sweep, something else after messages or prices were changed."""
    total = 0.0
    for f in range(len(flat.source)):
        source, target = flat.source_message[f], flat.target_message[f]
        low = np.inf
        for a in range(flat.rows[f]):
            line = flat.table[f] + a * flat.columns[f]
            best = np.inf
            for b in range(flat.columns[f]):
                best = min(best, tables[line + b] - messages[target + b])
            low = min(low, best - messages[source + a])
        total += low
    return total


@numba.njit(cache=True, nogil=True)
def label_slack(flat: Flat, tables: np.ndarray, messages: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """How much more than the bound every solution with a given label costs, at least; float64 [L].

    Counts the label's own reduced cost and, for each neighbour, the least over its classes of factor cost plus the
    neighbour's reduced cost (for parallel factors to one neighbour, the latter once). All reduced costs are >= 0 once
    node and factor minima are taken out, so the sum over this star bounds the sum over everything.
    """
    nodes = len(flat.label_start) - 1
    low = np.empty(nodes)
    for i in range(nodes):
        low[i] = np.inf
        for k in range(flat.label_start[i], flat.label_start[i + 1]):
            low[i] = min(low[i], theta[k])
    slack = np.empty(len(theta))
    for i in range(nodes):
        for k in range(flat.label_start[i], flat.label_start[i + 1]):
            slack[k] = theta[k] - low[i]
    most = 1
    for f in range(len(flat.source)):
        most = max(most, flat.rows[f], flat.columns[f])
    row_best, column_best = np.empty(most), np.empty(most)
    row_least, column_least = np.empty(most), np.empty(most)
    before = -1, -1
    for f in range(len(flat.source)):
        i, j = flat.source[f], flat.target[f]
        rows, columns, place = flat.rows[f], flat.columns[f], flat.table[f]
        source, target = flat.source_message[f], flat.target_message[f]
        first = before[0] != i or before[1] != j
        before = i, j
        row_best[:] = np.inf
        column_best[:] = np.inf
        row_least[:] = 0.0 if not first else np.inf
        column_least[:] = 0.0 if not first else np.inf
        if first:
            for k in range(flat.label_start[i + 1] - flat.label_start[i]):
                c = flat.classes[flat.source_map[f] + k]
                row_least[c] = min(row_least[c], theta[flat.label_start[i] + k] - low[i])
            for k in range(flat.label_start[j + 1] - flat.label_start[j]):
                c = flat.classes[flat.target_map[f] + k]
                column_least[c] = min(column_least[c], theta[flat.label_start[j] + k] - low[j])
        minimum = np.inf
        for a in range(rows):
            for b in range(columns):
                value = tables[place + a * columns + b] - messages[source + a] - messages[target + b]
                minimum = min(minimum, value)
                row_best[a] = min(row_best[a], value + column_least[b])
                column_best[b] = min(column_best[b], value + row_least[a])
        for k in range(flat.label_start[i + 1] - flat.label_start[i]):
            slack[flat.label_start[i] + k] += row_best[flat.classes[flat.source_map[f] + k]] - minimum
        for k in range(flat.label_start[j + 1] - flat.label_start[j]):
            slack[flat.label_start[j] + k] += column_best[flat.classes[flat.target_map[f] + k]] - minimum
    return slack
