"""Message passing: compiled kernels that raise a lower bound by moving cost between factors and nodes.

The state is a *reparametrisation*, an equal problem with the cost spread differently. With prices p_t >= 0 per unit of
capacity and messages m (one number per class at each end of a factor) it has

    node costs     theta_i(x)    = cost_i(x) + sum_demands price(demand) amount(x) + sum_factors m_(f,i)(class(x))
    factor costs   theta_f(a, b) = table_f(a, b) + sum_demands price(demand) amount(a, b) - m_(f,s)(a) - m_(f,t)(b)

where price(demand) is the sum of p over its instants. For every p and m

    bound = sum_i min theta_i + sum_f min theta_f - sum_t p_t capacity_t   <=   the cost of every feasible solution.

A sweep visits nodes in order (TRW-S of Kolmogorov 2006, written on the factors' reparametrisation as in his SRMP of
2014): the node collects all cost that the factors towards nodes already visited can give, then spreads its own over
the factors towards nodes still to come. The sum never falls, and after a sweep every factor has minimum 0, so that the
bound is the sum of node minima. A factor sees a node through classes, hence what can be spread to it is the minimum
over each class; it is spread one factor after the other so that what one factor's classes cannot carry the next may.
"""

import numpy as np

from autoshard.solver.factor_graph import FactorGraph
from autoshard.solver.kernels import FAST, inner, kernel
from autoshard.solver.row_minima import row_minima


@inner()
def running_sum(values: np.ndarray) -> np.ndarray:
    """float64 [n + 1]: 0 and the sums of the first 1, 2, .. n values. (Compiles faster than numpy's.)"""
    result = np.zeros(len(values) + 1)
    for index in range(len(values)):
        result[index + 1] = result[index] + values[index]
    return result


@kernel()
def price_unary(graph: FactorGraph, prices: np.ndarray, unary: np.ndarray) -> None:
    """unary[label] = cost + price of the label's usages. Arguments: prices float64 [T]; unary float64 [L], written."""
    running = running_sum(prices)
    for i in range(len(graph.label_start) - 1):
        first, count = graph.label_start[i], graph.label_start[i + 1] - graph.label_start[i]
        for k in range(count):
            unary[first + k] = graph.unary[first + k]
        for r in range(graph.usage_start[i], graph.usage_start[i + 1]):
            price = running[graph.usage_last[r]] - running[graph.usage_first[r]]
            if price != 0.0:
                base = graph.usage_amounts[r]
                for k in range(count):
                    unary[first + k] += price * graph.amounts[base + k]


@kernel()
def price_tables(graph: FactorGraph, prices: np.ndarray, tables: np.ndarray) -> None:
    """Writes the priced tables of factors with usages into `tables` (float64, laid out as graph.tables)."""
    running = running_sum(prices)
    for f in range(len(graph.source)):
        if graph.pair_start[f] == graph.pair_start[f + 1]:
            continue
        place, size = graph.table[f], graph.rows[f] * graph.columns[f]
        for k in range(size):
            tables[place + k] = graph.tables[place + k]
        for r in range(graph.pair_start[f], graph.pair_start[f + 1]):
            price = running[graph.pair_last[r]] - running[graph.pair_first[r]]
            if price != 0.0:
                base = graph.pair_amounts[r]
                for k in range(size):
                    tables[place + k] += price * graph.amounts[base + k]


@kernel()
def node_costs(graph: FactorGraph, unary: np.ndarray, messages: np.ndarray, theta: np.ndarray) -> None:
    """theta = priced unary costs + messages, computed afresh (sweeps update it and gather rounding errors)."""
    for k in range(len(unary)):  # not theta[:] = unary, whose error message numba compiles for seconds
        theta[k] = unary[k]
    for f in range(len(graph.source)):
        for node, start, place in (
            (graph.source[f], graph.source_map[f], graph.source_message[f]),
            (graph.target[f], graph.target_map[f], graph.target_message[f]),
        ):
            first = graph.label_start[node]
            for k in range(graph.label_start[node + 1] - first):
                theta[first + k] += messages[place + graph.classes[start + k]]


