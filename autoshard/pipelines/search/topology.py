"""Where submeshes fit on a cluster, and which link joins two of them."""

import dataclasses
import functools
import itertools
import math

import numpy as np

from autoshard.cluster import Cluster, CollectiveKind, Link, Slice, Uneven
from autoshard.pipelines.cost.table import CostTable
from autoshard.pipelines.search.arrangement import Submesh


@dataclasses.dataclass(frozen=True, slots=True)
class LinkSpeed:
    """What one device sends to one other: seconds before the first byte, and bytes a second."""

    latency_s: float
    bandwidth_bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class Topology:
    """A cluster cut into slices, on which submeshes are laid out.

    Attributes:
      cluster: The cluster. table: Says how many devices the submesh of a mesh option has.
    """

    cluster: Cluster
    table: CostTable

    @functools.cached_property
    def slices(self) -> tuple[Slice, ...]:
        """The slices that `Submesh.slice` counts."""
        return self.cluster.slices()

    @functools.cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(option.num_devices for option in self.table.options)

    @functools.cached_property
    def _fits(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._fit(option) for option in range(len(self.table.options)))

    @functools.cached_property
    def _near(self) -> dict[int, np.ndarray]:
        return {}

    @functools.cached_property
    def _known(self) -> dict[tuple[int, int, int, int], LinkSpeed]:
        """Of submeshes of one slice, by their first devices and options, of which each belongs to one slice."""
        return {}

    @functools.cached_property
    def _blocks(self) -> tuple[tuple[int, ...], ...]:
        """For each slice, the number of devices that each of its levels joins, innermost first."""
        sizes = ([level.size for level in s.levels] for s in self.slices)
        return tuple(tuple(math.prod(row[: k + 1]) for k in range(len(row))) for row in sizes)

    @functools.cached_property
    def _speeds(self) -> tuple[tuple[LinkSpeed, ...], ...]:
        return tuple(tuple(_speed(level.link) for level in s.levels) for s in self.slices)

    @functools.cached_property
    def _between(self) -> LinkSpeed | None:
        return None if self.cluster.between_groups is None else _speed(self.cluster.between_groups)

    def num_devices(self, submesh: Submesh) -> int:
        """Devices of a submesh."""
        return self._sizes[submesh.option]

    def num_submeshes(self, option: int) -> int:
        """How many submeshes of a mesh option its slice has room for, each within the smallest level that holds it."""
        block, stride = self._fits[option]
        chosen = self.slices[self.table.options[option].slice]
        return 0 if block == 0 else chosen.num_devices // block * (block // stride)

    def submesh(self, option: int, index: int) -> Submesh:
        """The `index`-th of those submeshes, in the order of the devices."""
        block, stride = self._fits[option]
        in_block = block // stride
        first = index // in_block * block + index % in_block * stride
        return Submesh(self.table.options[option].slice, first, option)

    def speed(self, one: Submesh, other: Submesh) -> LinkSpeed:
        """The link between two submeshes: that of the smallest level that holds both, or the one between groups.

        Where levels do not tell, the slowest of any pair of their units; where nodes have rails, no faster than the
        link between devices with other numbers, unless both submeshes have the same numbers in their nodes.
        """
        if one.slice != other.slice:
            assert self._between is not None, "a cluster of several groups has a link between them"
            return self._between
        key = one.first_device, one.option, other.first_device, other.option
        if key not in self._known:
            self._known[key] = self._speed_within(one, other)
        return self._known[key]

    def _speed_within(self, one: Submesh, other: Submesh) -> LinkSpeed:
        """The link between two submeshes of one slice."""
        part = self.slices[one.slice]
        if part.uneven is not None:
            return self._between_units(part, part.uneven, one, other)
        blocks = self._blocks[one.slice]
        first = min(one.first_device, other.first_device)
        last = max(one.first_device + self._sizes[one.option], other.first_device + self._sizes[other.option]) - 1
        level = next((k for k, block in enumerate(blocks) if first // block == last // block), len(blocks) - 1)
        speed = self._speeds[one.slice][level]
        if part.rails is not None and level > 0 and self._numbers(one, blocks[0]) != self._numbers(other, blocks[0]):
            return _slower(speed, _speed(part.rails))
        return speed

    def _numbers(self, submesh: Submesh, node: int) -> tuple[int, int]:
        """The first number that a submesh has in its nodes, and how many."""
        return submesh.first_device % node, min(self._sizes[submesh.option], node)

    def _between_units(self, part: Slice, uneven: Uneven, one: Submesh, other: Submesh) -> LinkSpeed:
        size = part.num_devices // uneven.num_units
        units = []
        for submesh in (one, other):
            places = range(submesh.first_device, submesh.first_device + self._sizes[submesh.option])
            units.append({(part.order[p] if part.order else p) // size for p in places})
        crossing = [_speed(uneven.link(a, b)) for a in units[0] for b in units[1] if a != b]
        crossing += [_speed(uneven.inside[-1].link)] if units[0] & units[1] and uneven.inside else []
        return functools.reduce(_slower, crossing)

    def near_s_per_byte(self, option: int) -> np.ndarray:
        """[r]: seconds a byte to send something to the r nearest other submeshes of the same option, one after the
        other, by the first submesh's links; for bounds, hence without latencies.
        """
        if option not in self._near:
            first, number = self.submesh(option, 0), self.num_submeshes(option)
            speeds = [self.speed(first, self.submesh(option, k)) for k in range(1, number)]
            part = self.slices[first.slice]
            if speeds and (part.uneven is not None or part.rails is not None):  # the first submesh need not be typical
                every = itertools.combinations([self.submesh(option, k) for k in range(number)], 2)
                best = max((self.speed(*pair) for pair in every), key=lambda s: s.bandwidth_bytes_per_s)
                speeds = [best] * (number - 1)
            each = sorted(1 / (self._sizes[option] * s.bandwidth_bytes_per_s) for s in speeds)
            self._near[option] = np.concatenate([[0.0], np.cumsum(each)])
        return self._near[option]

    def transfer_s(self, one: Submesh, other: Submesh, size_bytes: float) -> float:
        """Time to send `size_bytes` from one submesh to another; every device of the smaller one handles its part."""
        speed = self.speed(one, other)
        num_senders = min(self._sizes[one.option], self._sizes[other.option])
        return speed.latency_s + size_bytes / (num_senders * speed.bandwidth_bytes_per_s)

    def _fit(self, option: int) -> tuple[int, int]:
        """Devices of the smallest level that holds a submesh (0: none does), and from one submesh to the next there."""
        chosen = self.table.options[option]
        size = self._sizes[option]
        inner = 1
        for block in (*self._blocks[chosen.slice], self.slices[chosen.slice].num_devices):
            if size <= block:
                return block, -(-size // inner) * inner
            inner = block
        return 0, size


def _slower(one: LinkSpeed, other: LinkSpeed) -> LinkSpeed:
    """The greater latency and the lesser bandwidth of two."""
    return LinkSpeed(max(one.latency_s, other.latency_s), min(one.bandwidth_bytes_per_s, other.bandwidth_bytes_per_s))


def _speed(link: Link) -> LinkSpeed:
    """A link as point-to-point sends see it."""
    figures = link.figures(CollectiveKind.PERMUTE, 2)
    return LinkSpeed(figures.latency_s, figures.bandwidth_bytes_per_s)
