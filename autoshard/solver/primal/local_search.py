"""Local search: compiled kernels that turn a vector of labels into a cheap one that fits the capacity.

A node moves to the label with the least

    own cost + factor entries against the neighbours' labels + sum_t weight_t max(0, usage_t - capacity_t)

given all others, node after node, until nothing moves. Where the result does not fit, the weights of the exceeded
instants grow; where it fits, infinite weights keep it so.
"""

import numpy as np

from autoshard.solver.factor_graph import FactorGraph
from autoshard.solver.kernels import inner, kernel
from autoshard.solver.labelling import fits, labels_cost, labels_usage


@kernel()
def least_usage_labels(graph: FactorGraph) -> np.ndarray:
    """For each node the label that takes least capacity, and of these the cheapest; int64 [n]."""
    labels = np.zeros(len(graph.label_start) - 1, np.int64)
    for i in range(len(labels)):
        least, cheapest = np.inf, np.inf
        for k in range(graph.label_start[i + 1] - graph.label_start[i]):
            taken, cost = _most(graph, i, k), graph.unary[graph.label_start[i] + k]
            if taken < least or (taken == least and cost < cheapest):
                least, cheapest, labels[i] = taken, cost, k
    return labels


@inner()
def local_costs(graph, labels, i, cost):
    """cost[k] = unary + table entries of node i with label k, neighbours fixed."""
    first = graph.label_start[i]
    count = graph.label_start[i + 1] - first
    for k in range(count):
        cost[k] = graph.unary[first + k]
    for p in range(graph.in_start[i], graph.in_start[i + 1]):
        f = graph.in_factors[p]
        a = graph.classes[graph.source_map[f] + labels[graph.source[f]]]
        line, start = graph.table[f] + a * graph.columns[f], graph.target_map[f]
        for k in range(count):
            cost[k] += graph.tables[line + graph.classes[start + k]]
    for p in range(graph.out_start[i], graph.out_start[i + 1]):
        f = graph.out_factors[p]
        b = graph.classes[graph.target_map[f] + labels[graph.target[f]]]
        place, stride, start = graph.table[f] + b, graph.columns[f], graph.source_map[f]
        for k in range(count):
            cost[k] += graph.tables[place + stride * graph.classes[start + k]]


@kernel()
def assign_greedily(graph: FactorGraph, labels: np.ndarray, nodes: np.ndarray, scratch: np.ndarray) -> None:
    """Gives each of `nodes` int64, in turn, the label that is cheapest beside the others, whatever it takes."""
    for i in nodes:
        local_costs(graph, labels, i, scratch)
        best = 0
        for k in range(graph.label_start[i + 1] - graph.label_start[i]):
            if scratch[k] < scratch[best]:
                best = k
        labels[i] = best


@inner()
def _add(graph, usage, weights, first, last, amount):
    """Adds `amount` to usage[first:last]; returns the penalty it adds."""
    penalty = 0.0
    for t in range(first, last):
        over = usage[t] + amount - graph.capacity[t]
        if amount > 0.0 and over > 0.0:
            penalty += weights[t] * min(over, amount)
        usage[t] += amount
    return penalty


