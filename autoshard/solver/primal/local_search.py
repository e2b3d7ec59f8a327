"""Local search: compiled kernels that turn a vector of labels into a cheap one that fits the capacity.

A node moves to the label with the least

    own cost + factor entries against the neighbours' labels + sum_t weight_t max(0, usage_t - capacity_t)

given all others, node after node, until nothing moves. Where the result does not fit, the weights of the exceeded
instants grow; where it fits, infinite weights keep it so.
"""

import numba
import numpy as np

from autoshard.solver.bound.flat import Flat


@numba.njit(cache=True, nogil=True)
def labels_cost(flat: Flat, labels: np.ndarray) -> float:
    """Cost of local labels int64 [n] (without the network's constant)."""
    total = 0.0
    for i in range(len(labels)):
        total += flat.unary[flat.label_start[i] + labels[i]]
    for f in range(len(flat.source)):
        a = flat.classes[flat.source_map[f] + labels[flat.source[f]]]
        b = flat.classes[flat.target_map[f] + labels[flat.target[f]]]
        total += flat.tables[flat.table[f] + a * flat.columns[f] + b]
    return total


@numba.njit(cache=True, nogil=True)
def labels_usage(flat: Flat, labels: np.ndarray) -> np.ndarray:
    """Usage at each instant, float64 [T]."""
    steps = np.zeros(len(flat.capacity) + 1)
    for i in range(len(labels)):
        for r in range(flat.usage_start[i], flat.usage_start[i + 1]):
            amount = flat.amounts[flat.usage_amounts[r] + labels[i]]
            steps[flat.usage_first[r]] += amount
            steps[flat.usage_last[r]] -= amount
    for f in range(len(flat.source)):
        if flat.pair_start[f] == flat.pair_start[f + 1]:
            continue
        a = flat.classes[flat.source_map[f] + labels[flat.source[f]]]
        b = flat.classes[flat.target_map[f] + labels[flat.target[f]]]
        for r in range(flat.pair_start[f], flat.pair_start[f + 1]):
            amount = flat.amounts[flat.pair_amounts[r] + a * flat.columns[f] + b]
            steps[flat.pair_first[r]] += amount
            steps[flat.pair_last[r]] -= amount
    for t in range(len(flat.capacity)):
        steps[t + 1] += steps[t]
    return steps[: len(flat.capacity)].copy()


@numba.njit(cache=True, nogil=True)
def fits(flat: Flat, labels: np.ndarray) -> bool:
    """Whether the usage is within the capacity at every instant."""
    usage = labels_usage(flat, labels)
    for t in range(len(usage)):
        if usage[t] > flat.capacity[t]:
            return False
    return True


@numba.njit(cache=True, nogil=True)
def modest_labels(flat: Flat) -> np.ndarray:
    """For each node the label that takes least capacity, and of these the cheapest; int64 [n]."""
    labels = np.zeros(len(flat.label_start) - 1, np.int64)
    for i in range(len(labels)):
        least, cheapest = np.inf, np.inf
        for k in range(flat.label_start[i + 1] - flat.label_start[i]):
            taken, cost = _most(flat, i, k), flat.unary[flat.label_start[i] + k]
            if taken < least or (taken == least and cost < cheapest):
                least, cheapest, labels[i] = taken, cost, k
    return labels


@numba.njit(cache=True, nogil=True)
def local_costs(flat, labels, i, cost):
    """cost[k] = unary + table entries of node i with label k, neighbours fixed."""
    first = flat.label_start[i]
    count = flat.label_start[i + 1] - first
    for k in range(count):
        cost[k] = flat.unary[first + k]
    for p in range(flat.in_start[i], flat.in_start[i + 1]):
        f = flat.in_factors[p]
        a = flat.classes[flat.source_map[f] + labels[flat.source[f]]]
        line, start = flat.table[f] + a * flat.columns[f], flat.target_map[f]
        for k in range(count):
            cost[k] += flat.tables[line + flat.classes[start + k]]
    for p in range(flat.out_start[i], flat.out_start[i + 1]):
        f = flat.out_factors[p]
        b = flat.classes[flat.target_map[f] + labels[flat.target[f]]]
        place, stride, start = flat.table[f] + b, flat.columns[f], flat.source_map[f]
        for k in range(count):
            cost[k] += flat.tables[place + stride * flat.classes[start + k]]


