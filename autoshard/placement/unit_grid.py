"""Units (nodes, or devices) that are not joined evenly, arranged along the axes of a mesh.

Every axis of the mesh is a part inside a unit, shared out like a hardware level, and a part across units. The groups of
an axis run at the same time, so that the slowest of them rules it: an axis has the levels of the group in which much
data takes longest to gather.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from autoshard.cluster import AxisLevel, LogicalMesh, MeshAxis, Slice, Uneven
from autoshard.cluster.splits import Split
from autoshard.cost.collectives import all_gather
from autoshard.placement.arrange import Arrangement
from autoshard.placement.flows import Flow, total_s

_MUCH_BYTES = 1e9


def alike_units(uneven: Uneven) -> tuple[int, ...]:
    """For each unit, the number of its class: units of one class are equally far from all others, and joined alike."""
    tier = np.array(uneven.tier_of_pair)
    latency_s, rate = np.array(uneven.pairs.latency_s), np.array(uneven.pairs.bandwidth_bytes_per_s)
    figures = [tier, latency_s, rate]
    found: list[int] = []
    first: list[int] = []
    for unit in range(uneven.num_units):
        for number, other in enumerate(first):
            rest = [k for k in range(uneven.num_units) if k not in (unit, other)]
            own = [m for m in range(unit) if found[m] == number]
            is_like = all((f[unit, rest] == f[other, rest]).all() for f in figures)
            within = all(f[unit, m] == f[own[0], own[1]] for f in figures for m in own) if len(own) > 1 else True
            if is_like and within:
                found.append(number)
                break
        else:
            found.append(len(first))
            first.append(unit)
    return tuple(found)


def slowest_of(groups: Sequence[MeshAxis]) -> MeshAxis:
    """Of an axis as it is for each of its groups, that in which much data takes longest to gather."""
    return max(dict.fromkeys(groups), key=lambda axis: all_gather([axis], _MUCH_BYTES).time_s)


@dataclasses.dataclass(frozen=True)
class UnitGrid:
    """One way to share out the inside of units, with the grid of units that is left.

    Attributes:
      hardware: A slice that is not even. names, sizes: Of the mesh axes.
      split: Of the levels inside a unit, and of the units as one more level.
      flows: The traffic.
    """

    hardware: Slice
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    split: Split
    flows: tuple[Flow, ...]

    @property
    def uneven(self) -> Uneven:
        """How the units are joined."""
        assert self.hardware.uneven is not None
        return self.hardware.uneven

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Units along each axis of the mesh."""
        across = dict(self.split.parts[-1])
        return tuple(across.get(axis, 1) for axis in range(len(self.sizes)))

    @functools.cached_property
    def _inside(self) -> tuple[tuple[AxisLevel, ...], ...]:
        return Split(self.split.parts[:-1]).axis_levels(self.uneven.inside, len(self.sizes))

    @functools.cached_property
    def classes(self) -> tuple[int, ...]:
        """The class of each unit."""
        return alike_units(self.uneven)

    @functools.cached_property
    def _members(self) -> list[list[int]]:
        return [[u for u, c in enumerate(self.classes) if c == number] for number in range(max(self.classes) + 1)]

    @functools.cached_property
    def _lines(self) -> list[np.ndarray]:
        """For each axis, the positions of each of its groups; int [groups, units]."""
        grid = np.arange(math.prod(self.shape)).reshape(self.shape)
        return [np.moveaxis(grid, a, -1).reshape(-1, n) for a, n in enumerate(self.shape)]

    @functools.cached_property
    def _known(self) -> dict[tuple[int, tuple[int, ...]], MeshAxis]:
        return {}

    def _group(self, axis: int, classes: tuple[int, ...]) -> MeshAxis:
        """An axis as it is for a group of units of these classes."""
        key = axis, classes
        if key not in self._known:
            units = [self._members[c][classes[:k].count(c)] for k, c in enumerate(classes)]
            levels = (*self._inside[axis], *self.uneven.levels_of(units))
            self._known[key] = MeshAxis(self.names[axis], self.sizes[axis], levels)
        return self._known[key]

    def axes(self, arrangement: Arrangement) -> tuple[MeshAxis, ...]:
        """The axes of the mesh with the levels that they cross under an arrangement of the units' classes."""
        found = []
        for axis, lines in enumerate(self._lines):
            if self.shape[axis] == 1:
                found.append(MeshAxis(self.names[axis], self.sizes[axis], self._inside[axis]))
            else:
                groups = {tuple(sorted(arrangement[p] for p in line)) for line in lines.tolist()}
                found.append(slowest_of([self._group(axis, group) for group in sorted(groups)]))
        return tuple(found)

    def seconds(self, arrangement: Arrangement) -> float:
        """What all flows take under an arrangement of the units' classes."""
        return total_s(self.flows, self.axes(arrangement))

    def starts(self) -> list[Arrangement]:
        """Arrangements to begin with: the units as listed, and sorted by whom they reach fastest, with each of the axes
        taking neighbours first.
        """
        near = [self.classes[unit] for unit in self.uneven.sorted_units()]
        found = [self.classes]
        for axis in range(len(self.shape)):
            major = [a for a in range(len(self.shape)) if a != axis]
            positions = np.arange(len(near)).reshape(self.shape).transpose([*major, axis]).reshape(-1)
            start = [0] * len(near)
            for position, unit_class in zip(positions.tolist(), near, strict=True):
                start[position] = unit_class
            found.append(tuple(start))
        return list(dict.fromkeys(found))

    def mesh(self, arrangement: Arrangement) -> LogicalMesh:
        """The mesh with its devices arranged so; of alike units the first ones come first."""
        units = [self._members[c][arrangement[:k].count(c)] for k, c in enumerate(arrangement)]
        inside = math.prod(level.size for level in self.uneven.inside)
        places = self.split.places(self.sizes)
        order = [units[place // inside] * inside + place % inside for place in places.tolist()]
        return LogicalMesh(self.axes(arrangement), self.hardware.device_type, tuple(order), host=self.hardware.host)