@inner(FAST)
def _collect(graph, tables, messages, theta, f, at_target, scratch):
    """Sets the message at one end of factor f so that every row of theta_f on that side has minimum 0."""
    rows, columns, place = graph.rows[f], graph.columns[f], graph.table[f]
    source, target = graph.source_message[f], graph.target_message[f]
    if at_target:
        node, start, own, count = graph.target[f], graph.target_map[f], target, columns
        least = scratch[:columns]  # slices, here and elsewhere: what is counted from 0 becomes vectors
        for b in range(columns):
            least[b] = np.inf
        for a in range(rows):
            given = messages[source + a]
            row = tables[place + a * columns : place + (a + 1) * columns]
            for b in range(columns):
                least[b] = min(least[b], row[b] - given)
    else:
        node, start, own, count = graph.source[f], graph.source_map[f], source, rows
        table = tables[place : place + rows * columns]
        row_minima(table, messages[target : target + columns], -1.0, rows, columns, scratch)
    change, message = scratch[:count], messages[own : own + count]
    for c in range(count):
        new = change[c]
        change[c] = new - message[c]
        message[c] = new
    first, last = graph.label_start[node], graph.label_start[node + 1]
    costs = theta[first:last]
    for k in range(last - first):
        costs[k] += change[graph.classes[start + k]]


@inner(FAST)
def _spread(graph, messages, theta, f, from_source, weight, scratch):
    """Moves `weight` of the node's minimum over each class from the node into factor f."""
    if from_source:
        node, start, own, count = graph.source[f], graph.source_map[f], graph.source_message[f], graph.rows[f]
    else:
        node, start, own, count = graph.target[f], graph.target_map[f], graph.target_message[f], graph.columns[f]
    least, message = scratch[:count], messages[own : own + count]
    for c in range(count):
        least[c] = np.inf
    first, last = graph.label_start[node], graph.label_start[node + 1]
    costs = theta[first:last]
    for k in range(last - first):
        c = graph.classes[start + k]
        least[c] = min(least[c], costs[k])
    for c in range(count):
        least[c] *= weight
        message[c] -= least[c]
    for k in range(last - first):
        costs[k] -= least[graph.classes[start + k]]


@kernel()
def sweep(
    graph: FactorGraph,
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
    count = len(graph.label_start) - 1
    total = 0.0
    for step in range(count):
        i = step if forward else count - 1 - step
        into, out = (graph.in_start[i], graph.in_start[i + 1]), (graph.out_start[i], graph.out_start[i + 1])
        if forward:
            before, (first, last), after, (begin, end) = graph.in_factors, into, graph.out_factors, out
        else:
            before, (first, last), after, (begin, end) = graph.out_factors, out, graph.in_factors, into
        for p in range(first, last):
            _collect(graph, tables, messages, theta, before[p], forward, scratch[0])
        _decode_one(graph, tables, messages, theta, i, before, first, last, forward, scratch[1], labels)
        remaining = max(last - first, end - begin)
        for p in range(begin, end):
            _spread(graph, messages, theta, after[p], forward, 1.0 / remaining, scratch[0])
            remaining -= 1
        first, last = graph.label_start[i], graph.label_start[i + 1]
        low = np.inf
        for k in range(first, last):
            low = min(low, theta[k])
        total += low
    return float(total)


@inner()
def _decode_one(graph, tables, messages, theta, i, before, begin, end, forward, cost, labels):
    """Chooses for node i: theta, with the messages from visited neighbours replaced by their exact table entries.

    Those are on the other side of the factors before[begin:end].
    """
    first = graph.label_start[i]
    count = graph.label_start[i + 1] - first
    for k in range(count):
        cost[k] = theta[first + k]
    for p in range(begin, end):
        f = before[p]
        if forward:
            j, start, own = graph.source[f], graph.target_map[f], graph.target_message[f]
            a = graph.classes[graph.source_map[f] + labels[j]]
            given = messages[graph.source_message[f] + a]
            place, stride = graph.table[f] + a * graph.columns[f], 1
        else:
            j, start, own = graph.target[f], graph.source_map[f], graph.source_message[f]
            b = graph.classes[graph.target_map[f] + labels[j]]
            given = messages[graph.target_message[f] + b]
            place, stride = graph.table[f] + b, graph.columns[f]
        for k in range(count):
            c = graph.classes[start + k]
            cost[k] += tables[place + c * stride] - given - messages[own + c]
    best, choice = np.inf, 0
    for k in range(count):
        if cost[k] < best:
            best, choice = cost[k], k
    labels[i] = choice


@kernel(FAST)
def factor_minima(graph: FactorGraph, tables: np.ndarray, messages: np.ndarray) -> float:
    """Sum of the minima of theta_f; 0 after a sweep, something else after messages or prices were changed."""
    total = 0.0
    for f in range(len(graph.source)):
        rows, columns, place = graph.rows[f], graph.columns[f], graph.table[f]
        source, target = graph.source_message[f], graph.target_message[f]
        low, least = np.inf, np.zeros(rows)
        table = tables[place : place + rows * columns]
        row_minima(table, messages[target : target + columns], -1.0, rows, columns, least)
        for a in range(rows):
            low = min(low, least[a] - messages[source + a])
        total += low
    return float(total)
