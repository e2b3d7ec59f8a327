"""Which unit is where: places on every device, of which the first ones are taken."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from autoshard.balance.units import UnitDimension


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """The places that each device has for the units of a dimension.

    Attributes:
      unit: The dimension. capacity: Places on each device.
      buckets: How many units a device can be made to compute without recompiling, ascending, from 0 to `capacity`; one
        that has another number takes the next larger, and what is too much counts for nothing.
    """

    unit: UnitDimension
    capacity: int
    buckets: tuple[int, ...]

    @property
    def places(self) -> int:
        """Places on all devices together."""
        return self.capacity * self.unit.ways

    def bucket_of(self, count: int) -> int:
        """The position of the smallest bucket that holds `count` units."""
        return int(np.searchsorted(self.buckets, count))


def room_for(unit: UnitDimension, absorbs: float, tile: int = 1, most_buckets: int = 8) -> Room:
    """Places for the units of a dimension.

    If one of T devices is s times slower than the others, equal times need U / (T - 1 + 1/s) of U units on each other
    device; so many places it has, and at least one more than an even share.

    Args:
      unit: The dimension. absorbs: The slowdown s of one device that can be evened out.
      tile: Units that the hardware computes together; buckets are multiples of it.
      most_buckets: Roughly how many buckets there may be: each is compiled.
    """
    even = unit.size // unit.ways
    capacity = min(unit.size, max(even + 1, math.ceil(unit.size / (unit.ways - 1 + 1 / absorbs))))
    step = max(tile, math.ceil(capacity / most_buckets))
    buckets = {0, even, capacity, *range(step, capacity, step)}
    return Room(unit, capacity, tuple(sorted(buckets)))


@dataclasses.dataclass(frozen=True, slots=True)
class Placing:
    """Which unit is in which place, and how many each device computes.

    Attributes:
      units: For each device the units in its places, in order; as many as it has.
      active: For each device, how many of these, from the first on, it computes in training.
    """

    units: tuple[tuple[int, ...], ...]
    active: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many units each device has."""
        return tuple(map(len, self.units))

    @property
    def dropped(self) -> int:
        """Units that nobody computes."""
        return sum(self.counts) - sum(self.active)

    def table(self, capacity: int) -> np.ndarray:
        """int32 (devices, capacity): the unit in each place, -1 in an empty one."""
        table = np.full((len(self.units), capacity), -1, np.int32)
        for row, units in zip(table, self.units, strict=True):
            row[: len(units)] = units
        return table

    def place_of(self, capacity: int) -> np.ndarray:
        """int32 (units,): the place of each unit, counted over all devices."""
        flat = self.table(capacity).ravel()
        places = np.empty(sum(self.counts), np.int32)
        taken = np.flatnonzero(flat >= 0)
        places[flat[taken]] = taken
        return places


def even_placing(room: Room) -> Placing:
    """The same number of units on every device, in order."""
    each = room.unit.size // room.unit.ways
    units = tuple(tuple(range(d * each, (d + 1) * each)) for d in range(room.unit.ways))
    return Placing(units, (each,) * room.unit.ways)


def moved(placing: Placing, counts: Sequence[int]) -> Placing:
    """A placing with other counts, in which as few units as possible change their device; all are computed.

    Those that leave a device are its last ones. Those that arrive come behind those that stay.
    """
    stay = [units[:count] for units, count in zip(placing.units, counts, strict=True)]
    leaving = [u for units, count in zip(placing.units, counts, strict=True) for u in units[count:]]
    filled = []
    for units, count in zip(stay, counts, strict=True):
        take = count - len(units)
        filled.append((*units, *leaving[:take]))
        leaving = leaving[take:]
    return Placing(tuple(filled), tuple(counts))


def counts_of(shares: Sequence[float], room: Room) -> tuple[int, ...]:
    """How many units each device gets for shares of the work, by largest remainders, none more than it has places for.

    Args:
      shares: Of each device, not negative; they need not add up to 1.
    """
    size, capacity = room.unit.size, room.capacity
    wanted = np.maximum(np.asarray(shares, float), 0.0)
    counts = np.zeros(len(wanted), int)
    is_open = np.ones(len(wanted), bool)
    while (left := size - counts.sum()) > 0:
        weight = np.where(is_open, wanted, 0.0)
        weight = weight / weight.sum() if weight.sum() > 0 else is_open / is_open.sum()
        ideal = left * weight
        add = np.minimum(np.floor(ideal).astype(int), capacity - counts)
        if not add.any():
            order = np.argsort(-(ideal - add), kind="stable")
            for d in [d for d in order if is_open[d] and counts[d] < capacity][:left]:
                add[d] += 1
        counts += add
        is_open &= counts < capacity
    return tuple(int(c) for c in counts)
