"""Units (nodes, or single devices) that some pairs of reach each other faster than others, in no even pattern.

What a collective over a group of units sees is a hierarchy: pairs are sorted into tiers of about equal bandwidth, and
the group falls into components that pairs of the fastest tier join, those into components that the next tier joins, and
so on. Where all components of a tier are equally large, it is a level of its own, at the worst speed of any pair that
it joins, since the slowest pair rules a collective; where not, it is one level with the next tier out, as a ring over
the slower links would be.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from autoshard.cluster.device import Link
from autoshard.cluster.mesh import AxisLevel
from autoshard.cluster.pair_speeds import PairSpeeds
from autoshard.cluster.tiers import Tier

ONE_TIER = 0.8
"""Pairs with at least this share of the bandwidth of the fastest pair of a tier belong to it. Repeated measurements of
one link differ by less, and links of different kinds by more."""


@dataclasses.dataclass(frozen=True)
class Uneven:
    """How the devices of a slice are joined where levels cannot tell.

    Attributes:
      inside: The hardware levels within a unit, innermost first; none where a unit is a device.
      pairs: The speed of each pair of units.
      tier_of_pair: For each pair, 0 for those joined by the fastest links, and so on.
      first_level: `Link.level` of pairs of tier 0; further tiers follow.
    """

    inside: tuple[AxisLevel, ...]
    pairs: PairSpeeds
    tier_of_pair: tuple[tuple[int, ...], ...]
    first_level: int

    @classmethod
    def of_pairs(cls, inside: tuple[AxisLevel, ...], pairs: PairSpeeds, first_level: int) -> "Uneven":
        """Tiers found in the bandwidths of pairs."""
        count = pairs.num_units
        rates = np.array(pairs.bandwidth_bytes_per_s, float).reshape(count, count)
        tiers = np.zeros((count, count), np.int64)
        fastest = None
        number = -1
        for rate in np.unique(rates[~np.eye(count, dtype=bool)])[::-1]:
            if fastest is None or rate < ONE_TIER * fastest:
                fastest, number = rate, number + 1
            tiers[rates == rate] = number
        np.fill_diagonal(tiers, 0)
        return cls(inside, pairs, tuple(map(tuple, tiers.tolist())), first_level)

    @classmethod
    def of_tiers(
        cls, inside: tuple[AxisLevel, ...], tiers: Sequence[Tier], innermost: Link, num_nodes: int
    ) -> "Uneven":
        """Nodes under switches of which some have more nodes than others; `innermost` joins those of one part."""
        links = [innermost, *(tier.link for tier in tiers)]
        homes = np.array([tier.part_of_node for tier in tiers]).reshape(len(tiers), num_nodes)
        number = (homes[:, :, None] != homes[:, None, :]).sum(axis=0)  # parts nest
        of = lambda figures: tuple(map(tuple, np.array(figures)[number].tolist()))
        pairs = PairSpeeds(
            of([link.bandwidth_bytes_per_s for link in links]), of([link.latency_s for link in links]), innermost.source
        )
        return cls(inside, pairs, tuple(map(tuple, number.tolist())), innermost.level)

    @property
    def num_units(self) -> int:
        """Number of units."""
        return self.pairs.num_units

    @functools.cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        pairs = self.pairs
        return np.array(self.tier_of_pair), np.array(pairs.latency_s), np.array(pairs.bandwidth_bytes_per_s)

    def link(self, one: int, other: int) -> Link:
        """What joins two units."""
        tier, pairs = self.tier_of_pair[one][other], self.pairs
        rate, latency_s = pairs.bandwidth_bytes_per_s[one][other], pairs.latency_s[one][other]
        return Link(latency_s, rate, self.first_level + tier, pairs.source)

    def sorted_units(self) -> tuple[int, ...]:
        """The units such that those of one component stand side by side, at every tier; larger components first."""
        tier = self._arrays[0]
        keys: list[list[tuple[int, int]]] = [[] for _ in range(self.num_units)]
        home = np.arange(self.num_units)
        for number in np.unique(tier).tolist():
            home = _joined(home, tier <= number)
            sizes = np.bincount(home, minlength=self.num_units)
            for unit, own in enumerate(home.tolist()):
                keys[unit].insert(0, (-int(sizes[own]), own))
        return tuple(sorted(range(self.num_units), key=lambda unit: (keys[unit], unit)))

    def levels_of(self, units: Sequence[int]) -> tuple[AxisLevel, ...]:
        """The levels, innermost first, of a collective among some units."""
        chosen = np.asarray(units)
        tier, latency_s, rate = (a[np.ix_(chosen, chosen)] for a in self._arrays)

        def slowest(pairs: np.ndarray, number: int) -> Link:
            return Link(
                float(latency_s[pairs].max()), float(rate[pairs].min()), self.first_level + number, self.pairs.source
            )

        return hierarchy(tier, slowest)


def hierarchy(tier: np.ndarray, slowest: Callable[[np.ndarray, int], Link]) -> tuple[AxisLevel, ...]:
    """The levels, innermost first, of a collective among the members of a group.

    Args:
      tier: For each pair of members, how far out they are joined; int [members, members].
      slowest: The link of a level, of the pairs that it joins (bool [members, members]) and their greatest tier.
    """
    pairs = ~np.eye(len(tier), dtype=bool)
    home = inner = np.arange(len(tier))  # the component of each member, now and within the level before
    levels: list[AxisLevel] = []
    size = 1
    for number in np.unique(tier[pairs]).tolist():
        home = _joined(home, (tier == number) & pairs)
        sizes = np.unique(np.unique(home, return_counts=True)[1])
        if len(sizes) > 1 or sizes[0] == size:
            continue
        own = (home[:, None] == home[None, :]) & (inner[:, None] != inner[None, :])
        levels.append(AxisLevel(int(sizes[0]) // size, slowest(own, number)))
        size, inner = int(sizes[0]), home
    return tuple(levels)


def _joined(home: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Components after those that an edge joins have become one; each is named by its least member's name."""
    home = home.copy()
    while True:
        least = np.where(edges, home[None, :], len(home)).min(axis=1, initial=len(home))
        best = np.minimum(home, least)
        of_component = np.full(len(home), len(home))
        np.minimum.at(of_component, home, best)
        new = of_component[home]
        if (new == home).all():
            return home
        home = new
