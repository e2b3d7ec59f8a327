"""How the hardware levels of a slice are shared out among the axes of a mesh.

Devices lie at places, numbered through the innermost level first. A split gives each axis a factor of every level: the
first part takes neighbours, the next one every k-th peer, and so on. Row-major order is one split: the last axis takes
its part of the innermost level, the axis before it continues where that one stopped. All splits of the same sizes are
what else there is without tearing a level apart.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from autoshard.cluster.mesh import AxisLevel
from autoshard.cluster.wiring import part_of_level


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """One way to lay axes of given sizes over hardware levels.

    Attributes:
      parts: For each hardware level, innermost first, the (axis, size) of its parts, neighbours first; sizes above 1.
    """

    parts: tuple[tuple[tuple[int, int], ...], ...]

    def axis_levels(self, levels: Sequence[AxisLevel], num_axes: int) -> tuple[tuple[AxisLevel, ...], ...]:
        """For each axis, the levels that it crosses, innermost first."""
        found: list[list[AxisLevel]] = [[] for _ in range(num_axes)]
        for level, parts in zip(levels, self.parts, strict=True):
            stride = 1
            for axis, size in parts:
                found[axis].append(part_of_level(level, stride, size))
                stride *= size
        return tuple(map(tuple, found))

    def places(self, sizes: Sequence[int]) -> np.ndarray:
        """The place at each coordinate of a mesh with axes of `sizes`; int [num_devices], row-major."""
        offsets = [np.zeros(1, np.int64) for _ in sizes]
        stride = 1
        for parts in self.parts:
            for axis, size in parts:
                steps = np.arange(size) * stride  # parts further out are the greater digits of a coordinate
                offsets[axis] = np.add.outer(steps, offsets[axis]).reshape(-1)
                stride *= size
        grid = np.zeros((), np.int64)
        for offset in offsets:
            grid = np.add.outer(grid, offset)
        return grid.reshape(-1)


def row_major(level_sizes: Sequence[int], sizes: Sequence[int]) -> Split | None:
    """The split in which the last axis takes neighbours; None if an axis straddles a boundary unevenly.

    An axis either ends inside what is left of a level (its size divides it) or uses it up and goes on in the next level
    outwards (it is divided by it); any other axis has no hierarchical form.

    Args:
      level_sizes: Of the hardware levels, innermost first.
      sizes: Of the axes, major to minor; their product is the number of devices.
    """
    parts: list[list[tuple[int, int]]] = [[] for _ in level_sizes]
    level, room = 0, level_sizes[0] if level_sizes else 1
    for axis in reversed(range(len(sizes))):
        wanted = sizes[axis]
        while wanted > 1:
            if room == 1:
                level += 1
                room = level_sizes[level]
            taken = math.gcd(wanted, room)
            if taken != min(wanted, room):
                return None
            parts[level].append((axis, taken))
            wanted //= taken
            room //= taken
    return Split(tuple(map(tuple, parts)))


def all_splits(level_sizes: Sequence[int], sizes: Sequence[int], is_ordered: Sequence[bool]) -> Iterator[Split]:
    """Every split of levels among axes of the given sizes.

    Args:
      level_sizes, sizes: As for `row_major`.
      is_ordered: For each level, whether it matters which axis takes neighbours; where not, the last one does.
    """
    yield from (Split(parts) for parts in _parts(tuple(level_sizes), tuple(sizes), tuple(is_ordered)))


def _parts(
    level_sizes: tuple[int, ...], wanted: tuple[int, ...], is_ordered: tuple[bool, ...]
) -> Iterator[tuple[tuple[tuple[int, int], ...], ...]]:
    if not level_sizes:
        if math.prod(wanted) == 1:
            yield ()
        return
    left = math.prod(level_sizes[1:])
    for factors in _factors(level_sizes[0], wanted):
        rest = tuple(n // f for n, f in zip(wanted, factors, strict=True))
        if math.prod(rest) != left:
            continue
        used = [(axis, f) for axis, f in enumerate(factors) if f > 1]
        orders = list(itertools.permutations(used)) if is_ordered[0] else [tuple(reversed(used))]
        for others in _parts(level_sizes[1:], rest, is_ordered[1:]):
            for own in orders:
                yield (own, *others)


def _factors(number: int, wanted: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Factors of `number`, one for each entry of `wanted` and a divisor of it."""
    if not wanted:
        if number == 1:
            yield ()
        return
    for first in range(1, number + 1):
        if number % first == 0 and wanted[0] % first == 0:
            for rest in _factors(number // first, wanted[1:]):
                yield (first, *rest)