@numba.njit(cache=True, nogil=True)
def take_cheapest(flat: Flat, labels: np.ndarray, nodes: np.ndarray, scratch: np.ndarray) -> None:
    """Gives each of `nodes` int64, in turn, the label that is cheapest beside the others, whatever it takes."""
    for i in nodes:
        local_costs(flat, labels, i, scratch)
        best = 0
        for k in range(flat.label_start[i + 1] - flat.label_start[i]):
            if scratch[k] < scratch[best]:
                best = k
        labels[i] = best


@numba.njit(cache=True, nogil=True)
def _add(flat, usage, weights, first, last, amount):
    """Adds `amount` to usage[first:last]; returns the penalty it adds."""
    penalty = 0.0
    for t in range(first, last):
        over = usage[t] + amount - flat.capacity[t]
        if amount > 0.0 and over > 0.0:
            penalty += weights[t] * min(over, amount)
        usage[t] += amount
    return penalty


@numba.njit(cache=True, nogil=True)
def occupy(flat, labels, usage, weights, i, k, sign):
    """Adds (sign 1) or removes (sign -1) what node i and its factors take with label k; returns the added penalty."""
    penalty = 0.0
    for r in range(flat.usage_start[i], flat.usage_start[i + 1]):
        amount = flat.amounts[flat.usage_amounts[r] + k]
        if amount != 0.0:
            penalty += _add(flat, usage, weights, flat.usage_first[r], flat.usage_last[r], sign * amount)
    for p in range(flat.in_start[i], flat.in_start[i + 1]):
        f = flat.in_factors[p]
        if flat.pair_start[f] != flat.pair_start[f + 1]:
            a = flat.classes[flat.source_map[f] + labels[flat.source[f]]]
            entry = a * flat.columns[f] + flat.classes[flat.target_map[f] + k]
            for r in range(flat.pair_start[f], flat.pair_start[f + 1]):
                amount = flat.amounts[flat.pair_amounts[r] + entry]
                if amount != 0.0:
                    penalty += _add(flat, usage, weights, flat.pair_first[r], flat.pair_last[r], sign * amount)
    for p in range(flat.out_start[i], flat.out_start[i + 1]):
        f = flat.out_factors[p]
        if flat.pair_start[f] != flat.pair_start[f + 1]:
            b = flat.classes[flat.target_map[f] + labels[flat.target[f]]]
            entry = flat.classes[flat.source_map[f] + k] * flat.columns[f] + b
            for r in range(flat.pair_start[f], flat.pair_start[f + 1]):
                amount = flat.amounts[flat.pair_amounts[r] + entry]
                if amount != 0.0:
                    penalty += _add(flat, usage, weights, flat.pair_first[r], flat.pair_last[r], sign * amount)
    return penalty


