"""Simplifies a `Network` without losing any optimum value.

Each rule keeps at least one optimal solution reachable (through the network's postsolve stack):

  1. a label whose unary cost, or whose row in some factor, is entirely +inf cannot be taken: removed;
  2. a label that costs at least as much as another whatever the neighbours do, and never takes less capacity, is
     dominated (Goldstein's criterion: unary difference + sum over factors of the largest row difference <= 0): removed;
  3. classes with equal rows are one class; row and column minima move into the unary costs; a factor left with one
     class at an end is a unary cost;
  4. parallel factors become one over joint classes, where that stays small;
  5. a node without capacity usage that has at most two factors is minimised out: the result is a constant, a unary
     cost or a factor between its two neighbours;
  6. the capacity's own presolve (`capacity.py`).

A lifted network (`Network.multiplicity`) stands for all copies of its nodes, so each rule is applied only where it
could be applied to every copy alone: a node is minimised out only if each copy has its own copies of the factors;
factors are parallel, and both neighbours one, only if that holds copy by copy. What a label takes for all copies
together says nothing about one of them.

Results of table work are remembered by the identity of the interned arrays, so copies of a layer cost look-ups.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from autoshard.solver.reduce.capacity import compress_instants
from autoshard.solver.reduce.network import CopyPairs, Demand, Elimination, Factor, Network

JOINT_ENTRIES = 4096
"""Parallel factors are merged, and nodes eliminated, freely while the new table has at most this many entries."""
LOOKS = 500
"""Nodes looked at between two questions whether to stop."""
PAIRWISE_WORK = 20_000_000
"""Labels are compared pair by pair only while (labels^2 x factors) is at most this; else only those alike to others."""
DOMINANCE_WORK = 60_000_000
"""Row differences of a table are compared only while (rows^2 x columns) is at most this."""


def presolve(network: Network, stop: Callable[[], bool] = lambda: False) -> None:
    """Applies the rules until none changes anything; sets `network.infeasible` where a rule proves it.

    `stop` is asked now and then; once it says so, the network is left as it is by then, an equal problem still.
    """
    for _ in range(4):
        if network.infeasible or stop():
            return
        unfit = compress_instants(network)
        if network.infeasible:
            return
        if network.multiplicity is not None:
            unfit = {}
        network.is_cut_by_capacity |= bool(unfit)
        for node, keep in unfit.items():
            restrict(network, node, keep)
        before = (len(network.factors), sum(network.alive), sum(map(len, network.labels)))
        _Reducer(network).run(stop)
        if network.infeasible or not len(network.instants) and not unfit:
            return
        if before == (len(network.factors), sum(network.alive), sum(map(len, network.labels))) and not unfit:
            return


def restrict(network: Network, node: int, keep: np.ndarray) -> None:
    """Keeps only the labels of `node` where `keep` is True; an empty node makes the network infeasible."""
    if keep.all():
        return
    if not keep.any():
        network.infeasible = True
        return
    pool = network.pool
    network.labels[node] = pool.intern(network.labels[node][keep], np.int64)
    network.unary[node] = pool.intern(network.unary[node][keep])
    network.demands[node] = [
        Demand(demand.start, demand.stop, pool.intern(demand.amounts[keep])) for demand in network.demands[node]
    ]
    for key in network.incident[node]:
        factor = network.factors[key]
        if factor.i == node:
            factor.map_i = pool.intern(factor.map_i[keep], np.int64)
        else:
            factor.map_j = pool.intern(factor.map_j[keep], np.int64)


class _Reducer:
    """One run of rules 1 to 5: a queue of nodes to look at again."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.pool = network.pool
        self.memo = network.memo
        self.queue: deque[int] = deque(node for node, alive in enumerate(network.alive) if alive)
        self.queued = set(self.queue)

    def run(self, stop: Callable[[], bool]) -> None:
        network = self.network
        pairs: dict[tuple[int, int], list[int]] = {}
        for key in list(network.factors):
            factor = network.factors[key]
            pairs.setdefault((factor.i, factor.j), []).append(key)
        for keys in pairs.values():
            for key in keys:
                self._tidy(key)
            for alike in self._parallel([key for key in keys if key in network.factors]):
                self._merge_parallel(alike)
        looks = 0
        while self.queue and not network.infeasible:
            looks += 1
            if looks % LOOKS == 0 and stop():
                return
            node = self.queue.popleft()
            self.queued.discard(node)
            if network.alive[node]:
                self._look_at(node)

    def _push(self, node: int) -> None:
        if node not in self.queued and self.network.alive[node]:
            self.queued.add(node)
            self.queue.append(node)

    def _look_at(self, node: int) -> None:
        network = self.network
        keep = self._supported(node)
        if not keep.any():
            network.infeasible = True
            return
        if not keep.all():
            self._restrict(node, keep)
        keep = self._undominated(node)
        if not keep.all():
            self._restrict(node, keep)
        if not network.demands[node] and len(network.incident[node]) <= 2:
            self._eliminate(node)

    def _restrict(self, node: int, keep: np.ndarray) -> None:
        restrict(self.network, node, keep)
        for key in list(self.network.incident[node]):
            factor = self.network.factors[key]
            self._push(factor.i + factor.j - node)
            self._tidy(key)
        self._push(node)

    def _supported(self, node: int) -> np.ndarray:
        """Rule 1."""
        network = self.network
        keep = np.isfinite(network.unary[node])
        for key in network.incident[node]:
            factor = network.factors[key]
            table, own = _from_side(network, factor, node)
            memo = ("supported", id(table))
            if memo not in self.memo:
                rows = np.isfinite(table).any(axis=1)
                self.memo[memo] = None if rows.all() else rows
            rows = self.memo[memo]
            if rows is not None:
                keep = keep & rows[own]
        return keep

    def _tidy(self, key: int) -> None:
        """Rule 3 on one factor."""
        network = self.network
        factor = network.factors[key]
        memo = ("tidy", id(factor.map_i), id(factor.map_j), id(factor.table), *(id(r.amounts) for r in factor.demands))
        if memo not in self.memo:
            self.memo[memo] = self._tidied(factor)
        map_i, map_j, table, amounts, shift_i, shift_j = self.memo[memo]
        for node, shift in ((factor.i, shift_i), (factor.j, shift_j)):
            if shift is not None:
                self._add_unary(node, network.times(factor, node) * shift)
                self._push(node)
        if table is not factor.table or map_i is not factor.map_i or map_j is not factor.map_j:
            factor.map_i, factor.map_j, factor.table = map_i, map_j, table
            factor.demands = [
                Demand(demand.start, demand.stop, own) for demand, own in zip(factor.demands, amounts, strict=True)
            ]
        rows, columns = table.shape
        if rows == 1 or columns == 1:
            self._unbind(key)

    def _add_unary(self, node: int, costs: np.ndarray) -> None:
        self.network.unary[node] = self.pool.intern(self.network.unary[node] + costs)

    def _unbind(self, key: int) -> None:
        """Turns a factor with a single class at one end (its finite entries are zero by then) into unary terms."""
        factor = self.network.detach(key)
        rows, _ = factor.table.shape
        node, own, axis = (factor.j, factor.map_j, 0) if rows == 1 else (factor.i, factor.map_i, 1)
        line = factor.table.min(axis=axis)
        times = self.network.times(factor, node)
        if (line != 0).any():
            self._add_unary(node, times * line[own])
        for demand in factor.demands:
            amounts = times * (demand.amounts[0] if axis == 0 else demand.amounts[:, 0])
            self.network.demands[node].append(Demand(demand.start, demand.stop, self.pool.intern(amounts[own])))
        self._push(factor.i)
        self._push(factor.j)

    def _tidied(self, factor: Factor) -> tuple:
        layers = [factor.table, *(demand.amounts for demand in factor.demands)]
        map_i, layers = _compact(factor.map_i, layers, axis=0)
        map_j, layers = _compact(factor.map_j, layers, axis=1)
        table = layers[0].copy()
        shift_i = shift_j = None
        row = table.min(axis=1)
        row[~np.isfinite(row)] = 0.0
        if row.any():
            table -= row[:, None]
            shift_i = row[map_i]
        column = table.min(axis=0)
        column[~np.isfinite(column)] = 0.0
        if column.any():
            table -= column[None, :]
            shift_j = column[map_j]
        layers[0] = table
        map_i, layers = _merge_equal(map_i, layers, axis=0)
        map_j, layers = _merge_equal(map_j, layers, axis=1)
        table, *amounts = [self.pool.intern(np.ascontiguousarray(layer)) for layer in layers]
        return (self.pool.intern(map_i, np.int64), self.pool.intern(map_j, np.int64), table, amounts, shift_i, shift_j)

    def _merge_parallel(self, keys: list[int]) -> None:
        """Rule 4: folds the factors of one pair of nodes into as few as stay small."""
        network = self.network
        while len(keys) > 1:
            first, second = network.factors[keys[0]], network.factors[keys[1]]
            joined = self._joined(first, second)
            if joined is None:
                keys = keys[1:]
                continue
            network.detach(keys[0])
            network.detach(keys[1])
            key = network.attach(joined)
            self._tidy(key)
            keys = [key, *keys[2:]] if key in network.factors else keys[2:]

    def _joined(self, first: Factor, second: Factor) -> Factor | None:
        memo = (
            "joint",
            id(first.map_i),
            id(first.map_j),
            id(first.table),
            id(second.map_i),
            id(second.map_j),
            id(second.table),
        )
        if memo not in self.memo:
            self.memo[memo] = self._joint(first, second)
        found = self.memo[memo]
        if found is None:
            return None
        map_i, map_j, table, (i1, j1, i2, j2) = found
        demands = [Demand(r.start, r.stop, self.pool.intern(r.amounts[np.ix_(i1, j1)])) for r in first.demands]
        demands += [Demand(r.start, r.stop, self.pool.intern(r.amounts[np.ix_(i2, j2)])) for r in second.demands]
        return Factor(first.i, first.j, map_i, map_j, table, demands, first.copy_pairs)

    def _joint(self, first: Factor, second: Factor) -> tuple | None:
        pair_i, map_i = np.unique(first.map_i * second.table.shape[0] + second.map_i, return_inverse=True)
        pair_j, map_j = np.unique(first.map_j * second.table.shape[1] + second.map_j, return_inverse=True)
        if len(pair_i) * len(pair_j) > max(JOINT_ENTRIES, 2 * (first.table.size + second.table.size)):
            return None
        i1, i2 = np.divmod(pair_i, second.table.shape[0])
        j1, j2 = np.divmod(pair_j, second.table.shape[1])
        table = first.table[np.ix_(i1, j1)] + second.table[np.ix_(i2, j2)]
        intern = self.pool.intern
        return intern(map_i, np.int64), intern(map_j, np.int64), intern(table), (i1, j1, i2, j2)

    def _undominated(self, node: int) -> np.ndarray:
        """Rule 2."""
        network = self.network
        count = len(network.labels[node])
        sides: dict[tuple, list] = {}  # alike factors count together: a hub has hundreds
        for key in network.incident[node]:
            factor = network.factors[key]
            table, own = _from_side(network, factor, node)
            demands = tuple(id(demand.amounts) for demand in factor.demands)
            alike = (id(table), id(own), factor.i == node, demands)
            sides.setdefault(alike, [factor, table, own, 0])[3] += network.times(factor, node)
        parts = frozenset((alike, times) for alike, (_, _, _, times) in sides.items())
        memo = ("undominated", id(network.unary[node]), parts, *(id(r.amounts) for r in network.demands[node]))
        if memo in self.memo:
            return self.memo[memo]
        unary = network.unary[node]
        if count * count * max(len(sides), 1) > PAIRWISE_WORK:
            columns = [own for _, _, own, _ in sides.values()]
            amounts = [demand.amounts for demand in network.demands[node]]
            self.memo[memo] = _cheapest_of_alike(unary, columns, amounts)
            return self.memo[memo]
        worse = unary[:, None] - unary[None, :]  # [y, x]: how much more y can cost than x
        possible = np.ones((count, count), bool)
        for demand in network.demands[node]:
            possible &= demand.amounts[:, None] <= demand.amounts[None, :]
        for factor, table, own, times in sides.values():
            difference = self._row_differences(table)
            if difference is None:
                possible &= own[:, None] == own[None, :]
                continue
            worse = worse + times * difference[own[:, None], own[None, :]]
            for demand in factor.demands:
                amounts = demand.amounts if factor.i == node else demand.amounts.T
                less = (amounts[:, None, :] <= amounts[None, :, :]).all(axis=2)
                possible &= less[own[:, None], own[None, :]]
        dominates = possible & (worse <= 0)
        np.fill_diagonal(dominates, False)
        keep = np.ones(count, bool)
        for x in range(count - 1, -1, -1):  # of equals the first stays
            if (dominates[:, x] & keep).any():
                keep[x] = False
        self.memo[memo] = keep
        return keep

    def _row_differences(self, table: np.ndarray) -> np.ndarray | None:
        """[a, a']: max over columns of table[a] - table[a'] where table[a'] is finite; None if too much work."""
        memo = ("differences", id(table))
        if memo not in self.memo:
            rows, columns = table.shape
            if rows * rows * columns > DOMINANCE_WORK:
                self.memo[memo] = None
            else:
                result = np.empty((rows, rows))
                finite = np.isfinite(table)
                if finite.all():
                    for row in range(rows):
                        result[row] = (table[row] - table).max(axis=1)
                else:
                    safe = np.where(finite, table, 0.0)
                    for row in range(rows):
                        result[row] = np.where(finite, table[row] - safe, -np.inf).max(axis=1)
                self.memo[memo] = result
        return self.memo[memo]

    def _eliminate(self, node: int) -> None:
        """Rule 5."""
        network = self.network
        keys = list(network.incident[node])
        factors = [network.factors[key] for key in keys]
        if any(factor.demands for factor in factors):
            return
        sides = [_from_side(network, factor, node) for factor in factors]
        others = [factor.i + factor.j - node for factor in factors]
        copies = None
        if network.multiplicity is not None:
            if any(network.factor_multiplicity(factor) != network.multiplicity[node] for factor in factors):
                return
            copies = _neighbours_by_copy(factors, node)
            if len(factors) == 2 and others[0] == others[1] and not np.array_equal(copies[0], copies[1]):
                return
        links = tuple(
            (other, network.labels[other], factor.map_i if factor.i == other else factor.map_j, own, table)
            for other, factor, (table, own) in zip(others, factors, sides, strict=True)
        )
        if len(keys) == 2:
            entries = sides[0][0].shape[1] * sides[1][0].shape[1]
            if entries > max(JOINT_ENTRIES, 2 * (sides[0][0].size + sides[1][0].size)):
                return
        network.postsolve_stack.append(Elimination(node, network.labels[node], network.unary[node], links))
        for key in keys:
            network.detach(key)
        network.alive[node] = False
        result = self._minimised(network.unary[node], sides)
        if not keys:
            network.constant += float(result) * (1 if network.multiplicity is None else int(network.multiplicity[node]))
        elif len(keys) == 1:
            self._add_unary(others[0], network.times(factors[0], others[0]) * result[links[0][2]])
        elif others[0] == others[1]:
            times = network.times(factors[0], others[0])
            self._add_unary(others[0], times * result[links[0][2], links[1][2]])
        else:
            self._join(others, links, result, copies)
        for other in others:
            self._push(other)

    def _join(self, others: list[int], links: tuple, table: np.ndarray, copies: tuple[np.ndarray, ...] | None) -> None:
        network = self.network
        first, second = (0, 1) if others[0] < others[1] else (1, 0)
        if first == 1:
            table = network.transposed(table)
        pairs = None if copies is None else CopyPairs.of(copies[first], copies[second])
        low, high = others[first], others[second]
        new = network.attach(Factor(low, high, links[first][2], links[second][2], table, [], pairs))
        self._tidy(new)
        for alike in self._parallel([key for key in network.incident[low] if network.factors[key].j == high]):
            self._merge_parallel(alike)

    def _parallel(self, keys: list[int]) -> list[list[int]]:
        """Those of the factors between two nodes that join the same copies, two or more together."""
        groups: list[list[int]] = []
        for key in keys:
            copies = self.network.factors[key].copy_pairs
            alike = next((g for g in groups if self.network.factors[g[0]].copy_pairs == copies), None)
            if alike is None:
                groups.append([key])
            else:
                alike.append(key)
        return [group for group in groups if len(group) > 1]

    def _minimised(self, unary: np.ndarray, sides: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """min over labels x of unary[x] + the tables' rows of x; axes: the columns of each table."""
        memo = ("minimised", id(unary), *(id(part) for side in sides for part in side))
        if memo in self.memo:
            return self.memo[memo]
        if not sides:
            return unary.min()
        if len(sides) == 1:
            ((table, own),) = sides
            result = (unary[:, None] + table[own]).min(axis=0)
        else:
            (left, own_left), (right, own_right) = sides
            result = np.full((left.shape[1], right.shape[1]), np.inf)
            for label in range(len(unary)):
                row = unary[label] + left[own_left[label]][:, None] + right[own_right[label]][None, :]
                np.minimum(result, row, out=result)
        self.memo[memo] = self.pool.intern(result)
        return self.memo[memo]


def _from_side(network: Network, factor: Factor, node: int) -> tuple[np.ndarray, np.ndarray]:
    """(table with the node's classes on the rows, the node's class map)."""
    if factor.i == node:
        return factor.table, factor.map_i
    return network.transposed(factor.table), factor.map_j


def _neighbours_by_copy(factors: list[Factor], node: int) -> tuple[np.ndarray, ...]:
    """For each factor of a node whose copies have one copy of it each, the neighbour's copy, by the node's copies."""
    pairs = [(factor.i == node, factor.copy_pairs) for factor in factors if factor.copy_pairs is not None]
    sides = [(pair.i, pair.j) if is_first else (pair.j, pair.i) for is_first, pair in pairs]
    return tuple(other[np.argsort(own, kind="stable")] for own, other in sides)


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


def _compact(classes: np.ndarray, layers: list[np.ndarray], axis: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Drops classes that no label has."""
    present, renamed = np.unique(classes, return_inverse=True)
    if len(present) == layers[0].shape[axis]:
        return classes, layers
    return renamed, [np.take(layer, present, axis=axis) for layer in layers]


def _merge_equal(classes: np.ndarray, layers: list[np.ndarray], axis: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Makes one class of classes with equal lines in all layers."""
    lines = [layer if axis == 0 else layer.T for layer in layers]
    first: dict[tuple[bytes, ...], int] = {}
    kept: list[int] = []
    renaming = np.empty(layers[0].shape[axis], np.int64)
    for line in range(len(renaming)):
        content = tuple((layer[line] + 0.0).tobytes() for layer in lines)
        if content not in first:
            first[content] = len(kept)
            kept.append(line)
        renaming[line] = first[content]
    if len(kept) == len(renaming):
        return classes, layers
    return renaming[classes], [np.take(layer, kept, axis=axis) for layer in layers]
