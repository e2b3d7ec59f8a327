"""Local search over trees: the labels of many nodes change at once, exactly.

From a seed node an induced tree is grown: a node joins if exactly one factor links it to the tree. All other nodes keep
their labels; the best labels of the whole tree then follow by dynamic programming over its factors. The new labels are
taken if they cost less and fit the capacity. Priced costs (`messages.py`) steer the choice towards labels that take
little where capacity is dear.
"""

from collections.abc import Callable

import numba
import numpy as np

from autoshard.solver.bound.flat import Flat
from autoshard.solver.primal.local_search import descend, fits, labels_cost, labels_usage, occupy

SIZES = (8, 30, 100, 400)
"""Most nodes of a tree, in turn: small trees fit more easily, large ones change more."""


def walk_trees(
    flat: Flat,
    labels: np.ndarray,
    unary: np.ndarray,
    tables: np.ndarray,
    rounds: int,
    seed: int,
    stop: Callable[[], bool],
) -> np.ndarray:
    """Walks through feasible labels, alternately downhill in priced cost (which frees capacity) and in plain cost.

    Args:
      labels: int64 [n], within the capacity. unary, tables: priced costs. rounds: each visits every node about twice.
      stop: asked before each round.

    Returns:
      The cheapest labels met, int64 [n].
    """
    labels, best, lowest = labels.copy(), labels.copy(), labels_cost(flat, labels)
    cost = np.zeros(max(len(flat.unary), 1))
    forbid = np.full(len(flat.capacity), np.inf)
    for turn in range(rounds):
        if stop():
            break
        size = SIZES[turn % len(SIZES)]
        trees = 2 * len(labels) // size + 1
        usage = labels_usage(flat, labels)
        priced = turn % 2 == 0
        if priced:
            improve_trees(flat, labels, usage, unary, tables, True, size, trees, seed + turn, cost)
        else:
            improve_trees(flat, labels, usage, flat.unary, flat.tables, False, size, trees, seed + turn, cost)
        descend(flat, labels, labels_usage(flat, labels), forbid, 20, cost)
        now = labels_cost(flat, labels)
        if not fits(flat, labels) or now > lowest + 0.02 * abs(lowest):
            labels = best.copy()
        elif now < lowest:
            best, lowest = labels.copy(), now
    return best


@numba.njit(cache=True, nogil=True)
def improve_trees(
    flat: Flat,
    labels: np.ndarray,
    usage: np.ndarray,
    unary: np.ndarray,
    tables: np.ndarray,
    priced: bool,
    size: int,
    trees: int,
    seed: int,
    cost: np.ndarray,
) -> int:
    """Improves up to `trees` random trees in place.

    Args:
      labels int64 [n], usage float64 [T]: updated; must fit the capacity and go on fitting.
      unary, tables: costs that the dynamic programming minimises: plain or priced.
      priced: accept what lowers these costs if True, what lowers the plain ones otherwise.
      size: most nodes of a tree. seed: of the random seed nodes. cost: float64 [L], scratch.

    Returns:
      Number of trees that were improved.
    """
    np.random.seed(seed)
    count = len(labels)
    member = np.full(count, -1, np.int64)
    order = np.empty(size, np.int64)
    parent = np.empty(size, np.int64)
    link = np.empty(size, np.int64)
    new = np.empty(size, np.int64)
    most = 1
    for f in range(len(flat.source)):
        most = max(most, flat.rows[f], flat.columns[f])
    best = np.empty(most)
    given = np.empty(most)
    weights = np.zeros(len(usage))
    improved = 0
    for tree in range(trees):
        found = _grow(flat, np.random.randint(count), size, member, tree, order, parent, link)
        _minimise(flat, labels, unary, tables, member, tree, order[:found], parent, link, new, cost, best, given)
        changed = 0
        for step in range(found):
            if new[step] != labels[order[step]]:
                changed += 1
        if changed == 0:
            continue
        if priced:
            before = _tree_cost(flat, labels, unary, tables, member, tree, order[:found])
        else:
            before = _tree_cost(flat, labels, flat.unary, flat.tables, member, tree, order[:found])
        _exchange(flat, labels, usage, weights, order[:found], new)
        if priced:
            after = _tree_cost(flat, labels, unary, tables, member, tree, order[:found])
        else:
            after = _tree_cost(flat, labels, flat.unary, flat.tables, member, tree, order[:found])
        if after < before - 1e-12 * abs(before) and _fits_at(flat, usage, order[:found]):
            improved += 1
        else:
            _exchange(flat, labels, usage, weights, order[:found], new)
    return improved


