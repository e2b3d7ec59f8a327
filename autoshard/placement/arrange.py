"""Arrangements of things at the positions of a grid, of which one with the least cost is sought.

    minimise cost(x)   over all x: positions -> classes in which class c has the positions count_c

Things of one class are alike: nodes under one switch, or slots of a pipeline that any block of devices may take. The
cost does not change when the indices along one axis of the grid are renumbered, so that arrangements are looked at only
if the first position has the first class, and classes do not fall along the lines through it. Where these are few, all
are tried; else a descent by swaps from several starts finds one that no swap improves.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

MOST_TRIED = 10_000
"""Arrangements up to which all are tried."""
MOST_SWAPS = 20_000
"""Swaps that are tried at most from all starts together."""
RESTARTS = 4
"""Starts from arrangements in which a third of the positions changed places at random."""

Arrangement = tuple[int, ...]
"""The class at each position, row-major."""
Cost = Callable[[Arrangement], float]


class Best(NamedTuple):
    """The best arrangement found; `is_exact`: no other costs less."""

    arrangement: Arrangement
    cost: float
    is_exact: bool


def best_arrangement(shape: Sequence[int], starts: Sequence[Arrangement], cost: Cost) -> Best:
    """The best arrangement of the classes that every start has.

    Args:
      shape: Of the grid. starts: Where descents begin; the first of equally good ones is kept.
      cost: To be minimised; it must not change when indices along an axis are renumbered.
    """
    start = min(starts, key=cost)
    best = Best(start, cost(start), False)
    every = list(itertools.islice(arrangements(shape, sorted(start)), MOST_TRIED + 1))
    if len(every) <= MOST_TRIED:
        for x in every:
            if (seconds := cost(x)) < best.cost:
                best = Best(x, seconds, True)
        return best._replace(is_exact=True)
    swaps_left = MOST_SWAPS
    random_numbers = random.Random(0)
    for n in range(len(starts) + RESTARTS):
        first = starts[n] if n < len(starts) else _shaken(best.arrangement, random_numbers)
        found, swaps_left = _descended(first, cost, swaps_left)
        if found.cost < best.cost:
            best = found
    return best


def arrangements(shape: Sequence[int], things: Sequence[int]) -> Iterator[Arrangement]:
    """All arrangements of `things` (classes, each as often as it occurs), up to the order along each axis."""
    strides = [math.prod(shape[a + 1 :]) for a in range(len(shape))]
    before: list[int | None] = []  # of each position, the one before it on a line through the first, from its second on
    for position in range(math.prod(shape)):
        on = [a for a, stride in enumerate(strides) if position // stride % shape[a]]
        earlier = position - strides[on[0]] if len(on) == 1 else 0
        before.append(earlier or None)
    counts = {c: things.count(c) for c in sorted(set(things))}
    chosen: list[int] = []

    def fill(position: int) -> Iterator[Arrangement]:
        if position == len(before):
            yield tuple(chosen)
            return
        earlier = before[position]
        for c in list(counts)[:1] if position == 0 else counts:
            if counts[c] and (earlier is None or chosen[earlier] <= c):
                counts[c] -= 1
                chosen.append(c)
                yield from fill(position + 1)
                chosen.pop()
                counts[c] += 1

    yield from fill(0)


def _descended(start: Arrangement, cost: Cost, swaps_left: int) -> tuple[Best, int]:
    """Swaps two positions as long as that lowers the cost."""
    at, seconds = list(start), cost(start)
    improved = True
    while improved and swaps_left > 0:
        improved = False
        for i, j in itertools.combinations(range(len(at)), 2):
            if at[i] == at[j]:
                continue
            if swaps_left == 0:
                break
            swaps_left -= 1
            at[i], at[j] = at[j], at[i]
            if (after := cost(tuple(at))) < seconds:
                seconds, improved = after, True
            else:
                at[i], at[j] = at[j], at[i]
    return Best(tuple(at), seconds, False), swaps_left


def _shaken(start: Arrangement, random_numbers: random.Random) -> Arrangement:
    at = list(start)
    some = random_numbers.sample(range(len(at)), max(2, len(at) // 3))
    classes = [at[i] for i in some]
    random_numbers.shuffle(classes)
    for i, c in zip(some, classes, strict=True):
        at[i] = c
    return tuple(at)