@numba.njit(cache=True, nogil=True)
def descend(
    flat: Flat, labels: np.ndarray, usage: np.ndarray, weights: np.ndarray, sweeps: int, scratch: np.ndarray
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
            local_costs(flat, labels, i, scratch)
            choices = flat.label_start[i + 1] - flat.label_start[i]
            now = labels[i]
            cheapest = np.inf
            for k in range(choices):
                cheapest = min(cheapest, scratch[k])
            if not _occupies(flat, i):
                if cheapest < scratch[now]:
                    for k in range(choices):
                        if scratch[k] == cheapest:
                            labels[i] = k
                            break
                    moved += 1
                    _make_stale(flat, i, stale)
                stale[i] = False
                continue
            occupy(flat, labels, usage, weights, i, now, -1.0)
            room = _room(flat, usage, i)
            penalty = 0.0
            if _most(flat, i, now) > room:
                penalty = occupy(flat, labels, usage, weights, i, now, 1.0)
                occupy(flat, labels, usage, weights, i, now, -1.0)
            best, choice = scratch[now] + penalty, now
            if cheapest < best:
                for k in range(choices):
                    if scratch[k] < best and k != now:
                        penalty = 0.0
                        if _most(flat, i, k) > room:
                            penalty = occupy(flat, labels, usage, weights, i, k, 1.0)
                            occupy(flat, labels, usage, weights, i, k, -1.0)
                        if scratch[k] + penalty < best:
                            best, choice = scratch[k] + penalty, k
            occupy(flat, labels, usage, weights, i, choice, 1.0)
            if choice != now:
                labels[i] = choice
                moved += 1
                _make_stale(flat, i, stale)
            stale[i] = scratch[choice] > cheapest or best > scratch[choice]
        moves += moved
        if moved == 0:
            break
    return moves


@numba.njit(cache=True, nogil=True)
def _make_stale(flat, i, stale):
    for p in range(flat.in_start[i], flat.in_start[i + 1]):
        stale[flat.source[flat.in_factors[p]]] = True
    for p in range(flat.out_start[i], flat.out_start[i + 1]):
        stale[flat.target[flat.out_factors[p]]] = True


@numba.njit(cache=True, nogil=True)
def _room(flat, usage, i):
    """Least capacity left at the instants of node i's own usages; -inf if its factors have usages too."""
    room = np.inf
    for r in range(flat.usage_start[i], flat.usage_start[i + 1]):
        for t in range(flat.usage_first[r], flat.usage_last[r]):
            room = min(room, flat.capacity[t] - usage[t])
    for p in range(flat.in_start[i], flat.in_start[i + 1]):
        if flat.pair_start[flat.in_factors[p]] != flat.pair_start[flat.in_factors[p] + 1]:
            return -np.inf
    for p in range(flat.out_start[i], flat.out_start[i + 1]):
        if flat.pair_start[flat.out_factors[p]] != flat.pair_start[flat.out_factors[p] + 1]:
            return -np.inf
    return room


@numba.njit(cache=True, nogil=True)
def _most(flat, i, k):
    """What node i takes with label k if all its usages coincide."""
    total = 0.0
    for r in range(flat.usage_start[i], flat.usage_start[i + 1]):
        total += flat.amounts[flat.usage_amounts[r] + k]
    return total


@numba.njit(cache=True, nogil=True)
def _occupies(flat, i):
    if flat.usage_start[i] != flat.usage_start[i + 1]:
        return True
    for p in range(flat.in_start[i], flat.in_start[i + 1]):
        f = flat.in_factors[p]
        if flat.pair_start[f] != flat.pair_start[f + 1]:
            return True
    for p in range(flat.out_start[i], flat.out_start[i + 1]):
        f = flat.out_factors[p]
        if flat.pair_start[f] != flat.pair_start[f + 1]:
            return True
    return False


@numba.njit(cache=True, nogil=True)
def settle(flat: Flat, labels: np.ndarray, weights: np.ndarray, rounds: int, scratch: np.ndarray) -> bool:
    """Repairs and polishes `labels` in place: penalised descent with growing weights, then descent inside the capacity.

    Args:
      weights: float64 [T], updated; the first penalty per unit of overrun at each instant.
      rounds: how often weights may grow.

    Returns:
      True if the result has finite cost and fits.
    """
    usage = labels_usage(flat, labels)
    for _ in range(rounds):
        descend(flat, labels, usage, weights, 20, scratch)
        usage = labels_usage(flat, labels)
        exceeded = False
        for t in range(len(weights)):
            if usage[t] > flat.capacity[t]:
                exceeded = True
                weights[t] = weights[t] * 2.0
        if not exceeded:
            break
    for t in range(len(weights)):
        if usage[t] > flat.capacity[t]:
            return False
    descend(flat, labels, usage, np.full(len(weights), np.inf), 50, scratch)
    return np.isfinite(labels_cost(flat, labels)) and fits(flat, labels)