@numba.njit(cache=True, nogil=True)
def _grow(flat, root, size, member, tree, order, parent, link):
    """Grows an induced tree breadth first; returns its number of nodes. member[node] = tree for its nodes."""
    order[0], parent[0], link[0] = root, -1, -1
    member[root] = tree
    found, at = 1, 0
    while at < found and found < size:
        node = order[at]
        for side in range(2):
            first = flat.out_start[node] if side == 0 else flat.in_start[node]
            last = flat.out_start[node + 1] if side == 0 else flat.in_start[node + 1]
            for p in range(first, last):
                f = flat.out_factors[p] if side == 0 else flat.in_factors[p]
                other = flat.target[f] if side == 0 else flat.source[f]
                if member[other] != tree and found < size and _links(flat, other, member, tree) == 1:
                    order[found], parent[found], link[found] = other, at, f
                    member[other] = tree
                    found += 1
        at += 1
    return found


@numba.njit(cache=True, nogil=True)
def _links(flat, node, member, tree):
    """Factors between a node and a tree; 2 stands for two or more."""
    links = 0
    for p in range(flat.out_start[node], flat.out_start[node + 1]):
        if member[flat.target[flat.out_factors[p]]] == tree:
            links += 1
            if links == 2:
                return 2
    for p in range(flat.in_start[node], flat.in_start[node + 1]):
        if member[flat.source[flat.in_factors[p]]] == tree:
            links += 1
            if links == 2:
                return 2
    return links


@numba.njit(cache=True, nogil=True, fastmath={"nnan", "nsz", "reassoc", "contract"})
def _minimise(flat, labels, unary, tables, member, tree, order, parent, link, new, cost, best, given):
    """Writes the tree's best labels, all other nodes fixed, into `new`."""
    for step in range(len(order)):
        i = order[step]
        first = flat.label_start[i]
        count = flat.label_start[i + 1] - first
        for k in range(count):
            cost[first + k] = unary[first + k]
        for p in range(flat.in_start[i], flat.in_start[i + 1]):
            f = flat.in_factors[p]
            other = flat.source[f]
            if member[other] != tree:
                line = flat.table[f] + flat.classes[flat.source_map[f] + labels[other]] * flat.columns[f]
                start = flat.target_map[f]
                for k in range(count):
                    cost[first + k] += tables[line + flat.classes[start + k]]
        for p in range(flat.out_start[i], flat.out_start[i + 1]):
            f = flat.out_factors[p]
            other = flat.target[f]
            if member[other] != tree:
                place = flat.table[f] + flat.classes[flat.target_map[f] + labels[other]]
                start, stride = flat.source_map[f], flat.columns[f]
                for k in range(count):
                    cost[first + k] += tables[place + stride * flat.classes[start + k]]
    for step in range(len(order) - 1, 0, -1):  # from the leaves to the root
        i, j, f = order[step], order[parent[step]], link[step]
        rows, columns, place = flat.rows[f], flat.columns[f], flat.table[f]
        child_is_target = flat.target[f] == i
        child_map = flat.target_map[f] if child_is_target else flat.source_map[f]
        parent_map = flat.source_map[f] if child_is_target else flat.target_map[f]
        for c in range(len(best)):
            best[c] = np.inf
            given[c] = np.inf
        for k in range(flat.label_start[i + 1] - flat.label_start[i]):
            c = flat.classes[child_map + k]
            best[c] = min(best[c], cost[flat.label_start[i] + k])
        if child_is_target:
            for a in range(rows):
                low = np.inf
                for b in range(columns):
                    low = min(low, tables[place + a * columns + b] + best[b])
                given[a] = low
        else:
            for a in range(rows):
                have = best[a]
                for b in range(columns):
                    given[b] = min(given[b], tables[place + a * columns + b] + have)
        for k in range(flat.label_start[j + 1] - flat.label_start[j]):
            cost[flat.label_start[j] + k] += given[flat.classes[parent_map + k]]
    for step in range(len(order)):  # from the root to the leaves
        i = order[step]
        first = flat.label_start[i]
        low, choice = np.inf, labels[i]
        if step == 0:
            for k in range(flat.label_start[i + 1] - first):
                if cost[first + k] < low:
                    low, choice = cost[first + k], k
        else:
            f, above = link[step], new[parent[step]]
            if flat.target[f] == i:
                place = flat.table[f] + flat.classes[flat.source_map[f] + above] * flat.columns[f]
                start, stride = flat.target_map[f], 1
            else:
                place = flat.table[f] + flat.classes[flat.target_map[f] + above]
                start, stride = flat.source_map[f], flat.columns[f]
            for k in range(flat.label_start[i + 1] - first):
                value = cost[first + k] + tables[place + stride * flat.classes[start + k]]
                if value < low:
                    low, choice = value, k
        new[step] = choice


