"""Prices of capacity that are best beside given messages: compiled kernels.

With messages fixed, the bound of `messages.py` is a concave, piecewise linear function of the prices,

    D(p) = sum_i min_x (theta_i(x) + (p - p0) . usage_i(x))  +  the same over factors with usages  -  p . capacity,

whose slope at an instant is the usage of the minimising labels minus the capacity. Maximising it over one price after
the other never lowers the bound, needs no step length, and costs little, since only nodes with usages count. It can
get stuck where messages and prices would have to change together; `dual_ascent.py` has other steps for that.
"""

import numpy as np

from autoshard.solver.bound.messages import running_sum
from autoshard.solver.factor_graph import FactorGraph
from autoshard.solver.kernels import inner, kernel

COORDINATES = 4
"""Prices that are moved in one call: those whose slope is steepest."""
HALVINGS = 8
"""Steps of the search for the maximum over one price."""
WIDENINGS = 12
"""Doublings of a step that still leads uphill."""


@inner()
def _usage_at(graph, theta, tables, messages, change, usage):
    """Writes the usage of the labels and entries that are least after prices moved by `change`, float64 [T]."""
    running = running_sum(change)
    steps = np.zeros(len(change) + 1)
    for i in range(len(graph.label_start) - 1):
        begin, end = graph.usage_start[i], graph.usage_start[i + 1]
        if begin == end:
            continue
        first = graph.label_start[i]
        low, choice = np.inf, 0
        for k in range(graph.label_start[i + 1] - first):
            value = theta[first + k]
            for r in range(begin, end):
                price = running[graph.usage_last[r]] - running[graph.usage_first[r]]
                value += price * graph.amounts[graph.usage_amounts[r] + k]
            if value < low:
                low, choice = value, k
        for r in range(begin, end):
            amount = graph.amounts[graph.usage_amounts[r] + choice]
            steps[graph.usage_first[r]] += amount
            steps[graph.usage_last[r]] -= amount
    for f in range(len(graph.source)):
        begin, end = graph.pair_start[f], graph.pair_start[f + 1]
        if begin == end:
            continue
        columns, place = graph.columns[f], graph.table[f]
        low, choice = np.inf, 0
        for e in range(graph.rows[f] * columns):
            value = tables[place + e] - messages[graph.source_message[f] + e // columns]
            value -= messages[graph.target_message[f] + e % columns]
            for r in range(begin, end):
                price = running[graph.pair_last[r]] - running[graph.pair_first[r]]
                value += price * graph.amounts[graph.pair_amounts[r] + e]
            if value < low:
                low, choice = value, e
        for r in range(begin, end):
            amount = graph.amounts[graph.pair_amounts[r] + choice]
            steps[graph.pair_first[r]] += amount
            steps[graph.pair_last[r]] -= amount
    level = 0.0
    for t in range(len(usage)):
        level += steps[t]
        usage[t] = level


@inner()
def _lines_at(graph, theta, tables, messages, change, t, owner_start, value, slope):
    """Writes what labels and entries that use anything at instant `t` cost after prices moved by `change`, and by how
    much more for each unit that the price of `t` moves further; owner after owner. Returns how many owners there are.
    """
    running = running_sum(change)
    owners, at = 0, 0
    for i in range(len(graph.label_start) - 1):
        begin, end = graph.usage_start[i], graph.usage_start[i + 1]
        live = False
        for r in range(begin, end):
            live |= graph.usage_first[r] <= t < graph.usage_last[r]
        if not live:
            continue
        first = graph.label_start[i]
        for k in range(graph.label_start[i + 1] - first):
            value[at], slope[at] = theta[first + k], 0.0
            for r in range(begin, end):
                amount = graph.amounts[graph.usage_amounts[r] + k]
                value[at] += (running[graph.usage_last[r]] - running[graph.usage_first[r]]) * amount
                if graph.usage_first[r] <= t < graph.usage_last[r]:
                    slope[at] += amount
            at += 1
        owners += 1
        owner_start[owners] = at
    for f in range(len(graph.source)):
        begin, end = graph.pair_start[f], graph.pair_start[f + 1]
        live = False
        for r in range(begin, end):
            live |= graph.pair_first[r] <= t < graph.pair_last[r]
        if not live:
            continue
        columns, place = graph.columns[f], graph.table[f]
        for e in range(graph.rows[f] * columns):
            value[at] = tables[place + e] - messages[graph.source_message[f] + e // columns]
            value[at] -= messages[graph.target_message[f] + e % columns]
            slope[at] = 0.0
            for r in range(begin, end):
                amount = graph.amounts[graph.pair_amounts[r] + e]
                value[at] += (running[graph.pair_last[r]] - running[graph.pair_first[r]]) * amount
                if graph.pair_first[r] <= t < graph.pair_last[r]:
                    slope[at] += amount
            at += 1
        owners += 1
        owner_start[owners] = at
    return owners


@inner()
def _used(owners, owner_start, value, slope, further):
    """The usage of what is least where a price moves `further`."""
    total = 0.0
    for o in range(owners):
        low, amount = np.inf, 0.0
        for k in range(owner_start[o], owner_start[o + 1]):
            moved = value[k] + further * slope[k]
            if moved < low:
                low, amount = moved, slope[k]
        total += amount
    return total


@inner()
def _largest(values):
    best = 0
    for index in range(len(values)):
        if values[index] > values[best]:
            best = index
    return best


@kernel()
def ascend_prices(graph: FactorGraph, theta: np.ndarray, tables: np.ndarray, messages: np.ndarray, prices: np.ndarray,
                 step: float) -> np.ndarray:  # fmt: skip
    """How the steepest prices should move, one after the other.

    Args:
      theta, tables, messages: the state after a sweep at `prices` float64 [T]. step: first step tried.

    Returns:
      float64 [T], the change of each price.
    """
    count = len(prices)
    change, usage = np.zeros(count), np.zeros(count)
    _usage_at(graph, theta, tables, messages, change, usage)
    excess = np.empty(count)
    for t in range(count):
        excess[t] = abs(usage[t] - graph.capacity[t])
    owner_start = np.zeros(len(graph.label_start) + len(graph.source), np.int64)
    value, slope = np.empty(len(theta) + len(tables)), np.empty(len(theta) + len(tables))
    moved = 0
    for _ in range(count):
        if moved == COORDINATES:
            break
        t = _largest(excess)
        excess[t] = -1.0
        before = change[t]
        owners = _lines_at(graph, theta, tables, messages, change, t, owner_start, value, slope)
        over = _used(owners, owner_start, value, slope, 0.0) - graph.capacity[t]
        if over == 0 or (over < 0 and prices[t] + before <= 0):
            continue
        moved += 1
        rising = over > 0
        near, length = before, step if rising else -step
        far = near + length
        for _turn in range(WIDENINGS):
            change[t] = max(far, -prices[t])
            used = _used(owners, owner_start, value, slope, change[t] - before)
            if (used > graph.capacity[t]) != rising or change[t] == -prices[t]:
                break
            near, length = change[t], 2 * length
            far = near + length
        far = max(far, -prices[t])
        for _turn in range(HALVINGS):
            change[t] = 0.5 * (near + far)
            used = _used(owners, owner_start, value, slope, change[t] - before)
            if (used > graph.capacity[t]) == rising:
                near = change[t]
            else:
                far = change[t]
        change[t] = near
    return change
