"""Presolve of the capacity: only instants that can bind remain.

* An instant whose usages are all live at a neighbouring instant with no more capacity is dominated: dropped. Where
  one owner has equal usages many times (a tied problem), so is one at which each is live no more often than at
  another.
* What a usage takes whatever the choice is taken from the capacity; a usage that is then zero is dropped.
* An instant where the largest usages together fit is dropped.
* A label whose own usage exceeds what is left is reported, so that the caller can remove it.
"""

import dataclasses

import numpy as np

from autoshard.solver.kernels import kernel
from autoshard.solver.reduce.network import Demand, Network

COUNT_ENTRIES = 20_000_000
"""Counts of live usages are compared only while instants x kinds of usages are at most this many."""


def compress_instants(network: Network) -> dict[int, np.ndarray]:
    """Simplifies the capacity of `network` in place.

    Sets `network.infeasible` if the least usages together exceed the capacity somewhere.

    Returns:
      For each node some of whose labels cannot fit: bool [labels], True for those that can.
    """
    while True:
        owners, demands = _collect(network)
        if not demands:
            if (network.capacity < 0).any():
                network.infeasible = True
            network.capacity, network.instants = np.zeros(0), np.zeros(0, np.int64)
            return {}
        start = np.array([demand.start for demand in demands])
        stop = np.array([demand.stop for demand in demands])
        copies = np.array([_copies_of(network, owner) for owner in owners])
        least = np.array([demand.amounts.min() for demand in demands])
        count = len(network.capacity)
        capacity = network.capacity - _total(start, stop, copies * least, count)
        if (capacity < 0).any():
            network.infeasible = True
            return {}
        demands = [
            demand if low == 0 else dataclasses.replace(demand, amounts=network.pool.intern(demand.amounts - low))
            for demand, low in zip(demands, least, strict=True)
        ]
        most = np.array([demand.amounts.max() for demand in demands])
        keep = _total(start, stop, copies * most, count) > capacity
        useful = most > 0
        keep &= _undominated(start[useful], stop[useful], capacity, keep)
        kinds = {}
        kind = np.array(
            [
                kinds.setdefault((owner, id(demand.amounts)), len(kinds))
                for owner, demand in zip(owners, demands, strict=True)
            ]
        )
        if len(kinds) < 0.7 * len(demands) and keep.sum() * len(kinds) <= COUNT_ENTRIES:
            keep &= _unsurpassed(start[useful], stop[useful], kind[useful], capacity, keep)
        position = np.concatenate([[0], np.cumsum(keep)])
        start, stop = position[start], position[stop]
        useful &= start < stop
        network.capacity, network.instants = capacity[keep], network.instants[keep]
        _distribute(network, owners, demands, start, stop, useful)
        if keep.all():
            return _unfit(network)


def _copies_of(network: Network, owner: tuple[bool, int]) -> int:
    """How many copies take what a demand of `owner` says, in a lifted network."""
    if network.multiplicity is None:
        return 1
    is_factor, key = owner
    return network.factor_multiplicity(network.factors[key]) if is_factor else int(network.multiplicity[key])


def _collect(network: Network) -> tuple[list[tuple[bool, int]], list[Demand]]:
    """All demands with their owner: (is a factor, key)."""
    owners, demands = [], []
    for node, own in enumerate(network.demands):
        for demand in own:
            owners.append((False, node))
            demands.append(demand)
    for key, factor in network.factors.items():
        for demand in factor.demands:
            owners.append((True, key))
            demands.append(demand)
    return owners, demands


def _total(start: np.ndarray, stop: np.ndarray, amount: np.ndarray, count: int) -> np.ndarray:
    """Sum of `amount` over the intervals live at each instant."""
    steps = np.zeros(count + 1)
    np.add.at(steps, start, amount)
    np.subtract.at(steps, stop, amount)
    return np.cumsum(steps[:-1])


def _undominated(start: np.ndarray, stop: np.ndarray, capacity: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """Which of the kept instants are not dominated by the next or the previous kept one."""
    keep = keep.copy()
    while True:
        before = keep.sum()
        for towards_next in (True, False):
            kept = np.flatnonzero(keep)
            if len(kept) < 2:
                return keep
            position = np.concatenate([[0], np.cumsum(keep)])
            first, last = position[start], position[stop]
            live = first < last
            here, after = capacity[kept[:-1]], capacity[kept[1:]]
            if towards_next:  # nothing live at k stops before k + 1
                stops = np.bincount(last[live], minlength=len(kept) + 1)[1 : len(kept)]
                keep[kept[:-1][(stops == 0) & (here >= after)]] = False
            else:  # nothing live at k + 1 starts there
                starts = np.bincount(first[live], minlength=len(kept) + 1)[1 : len(kept)]
                keep[kept[1:][(starts == 0) & (after >= here)]] = False
        if keep.sum() == before:
            return keep


def _unsurpassed(
    start: np.ndarray, stop: np.ndarray, kind: np.ndarray, capacity: np.ndarray, keep: np.ndarray
) -> np.ndarray:
    """Which kept instants have, for every other with no more capacity, some kind of usage live more often."""
    steps = np.zeros((len(keep) + 1, int(kind.max(initial=0)) + 1), np.int32)
    np.add.at(steps, (start, kind), 1)
    np.subtract.at(steps, (stop, kind), 1)
    kept = np.flatnonzero(keep)
    counts = np.cumsum(steps, axis=0)[kept]
    order = np.lexsort((capacity[kept], -counts.sum(axis=1)))  # a dominating instant comes before what it dominates
    result = keep.copy()
    result[kept] = surviving(counts, capacity[kept], order)
    return result


@kernel()
def surviving(counts: np.ndarray, capacity: np.ndarray, order: np.ndarray) -> np.ndarray:
    """bool [instants]: those that no earlier survivor of `order` outnumbers in every kind with no more capacity."""
    survives = np.zeros(len(order), np.bool_)
    survivors = np.empty(len(order), np.int64)
    found = 0
    for place in order:
        dominated = False
        for s in range(found):
            rival = survivors[s]
            if capacity[rival] > capacity[place]:
                continue
            dominated = True
            for kind in range(counts.shape[1]):
                if counts[rival, kind] < counts[place, kind]:
                    dominated = False
                    break
            if dominated:
                break
        if not dominated:
            survives[place] = True
            survivors[found] = place
            found += 1
    return survives


def _distribute(
    network: Network, owners: list, demands: list[Demand], start: np.ndarray, stop: np.ndarray, useful: np.ndarray
) -> None:
    """Hands the surviving demands back to their owners; demands of one owner over one interval become one."""
    merged: dict[tuple, np.ndarray] = {}
    for index in np.flatnonzero(useful):
        key = (owners[index], int(start[index]), int(stop[index]))
        amounts = demands[index].amounts
        merged[key] = amounts if key not in merged else network.pool.intern(merged[key] + amounts)
    for own in network.demands:
        own.clear()
    for factor in network.factors.values():
        factor.demands.clear()
    for ((is_factor, owner), first, last), amounts in merged.items():
        own = network.factors[owner].demands if is_factor else network.demands[owner]
        own.append(Demand(first, last, amounts))


def _unfit(network: Network) -> dict[int, np.ndarray]:
    """Labels that fit on their own, for nodes with some that do not."""
    result: dict[int, np.ndarray] = {}
    for node, own in enumerate(network.demands):
        for demand in own:
            fits = demand.amounts <= network.capacity[demand.start : demand.stop].min()
            if not fits.all():
                result[node] = result.get(node, True) & fits
    return result