@numba.njit(cache=True, nogil=True)
def _tree_cost(flat, labels, unary, tables, member, tree, order):
    """Cost of all terms that the tree's labels touch."""
    total = 0.0
    for i in order:
        total += unary[flat.label_start[i] + labels[i]]
        for p in range(flat.out_start[i], flat.out_start[i + 1]):
            f = flat.out_factors[p]
            a = flat.classes[flat.source_map[f] + labels[i]]
            b = flat.classes[flat.target_map[f] + labels[flat.target[f]]]
            total += tables[flat.table[f] + a * flat.columns[f] + b]
        for p in range(flat.in_start[i], flat.in_start[i + 1]):
            f = flat.in_factors[p]
            if member[flat.source[f]] != tree:
                a = flat.classes[flat.source_map[f] + labels[flat.source[f]]]
                b = flat.classes[flat.target_map[f] + labels[i]]
                total += tables[flat.table[f] + a * flat.columns[f] + b]
    return total


@numba.njit(cache=True, nogil=True)
def _exchange(flat, labels, usage, weights, order, new):
    """Swaps the labels of the nodes with `new`, keeping `usage` up to date; a second call undoes the first."""
    for step in range(len(order)):
        i = order[step]
        old = labels[i]
        if new[step] != old:
            occupy(flat, labels, usage, weights, i, old, -1.0)
            labels[i] = new[step]
            occupy(flat, labels, usage, weights, i, labels[i], 1.0)
            new[step] = old


@numba.njit(cache=True, nogil=True)
def _fits_at(flat, usage, order):
    """Whether the usage is within the capacity wherever the nodes take any."""
    for i in order:
        for r in range(flat.usage_start[i], flat.usage_start[i + 1]):
            for t in range(flat.usage_first[r], flat.usage_last[r]):
                if usage[t] > flat.capacity[t]:
                    return False
        for p in range(flat.in_start[i], flat.in_start[i + 1]):
            f = flat.in_factors[p]
            for r in range(flat.pair_start[f], flat.pair_start[f + 1]):
                for t in range(flat.pair_first[r], flat.pair_last[r]):
                    if usage[t] > flat.capacity[t]:
                        return False
        for p in range(flat.out_start[i], flat.out_start[i + 1]):
            f = flat.out_factors[p]
            for r in range(flat.pair_start[f], flat.pair_start[f + 1]):
                for t in range(flat.pair_first[r], flat.pair_last[r]):
                    if usage[t] > flat.capacity[t]:
                        return False
    return True
