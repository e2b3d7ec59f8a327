"""Simplifies a `Network` without losing any optimum value.

Each rule keeps at least one optimal solution reachable (through the network's postsolve stack):

  1. a label whose unary cost, or whose row in some factor, is entirely +inf cannot be taken: removed;
  2. a label that costs at least as much as another whatever the neighbours do, and never takes less capacity, is
     dominated by Goldstein's criterion: removed (1 and 2: `dominance.py`);
  3. classes with equal rows are one class; row and column minima move into the unary costs; a factor left with one
     class at an end is a unary cost;
  4. parallel factors become one over joint classes, where that stays small;
  5. a node without capacity usage that has at most two factors is minimised out: the result is a constant, a unary
     cost or a factor between its two neighbours (3 to 5: `tables.py`);
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
from autoshard.solver.reduce.dominance import supported_labels, undominated_labels
from autoshard.solver.reduce.network import CopyPairs, Demand, Elimination, Factor, Network
from autoshard.solver.reduce.tables import JOINT_ENTRIES, joined, minimised, tidied

LOOKS = 500
"""Nodes looked at between two questions whether to stop."""


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
        keep = supported_labels(network, node)
        if not keep.any():
            network.infeasible = True
            return
        if not keep.all():
            self._restrict(node, keep)
        keep = undominated_labels(network, node)
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

    def _tidy(self, key: int) -> None:
        """Rule 3 on one factor."""
        network = self.network
        factor = network.factors[key]
        memo = ("tidy", id(factor.map_i), id(factor.map_j), id(factor.table), *(id(r.amounts) for r in factor.demands))
        if memo not in self.memo:
            self.memo[memo] = tidied(self.pool, factor)
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

    def _merge_parallel(self, keys: list[int]) -> None:
        """Rule 4: folds the factors of one pair of nodes into as few as stay small."""
        network = self.network
        while len(keys) > 1:
            first, second = network.factors[keys[0]], network.factors[keys[1]]
            merged = joined(network, first, second)
            if merged is None:
                keys = keys[1:]
                continue
            network.detach(keys[0])
            network.detach(keys[1])
            key = network.attach(merged)
            self._tidy(key)
            keys = [key, *keys[2:]] if key in network.factors else keys[2:]

    def _eliminate(self, node: int) -> None:
        """Rule 5."""
        network = self.network
        keys = list(network.incident[node])
        factors = [network.factors[key] for key in keys]
        if any(factor.demands for factor in factors):
            return
        sides = [network.from_side(factor, node) for factor in factors]
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
        result = minimised(network, network.unary[node], sides)
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
            table = network.pool.transposed(table)
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


def _neighbours_by_copy(factors: list[Factor], node: int) -> tuple[np.ndarray, ...]:
    """For each factor of a node whose copies have one copy of it each, the neighbour's copy, by the node's copies."""
    pairs = [(factor.i == node, factor.copy_pairs) for factor in factors if factor.copy_pairs is not None]
    sides = [(pair.i, pair.j) if is_first else (pair.j, pair.i) for is_first, pair in pairs]
    return tuple(other[np.argsort(own, kind="stable")] for own, other in sides)