@inner()
def add_usage(graph, labels, usage, weights, i, k, sign):
    """Adds (sign 1) or removes (sign -1) what node i and its factors take with label k; returns the added penalty."""
    penalty = 0.0
    for r in range(graph.usage_start[i], graph.usage_start[i + 1]):
        amount = graph.amounts[graph.usage_amounts[r] + k]
        if amount != 0.0:
            penalty += _add(graph, usage, weights, graph.usage_first[r], graph.usage_last[r], sign * amount)
    for p in range(graph.in_start[i], graph.in_start[i + 1]):
        f = graph.in_factors[p]
        if graph.pair_start[f] != graph.pair_start[f + 1]:
            a = graph.classes[graph.source_map[f] + labels[graph.source[f]]]
            entry = a * graph.columns[f] + graph.classes[graph.target_map[f] + k]
            for r in range(graph.pair_start[f], graph.pair_start[f + 1]):
                amount = graph.amounts[graph.pair_amounts[r] + entry]
                if amount != 0.0:
                    penalty += _add(graph, usage, weights, graph.pair_first[r], graph.pair_last[r], sign * amount)
    for p in range(graph.out_start[i], graph.out_start[i + 1]):
        f = graph.out_factors[p]
        if graph.pair_start[f] != graph.pair_start[f + 1]:
            b = graph.classes[graph.target_map[f] + labels[graph.target[f]]]
            entry = graph.classes[graph.source_map[f] + k] * graph.columns[f] + b
            for r in range(graph.pair_start[f], graph.pair_start[f + 1]):
                amount = graph.amounts[graph.pair_amounts[r] + entry]
                if amount != 0.0:
                    penalty += _add(graph, usage, weights, graph.pair_first[r], graph.pair_last[r], sign * amount)
    return penalty


@kernel()
def iterated_conditional_modes(
    graph: FactorGraph,
    labels: np.ndarray,
    usage: np.ndarray,
    weights: np.ndarray,
    sweeps: int | np.integer,
    scratch: np.ndarray,
) -> int:
    """Moves single nodes downhill, in place.

    Args:
      labels int64 [n], usage float64 [T]: updated. weights float64 [T]: penalty per unit of overrun, may be +inf.
      sweeps: most sweeps over all nodes; alternately upwards and downwards. scratch: float64 [>= most labels].

    Returns:
      Number of moves.
    """
    count = len(labels)
    moves = 0
    stale = np.ones(count, np.bool_)  # a node that has its cheapest label without penalty waits for a neighbour's move
    for turn in range(sweeps):
        moved = 0
        for step in range(count):
            i = step if turn % 2 == 0 else count - 1 - step
            if not stale[i]:
                continue
            local_costs(graph, labels, i, scratch)
            if not _occupies(graph, i):
                moved += _take_cheapest(graph, labels, i, scratch, stale)
                continue
            choices = graph.label_start[i + 1] - graph.label_start[i]
            now = labels[i]
            cheapest = np.inf
            for k in range(choices):
                cheapest = min(cheapest, scratch[k])
            add_usage(graph, labels, usage, weights, i, now, -1.0)
            room = _room(graph, usage, i)
            penalty = 0.0
            if _most(graph, i, now) > room:
                penalty = add_usage(graph, labels, usage, weights, i, now, 1.0)
                add_usage(graph, labels, usage, weights, i, now, -1.0)
            best, choice = scratch[now] + penalty, now
            if cheapest < best:
                for k in range(choices):
                    if scratch[k] < best and k != now:
                        penalty = 0.0
                        if _most(graph, i, k) > room:
                            penalty = add_usage(graph, labels, usage, weights, i, k, 1.0)
                            add_usage(graph, labels, usage, weights, i, k, -1.0)
                        if scratch[k] + penalty < best:
                            best, choice = scratch[k] + penalty, k
            add_usage(graph, labels, usage, weights, i, choice, 1.0)
            if choice != now:
                labels[i] = choice
                moved += 1
                _make_stale(graph, i, stale)
            stale[i] = scratch[choice] > cheapest or best > scratch[choice]
        moves += moved
        if moved == 0:
            break
    return moves


@inner()
def _take_cheapest(graph, labels, i, cost, stale):
    """Gives node i the first of the labels that cost least, if one costs less than its own; returns whether it does."""
    choice = labels[i]
    for k in range(graph.label_start[i + 1] - graph.label_start[i]):
        if cost[k] < cost[choice]:
            choice = k
    moved = choice != labels[i]
    if moved:
        labels[i] = choice
        _make_stale(graph, i, stale)
    stale[i] = False
    return moved


@inner()
def _make_stale(graph, i, stale):
    for p in range(graph.in_start[i], graph.in_start[i + 1]):
        stale[graph.source[graph.in_factors[p]]] = True
    for p in range(graph.out_start[i], graph.out_start[i + 1]):
        stale[graph.target[graph.out_factors[p]]] = True


