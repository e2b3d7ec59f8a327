"""Arrangements of things at the positions of a grid, of which one with the least cost is sought.

    minimise cost(x)   over all x: positions -> classes in which class c has count_c positions

Things of one class are alike: nodes under one switch. Positions are those of a mesh, or places in pipelines that blocks
of devices may take. On a mesh the cost does not change when the indices along one axis are renumbered, so that
arrangements are looked at only if the first position has the first class, and classes do not fall along the lines
through it. Where these are few, all are tried; else a descent by swaps from several starts finds one that no swap
improves.
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


def best_arrangement(
    shape: Sequence[int] | None,
    starts: Sequence[Arrangement],
    cost: Cost,
    most_tried: int = MOST_TRIED,
    most_swaps: int = MOST_SWAPS,
) -> Best:
    """The best arrangement of the classes that every start has.

    Args:
      shape: Of the mesh, whose indices along an axis can be renumbered; None where all positions differ.
      starts: Where descents begin; the first of equally good ones is kept.
      cost: To be minimised. most_tried, most_swaps: How often it is asked for at most, in either way.
    """
    start = min(starts, key=cost)
    best = Best(start, cost(start), False)
    every = list(itertools.islice(arrangements(shape, sorted(start)), most_tried + 1))
    if len(every) <= most_tried:
        for x in every:
            if (seconds := cost(x)) < best.cost:
                best = Best(x, seconds, True)
        return best._replace(is_exact=True)
    swaps_left = most_swaps
    random_numbers = random.Random(0)
    for n in range(len(starts) + RESTARTS):
        first = starts[n] if n < len(starts) else _shaken(best.arrangement, random_numbers)
        found, swaps_left = _descended(first, cost, swaps_left)
        if found.cost < best.cost:
            best = found
    return best


def arrangements(shape: Sequence[int] | None, things: Sequence[int]) -> Iterator[Arrangement]:
    """All arrangements of `things` (classes, each as often as it occurs), up to the order along each axis if there are
    any.
    """
    before = [None] * len(things) if shape is None else _earlier_on_lines(shape)
    counts = {c: things.count(c) for c in sorted(set(things))}
    chosen: list[int] = []

    def possible(position: int) -> Iterator[int]:
        earlier = before[position]
        for c in list(counts)[:1] if position == 0 and shape is not None else counts:
            if counts[c] and (earlier is None or chosen[earlier] <= c):
                yield c

    if not before:
        yield ()
        return
    left = [possible(0)]  # for each position that has a class or is to get one, the classes to come
    while left:
        if len(chosen) == len(left):
            counts[chosen.pop()] += 1
        c = next(left[-1], None)
        if c is None:
            left.pop()
            continue
        counts[c] -= 1
        chosen.append(c)
        if len(chosen) < len(before):
            left.append(possible(len(chosen)))
        else:
            yield tuple(chosen)


def _earlier_on_lines(shape: Sequence[int]) -> list[int | None]:
    """For each position on an axis through the first position, from the second one there on, the one before it."""
    strides = [math.prod(shape[a + 1 :]) for a in range(len(shape))]
    before: list[int | None] = []
    for position in range(math.prod(shape)):
        on = [a for a, stride in enumerate(strides) if position // stride % shape[a]]
        before.append((position - strides[on[0]] if len(on) == 1 else 0) or None)
    return before


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
