"""What no order of the devices can beat.

Flow by flow: a group of n devices cannot be packed more tightly than innermost links first. Let C_t be the most devices
that links of tiers up to t join to one, and s_t = min(n, C_t). Under every order, the pieces of a group that links up
to t join have at most s_t devices each, so what crosses tier t is at least that of the hierarchy s_1, s_2, ...:

    gathered or scattered   B sum_t (1/s_{t-1} - 1/s_t) / w_t         (all-reduce: twice)
    all-to-all              B sum_t (s_t - s_{t-1}) / n / w_t
    permute                 B / w_1

with w_t the best bandwidth of tier t or of those further out, so that w falls with t and both sums fall as any s_t
grows. Where devices differ, the one that is worst off counts, for its group does. Along a torus the bound is the least
of all splits of its axes, each flow by itself. Latencies are left out.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autoshard.cluster import CollectiveKind, Link, Slice, Uneven
from autoshard.placement.flows import Flow


class Reach(NamedTuple):
    """How many devices one can reach over links of one tier and those within, and how fast that tier is at best."""

    num_devices: int
    bandwidth_bytes_per_s: float


def reaches(hardware: Slice) -> list[tuple[Reach, ...]]:
    """For each kind of device by what it can reach, its tiers, innermost first. Not for a torus."""
    if hardware.uneven is None:
        inside, size = [], 1
        for level in hardware.levels:
            size *= level.size
            inside.append(Reach(size, _best(level.link)))
        return [tuple(inside)]
    return _reaches_of_units(hardware.uneven)


def _best(link: Link) -> float:
    """The best bandwidth of a link, whatever was measured of it."""
    measured = [m.bandwidth_bytes_per_s for m in link.collectives]
    return max([link.bandwidth_bytes_per_s, *measured])


def _reaches_of_units(uneven: Uneven) -> list[tuple[Reach, ...]]:
    inside, size = [], 1
    for level in uneven.inside:
        size *= level.size
        inside.append(Reach(size, _best(level.link)))
    tier, rate = np.array(uneven.tier_of_pair), np.array(uneven.pairs.bandwidth_bytes_per_s)
    off = ~np.eye(uneven.num_units, dtype=bool)
    numbers = np.unique(tier[off]).tolist()
    joined = [_component_sizes((tier <= number) & off) for number in numbers]
    best = [float(rate[off & (tier == number)].max()) for number in numbers]
    rows = {tuple(int(sizes[unit]) for sizes in joined) for unit in range(uneven.num_units)}
    return [(*inside, *(Reach(size * n, w) for n, w in zip(row, best, strict=True))) for row in sorted(rows)]


def _component_sizes(edges: np.ndarray) -> np.ndarray:
    """For each unit, how many its component has."""
    reached = edges | np.eye(len(edges), dtype=bool)
    while True:
        further = (reached.astype(np.float32) @ reached.astype(np.float32)) > 0
        if (further == reached).all():
            return reached.sum(axis=1)
        reached = further


def least_s(flow: Flow, num_devices: int, every: Sequence[tuple[Reach, ...]]) -> float:
    """A bound on what a flow among groups of `num_devices` takes under any order."""
    if num_devices == 1:
        return 0.0
    return flow.size_bytes * max(_s_per_byte(flow.kind, num_devices, tiers) for tiers in every)


def _s_per_byte(kind: CollectiveKind, num_devices: int, tiers: tuple[Reach, ...]) -> float:
    if kind is CollectiveKind.PERMUTE:
        return 1 / max(tier.bandwidth_bytes_per_s for tier in tiers)
    found, before = 0.0, 1
    for t, tier in enumerate(tiers):
        now = min(num_devices, tier.num_devices)
        share = (now - before) / num_devices if kind is CollectiveKind.ALL_TO_ALL else 1 / before - 1 / now
        found += share / max(further.bandwidth_bytes_per_s for further in tiers[t:])
        before = now
    return found * (2 if kind is CollectiveKind.ALL_REDUCE else 1)
