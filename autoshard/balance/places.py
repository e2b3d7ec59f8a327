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
      computes_all: Why no unit may be left out; empty if some may.
      chunk: Units that a device computes at once, going through its places in a loop; buckets are its multiples then.
        0: it computes all of its units at once, in one of as many compiled programs as there are buckets.
    """

    unit: UnitDimension
    capacity: int
    buckets: tuple[int, ...]
    computes_all: str = ""
    chunk: int = 0

    @property
    def places(self) -> int:
        """Places on all devices together."""
        return self.capacity * self.unit.ways

    def bucket_of(self, count: int) -> int:
        """The position of the smallest bucket that holds `count` units."""
        return int(np.searchsorted(self.buckets, count))


def room_for(
    unit: UnitDimension,
    absorbs: float,
    tile: int = 1,
    most_buckets: int = 8,
    most_left_out: float = 0.0,
    computes_all: str = "",
    is_looped: bool = False,
) -> Room:
    """Places for the units of a dimension.

    If one of T devices is s times slower than the others, equal times need U / (s (T - 1) + 1) of U units on it, and s
    times as many on each other one. Capacity is what the others need then. Where a loop goes through units, buckets are
    multiples of its chunk, of which an even share has about 2 `most_buckets`. Otherwise there are buckets for what both
    need at slownesses up to s, and beside them evenly spaced ones, for other disturbances.

    Args:
      unit: The dimension. absorbs: The slowdown s of one device that can be evened out; 1 if units do not move.
      tile: Units that the hardware computes together; buckets are multiples of it where there are twice as many.
      most_buckets: Roughly how many buckets there may be, where each is compiled.
      most_left_out: The share of an even share that a device may leave out.
      computes_all: Why no unit may be left out; empty if some may.
      is_looped: Whether devices go through their units in a loop.
    """
    most_left_out = 0.0 if computes_all else most_left_out
    size, ways = unit.size, unit.ways
    even, levels = size // ways, max(1, most_buckets // 2)
    capacity = max(even + 1, min(size, math.ceil(absorbs * size / (absorbs * (ways - 1) + 1))))
    tile = tile if even >= 2 * tile else 1
    chunk = _chunk(even, tile, 2 * most_buckets) if is_looped else 0
    step = math.lcm(unit.multiple, chunk or 1)
    capacity = math.ceil(capacity / step) * step
    if chunk:
        return Room(unit, capacity, tuple(range(0, capacity + 1, chunk)), computes_all, chunk)
    slow = [absorbs ** (k / levels) for k in range(1, levels + 1)] if absorbs > 1 else []
    wanted = [share for s in slow for share in (size / (s * (ways - 1) + 1), s * size / (s * (ways - 1) + 1))]
    wanted += [even * (1 - most_left_out * k / levels) for k in range(1, levels + 1) if most_left_out]
    wanted += [capacity * k / levels for k in range(1, levels) if absorbs > 1]
    buckets = {0, even, capacity}
    for share in wanted:
        bucket = math.ceil(share / tile - 1e-9) * tile
        if 0 < bucket < capacity and min(abs(bucket - b) for b in buckets) >= max(1, tile, capacity // (8 * levels)):
            buckets.add(bucket)
    return Room(unit, capacity, tuple(sorted(buckets)), computes_all)


def _chunk(even: int, tile: int, most: int) -> int:
    """Multiples of `tile` of which an even share has at most `most`; a divisor of it if one is less than twice that."""
    least = max(1, math.ceil(even / (most * tile))) * tile
    return next((n for n in range(least, 2 * least, tile) if even % n == 0), least)


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


def is_even(placing: Placing) -> bool:
    """Whether every device has and computes the same number of units."""
    return len({*placing.counts, *placing.active}) == 1


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
