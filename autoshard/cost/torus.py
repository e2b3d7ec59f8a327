"""Collectives over several axes of a torus, which use the wires of all of them at once.

A collective of B bytes is cut into shares, each of which goes through the axes in another order, so that all axes are
busy all the time. Gathered along axes of n_1, ..., n_k devices in some order, what an axis carries of a share depends
on which axes went before; the loads that can be reached by mixing orders are those x with

    x(S) <= f(S) = B (1 - 1 / prod_{i in S} n_i)   for all sets S of axes, with equality for all axes together

(each order gives one vertex of the base polytope of f, which is submodular: Edmonds, Submodular functions, matroids and
certain polyhedra, 1970). With bandwidths w_i, loads of at most T w_i exist exactly if no set must carry more than that:

    T = max over sets S of axes   (f(all) - f(all but S)) / w(S)

which for equal axes is (n - 1) / n B / (k w): k times the bandwidth of one.

An all-to-all sends each byte a quarter of the way round each axis on average, whether the axis closes (n / 4 hops, two
wires) or ends (half of all bytes cross its middle): T = max over axes of B n_i / (4 w_i). At least (n - 1) / n B / w_i,
what leaves a device along an axis.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from autoshard.cluster import AxisLevel, Wires


def is_torus(level: AxisLevel) -> bool:
    """Whether a level is a part of an axis of a torus."""
    return level.link.wires is not Wires.SWITCHED


def as_one_ring(levels: Sequence[AxisLevel]) -> AxisLevel:
    """The level whose ring takes as long as a collective over several axes of a torus; hops are those of all axes."""
    if len(levels) == 1:
        return levels[0]
    size = math.prod(level.size for level in levels)
    every = range(len(levels))
    seconds_a_byte = max(
        (_carried(levels) - _carried([levels[i] for i in every if i not in chosen]))
        / sum(levels[i].link.bandwidth_bytes_per_s for i in chosen)
        for count in range(1, len(levels) + 1)
        for chosen in itertools.combinations(every, count)
    )
    hops_s = sum((level.size - 1) * level.link.latency_s for level in levels)
    link = dataclasses.replace(
        levels[0].link,
        latency_s=hops_s / (size - 1),
        bandwidth_bytes_per_s=(size - 1) / size / seconds_a_byte,
    )
    return AxisLevel(size, link)


def _carried(levels: Sequence[AxisLevel]) -> float:
    """f of the levels, of one byte."""
    return 1 - 1 / math.prod(level.size for level in levels)


def exchanged_s_per_byte(levels: Sequence[AxisLevel]) -> float:
    """Seconds of an all-to-all among the devices of a torus, for each byte that one of them holds."""
    return max(max(l.size / 4, (l.size - 1) / l.size) / l.link.bandwidth_bytes_per_s for l in levels)
