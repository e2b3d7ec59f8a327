"""Local search over trees: the labels of many nodes change at once, exactly.

From a seed node an induced tree is grown: a node joins if exactly one factor links it to the tree. All other nodes keep
their labels; the best labels of the whole tree then follow by dynamic programming over its factors. The new labels are
taken if they cost less and fit the capacity. Priced costs (`messages.py`) steer the choice towards labels that take
little where capacity is dear.
"""

from collections.abc import Callable

import numpy as np

from autoshard.solver.factor_graph import FactorGraph
from autoshard.solver.kernels import FAST, inner, kernel
from autoshard.solver.labelling import fits, labels_cost, labels_usage
from autoshard.solver.primal.local_search import add_usage, iterated_conditional_modes
from autoshard.solver.row_minima import row_minima

SIZES = (8, 30, 100, 400)
"""Most nodes of a tree, in turn: small trees fit more easily, large ones change more."""


def descend_trees(
    graph: FactorGraph,
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
    labels, best, lowest = labels.copy(), labels.copy(), labels_cost(graph, labels)
    cost = np.zeros(max(len(graph.unary), 1))
    forbid = np.full(len(graph.capacity), np.inf)
    for turn in range(rounds):
        if stop():
            break
        size = SIZES[turn % len(SIZES)]
        trees = 2 * len(labels) // size + 1
        usage = labels_usage(graph, labels)
        if turn % 2 == 0:
            improve_trees(graph, labels, usage, unary, tables, size, trees, seed + turn, cost)
        else:
            improve_trees(graph, labels, usage, graph.unary, graph.tables, size, trees, seed + turn, cost)
        iterated_conditional_modes(graph, labels, labels_usage(graph, labels), forbid, 20, cost)
        now = labels_cost(graph, labels)
        if not fits(graph, labels) or now > lowest + 0.02 * abs(lowest):
            labels = best.copy()
        elif now < lowest:
            best, lowest = labels.copy(), now
    return best


@kernel()
def improve_trees(
    graph: FactorGraph,
    labels: np.ndarray,
    usage: np.ndarray,
    unary: np.ndarray,
    tables: np.ndarray,
    size: int,
    trees: int,
    seed: int,
    cost: np.ndarray,
) -> int:
    """Improves up to `trees` random trees in place.

    Args:
      labels int64 [n], usage float64 [T]: updated; must fit the capacity and go on fitting.
      unary, tables: costs that should fall: plain or priced.
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
    for f in range(len(graph.source)):
        most = max(most, graph.rows[f], graph.columns[f])
    best = np.empty(most)
    given = np.empty(most)
    weights = np.zeros(len(usage))
    improved = 0
    for tree in range(trees):
        found = _grow(graph, np.random.randint(count), size, member, tree, order, parent, link)
        _minimise(graph, labels, unary, tables, member, tree, order[:found], parent, link, new, cost, best, given)
        changed = 0
        for step in range(found):
            if new[step] != labels[order[step]]:
                changed += 1
        if changed == 0:
            continue
        before = _tree_cost(graph, labels, unary, tables, member, tree, order[:found])
        _exchange(graph, labels, usage, weights, order[:found], new)
        after = _tree_cost(graph, labels, unary, tables, member, tree, order[:found])
        if after < before - 1e-12 * abs(before) and _fits_at(graph, usage, order[:found]):
            improved += 1
        else:
            _exchange(graph, labels, usage, weights, order[:found], new)
    return improved


@inner()
def _grow(graph, root, size, member, tree, order, parent, link):
    """Grows an induced tree breadth first; returns its number of nodes. member[node] = tree for its nodes."""
    order[0], parent[0], link[0] = root, -1, -1
    member[root] = tree
    found, at = 1, 0
    while at < found and found < size:
        node = order[at]
        for side in range(2):
            first = graph.out_start[node] if side == 0 else graph.in_start[node]
            last = graph.out_start[node + 1] if side == 0 else graph.in_start[node + 1]
            for p in range(first, last):
                f = graph.out_factors[p] if side == 0 else graph.in_factors[p]
                other = graph.target[f] if side == 0 else graph.source[f]
                if member[other] != tree and found < size and _links(graph, other, member, tree) == 1:
                    order[found], parent[found], link[found] = other, at, f
                    member[other] = tree
                    found += 1
        at += 1
    return found


@inner()
def _links(graph, node, member, tree):
    """Factors between a node and a tree; 2 stands for two or more."""
    links = 0
    for p in range(graph.out_start[node], graph.out_start[node + 1]):
        if member[graph.target[graph.out_factors[p]]] == tree:
            links += 1
            if links == 2:
                return 2
    for p in range(graph.in_start[node], graph.in_start[node + 1]):
        if member[graph.source[graph.in_factors[p]]] == tree:
            links += 1
            if links == 2:
                return 2
    return links


@inner(FAST)
def _minimise(graph, labels, unary, tables, member, tree, order, parent, link, new, cost, best, given):
    """Writes the tree's best labels, all other nodes fixed, into `new`."""
    for step in range(len(order)):
        i = order[step]
        first = graph.label_start[i]
        count = graph.label_start[i + 1] - first
        for k in range(count):
            cost[first + k] = unary[first + k]
        for p in range(graph.in_start[i], graph.in_start[i + 1]):
            f = graph.in_factors[p]
            other = graph.source[f]
            if member[other] != tree:
                line = graph.table[f] + graph.classes[graph.source_map[f] + labels[other]] * graph.columns[f]
                start = graph.target_map[f]
                for k in range(count):
                    cost[first + k] += tables[line + graph.classes[start + k]]
        for p in range(graph.out_start[i], graph.out_start[i + 1]):
            f = graph.out_factors[p]
            other = graph.target[f]
            if member[other] != tree:
                place = graph.table[f] + graph.classes[graph.target_map[f] + labels[other]]
                start, stride = graph.source_map[f], graph.columns[f]
                for k in range(count):
                    cost[first + k] += tables[place + stride * graph.classes[start + k]]
    for step in range(len(order) - 1, 0, -1):  # from the leaves to the root
        i, j, f = order[step], order[parent[step]], link[step]
        rows, columns, place = graph.rows[f], graph.columns[f], graph.table[f]
        child_is_target = graph.target[f] == i
        child_map = graph.target_map[f] if child_is_target else graph.source_map[f]
        parent_map = graph.source_map[f] if child_is_target else graph.target_map[f]
        for c in range(len(best)):
            best[c] = np.inf
            given[c] = np.inf
        for k in range(graph.label_start[i + 1] - graph.label_start[i]):
            c = graph.classes[child_map + k]
            best[c] = min(best[c], cost[graph.label_start[i] + k])
        if child_is_target:
            row_minima(tables[place : place + rows * columns], best, 1.0, rows, columns, given)
        else:
            least = given[:columns]
            for a in range(rows):
                have = best[a]
                row = tables[place + a * columns : place + (a + 1) * columns]
                for b in range(columns):
                    least[b] = min(least[b], row[b] + have)
        for k in range(graph.label_start[j + 1] - graph.label_start[j]):
            cost[graph.label_start[j] + k] += given[graph.classes[parent_map + k]]
    for step in range(len(order)):  # from the root to the leaves
        i = order[step]
        first = graph.label_start[i]
        low, choice = np.inf, labels[i]
        if step == 0:
            for k in range(graph.label_start[i + 1] - first):
                if cost[first + k] < low:
                    low, choice = cost[first + k], k
        else:
            f, above = link[step], new[parent[step]]
            if graph.target[f] == i:
                place = graph.table[f] + graph.classes[graph.source_map[f] + above] * graph.columns[f]
                start, stride = graph.target_map[f], 1
            else:
                place = graph.table[f] + graph.classes[graph.target_map[f] + above]
                start, stride = graph.source_map[f], graph.columns[f]
            for k in range(graph.label_start[i + 1] - first):
                value = cost[first + k] + tables[place + stride * graph.classes[start + k]]
                if value < low:
                    low, choice = value, k
        new[step] = choice


@inner()
def _tree_cost(graph, labels, unary, tables, member, tree, order):
    """Cost of all terms that the tree's labels touch."""
    total = 0.0
    for i in order:
        total += unary[graph.label_start[i] + labels[i]]
        for p in range(graph.out_start[i], graph.out_start[i + 1]):
            f = graph.out_factors[p]
            a = graph.classes[graph.source_map[f] + labels[i]]
            b = graph.classes[graph.target_map[f] + labels[graph.target[f]]]
            total += tables[graph.table[f] + a * graph.columns[f] + b]
        for p in range(graph.in_start[i], graph.in_start[i + 1]):
            f = graph.in_factors[p]
            if member[graph.source[f]] != tree:
                a = graph.classes[graph.source_map[f] + labels[graph.source[f]]]
                b = graph.classes[graph.target_map[f] + labels[i]]
                total += tables[graph.table[f] + a * graph.columns[f] + b]
    return total


@inner()
def _exchange(graph, labels, usage, weights, order, new):
    """Swaps the labels of the nodes with `new`, keeping `usage` up to date; a second call undoes the first."""
    for step in range(len(order)):
        i = order[step]
        old = labels[i]
        if new[step] != old:
            add_usage(graph, labels, usage, weights, i, old, -1.0)
            labels[i] = new[step]
            add_usage(graph, labels, usage, weights, i, labels[i], 1.0)
            new[step] = old


@inner()
def _fits_at(graph, usage, order):
    """Whether the usage is within the capacity wherever the nodes take any."""
    for i in order:
        for r in range(graph.usage_start[i], graph.usage_start[i + 1]):
            for t in range(graph.usage_first[r], graph.usage_last[r]):
                if usage[t] > graph.capacity[t]:
                    return False
        for p in range(graph.in_start[i], graph.in_start[i + 1]):
            f = graph.in_factors[p]
            for r in range(graph.pair_start[f], graph.pair_start[f + 1]):
                for t in range(graph.pair_first[r], graph.pair_last[r]):
                    if usage[t] > graph.capacity[t]:
                        return False
        for p in range(graph.out_start[i], graph.out_start[i + 1]):
            f = graph.out_factors[p]
            for r in range(graph.pair_start[f], graph.pair_start[f + 1]):
                for t in range(graph.pair_first[r], graph.pair_last[r]):
                    if usage[t] > graph.capacity[t]:
                        return False
    return True
