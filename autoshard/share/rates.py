"""How fast a job runs on each footprint, and where that figure comes from."""

import bisect
import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping

from autoshard.share.footprint import Footprint, Part


class Source(enum.Enum):
    """Where a rate comes from."""

    PLAN = "plan"
    GIVEN = "given"
    INTERPOLATED = "interpolated"


@dataclasses.dataclass(frozen=True, slots=True)
class Rate:
    """Steps in a second on a footprint.

    Attributes:
        footprint: the devices.
        steps_per_s: steps of the job in a second.
        source: a plan for just these devices, the jobs file, or two other sizes of the same group.
    """

    footprint: Footprint
    steps_per_s: float
    source: Source = Source.GIVEN


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """All that a job may run on, each with its rate; footprints on which it does not fit are left out."""

    entries: tuple[Rate, ...]

    def of(self, footprint: Footprint) -> float:
        """Steps in a second; 0 where the job cannot run."""
        return next((r.steps_per_s for r in self.entries if r.footprint == footprint), 0.0)

    @property
    def best(self) -> Rate:
        """The fastest."""
        return max(self.entries, key=lambda rate: rate.steps_per_s)

    @property
    def exponent(self) -> float:
        """The p of the power law r(k) = r(1) k^p that is nearest, in logarithms, to the group with most sizes."""
        points = self._frontier()
        if len(points) < 2:
            return 0.5
        xs, ys = [math.log(k) for k, _ in points], [math.log(r) for _, r in points]
        mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum(
            (x - mean_x) ** 2 for x in xs
        )
        return min(max(slope, 0.05), 0.95)

    @property
    def unit_rate(self) -> float:
        """The rate on one device of the fastest kind, by the power law where that size is not among the entries."""
        exponent = self.exponent
        return max(r.steps_per_s / r.footprint.num_devices**exponent for r in self.entries)

    def _frontier(self) -> list[tuple[int, float]]:
        """The fastest rate for each number of devices, where more devices are faster."""
        best: dict[int, float] = {}
        for rate in self.entries:
            size = rate.footprint.num_devices
            best[size] = max(best.get(size, 0.0), rate.steps_per_s)
        points: list[tuple[int, float]] = []
        for size in sorted(best):
            if not points or best[size] > points[-1][1]:
                points.append((size, best[size]))
        return points


def with_interpolated(known: Rates, wanted: Iterable[Footprint]) -> Rates:
    """Adds the sizes that lie between two known ones of the same group, by the power law through these.

    A size within a node lies between sizes within a node; whole nodes lie between one node and more. Nothing is added
    outside the known sizes, nor for several groups together.
    """
    entries = {rate.footprint: rate for rate in known.entries}
    for footprint in wanted:
        if footprint in entries or len(footprint.parts) != 1:
            continue
        rate = _between(known, footprint.parts[0])
        if rate is not None:
            entries[footprint] = Rate(footprint, rate, Source.INTERPOLATED)
    return Rates(tuple(entries.values()))


def _between(known: Rates, part: Part) -> float | None:
    row: Mapping[int, float] = {
        own.num_devices: rate.steps_per_s
        for rate in known.entries
        for own in rate.footprint.parts
        if len(rate.footprint.parts) == 1 and own.group == part.group and _alike(own, part)
    }
    sizes = sorted(row)
    place = bisect.bisect(sizes, part.num_devices)
    if place == 0 or place == len(sizes):
        return None
    low, high = sizes[place - 1], sizes[place]
    slope = math.log(row[high] / row[low]) / math.log(high / low)
    return row[low] * (part.num_devices / low) ** slope


def _alike(own: Part, wanted: Part) -> bool:
    """Whether two parts lie on one line: both within a node, or both of nodes with as many devices each."""
    return own.num_nodes == wanted.num_nodes == 1 or own.devices_per_node == wanted.devices_per_node