@inner()
def _room(graph, usage, i):
    """Least capacity left at the instants of node i's own usages; -inf if its factors have usages too."""
    room = np.inf
    for r in range(graph.usage_start[i], graph.usage_start[i + 1]):
        for t in range(graph.usage_first[r], graph.usage_last[r]):
            room = min(room, graph.capacity[t] - usage[t])
    for p in range(graph.in_start[i], graph.in_start[i + 1]):
        if graph.pair_start[graph.in_factors[p]] != graph.pair_start[graph.in_factors[p] + 1]:
            return -np.inf
    for p in range(graph.out_start[i], graph.out_start[i + 1]):
        if graph.pair_start[graph.out_factors[p]] != graph.pair_start[graph.out_factors[p] + 1]:
            return -np.inf
    return room


@inner()
def _most(graph, i, k):
    """What node i takes with label k if all its usages coincide."""
    total = 0.0
    for r in range(graph.usage_start[i], graph.usage_start[i + 1]):
        total += graph.amounts[graph.usage_amounts[r] + k]
    return total


@inner()
def _occupies(graph, i):
    if graph.usage_start[i] != graph.usage_start[i + 1]:
        return True
    for p in range(graph.in_start[i], graph.in_start[i + 1]):
        f = graph.in_factors[p]
        if graph.pair_start[f] != graph.pair_start[f + 1]:
            return True
    for p in range(graph.out_start[i], graph.out_start[i + 1]):
        f = graph.out_factors[p]
        if graph.pair_start[f] != graph.pair_start[f + 1]:
            return True
    return False


def repair(graph: FactorGraph, labels: np.ndarray, weights: np.ndarray, rounds: int, scratch: np.ndarray) -> bool:
    """Repairs and polishes `labels` in place: penalised descent with growing weights, then descent inside the capacity.

    Args:
      weights: float64 [T], updated; the first penalty per unit of overrun at each instant.
      rounds: how often weights may grow, at least 1.

    Returns:
      True if the result has finite cost and fits.
    """
    if len(graph.capacity):
        return repair_within(graph, labels, weights, rounds, scratch)
    return descend_freely(graph, labels, scratch)


@kernel()
def descend_freely(graph: FactorGraph, labels: np.ndarray, scratch: np.ndarray) -> bool:
    """What `repair_within` comes to where no instant counts, without what it takes to compile that."""
    count = len(labels)
    stale = np.ones(count, np.bool_)
    for sweeps in (20, 50):
        stale[:] = True
        for turn in range(sweeps):
            moved = 0
            for step in range(count):
                i = step if turn % 2 == 0 else count - 1 - step
                if stale[i]:
                    local_costs(graph, labels, i, scratch)
                    moved += _take_cheapest(graph, labels, i, scratch, stale)
            if moved == 0:
                break
    return np.isfinite(labels_cost(graph, labels))


@kernel()
def repair_within(
    graph: FactorGraph, labels: np.ndarray, weights: np.ndarray, rounds: int, scratch: np.ndarray
) -> bool:
    """`repair` where instants count."""
    some, many = np.int64(20), np.int64(50)  # not as literals, for each of which numba would compile a version
    usage = labels_usage(graph, labels)
    for _ in range(rounds):
        iterated_conditional_modes(graph, labels, usage, weights, some, scratch)
        usage = labels_usage(graph, labels)
        exceeded = False
        for t in range(len(weights)):
            if usage[t] > graph.capacity[t]:
                exceeded = True
                weights[t] = weights[t] * 2.0
        if not exceeded:
            break
    for t in range(len(weights)):
        if usage[t] > graph.capacity[t]:
            return False
    iterated_conditional_modes(graph, labels, usage, np.full(len(weights), np.inf), many, scratch)
    return np.isfinite(labels_cost(graph, labels)) and fits(graph, labels)
