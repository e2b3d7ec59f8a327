"""A slice: the part of a cluster whose devices are all alike, and the logical meshes that fit it."""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autoshard.cluster.device import DeviceType, Link
from autoshard.cluster.host import Host
from autoshard.cluster.mesh import AxisLevel, LogicalMesh, MeshAxis
from autoshard.cluster.splits import Split, row_major
from autoshard.cluster.uneven import Uneven, hierarchy
from autoshard.cluster.wiring import part_of_level
from autoshard.errors import MeshError

AXIS_NAMES = (("data",), ("data", "tensor"), ("data", "fsdp", "tensor"))
"""Names that `Slice.logical_meshes` gives to the axes of 1-, 2- and 3-dimensional meshes, major to minor."""

_NUM_SUGGESTIONS = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """Devices of one type, joined by links that are the same everywhere at each level.

    Attributes:
      name: The node group it is made of, or several joined by `+`.
      device_type: What the devices are.
      levels: Hardware levels, innermost first, without levels of size 1; a single device has none. Devices lie at
        places, which count through the innermost level first.
      order: The number of the device at each place, in the order of the cluster; empty if they are in turn.
      torus: The shape of the torus whose chips the devices are; empty for none.
      rails: The link between devices with different numbers in different nodes, where it is not that of the level.
      uneven: What levels do not tell of how the devices are joined, whose links are then the slowest; None where they
        tell all.
      host: What each node's devices are plugged into; None if nothing is told of it.
    """

    name: str
    device_type: DeviceType
    levels: tuple[AxisLevel, ...]
    order: tuple[int, ...] = ()
    torus: tuple[int, ...] = ()
    rails: Link | None = None
    uneven: Uneven | None = None
    host: Host | None = dataclasses.field(default=None, compare=False)

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return math.prod(level.size for level in self.levels)

    def logical_mesh(self, axes: Mapping[str, int]) -> LogicalMesh:
        """Lays named axes over the slice.

        Args:
          axes: Size of each axis, major to minor: places are numbered row-major, so neighbours along the
            last axis are neighbours inside a node.

        Returns:
          The mesh, with the hardware levels of each axis.

        Raises:
          MeshError: If `axes` is no mapping, if a size is not a whole number of at least 1, if the sizes do not
            multiply to the number of devices, or if an axis would cross a node boundary unevenly; the message tells
            what would fit.
        """
        if not isinstance(axes, Mapping):
            raise MeshError(
                f'a mesh maps the names of its axes to sizes, such as {{"data": 4, "tensor": 2}}; received '
                f"{type(axes).__name__}. Of a jax.sharding.Mesh, give dict(mesh.shape)."
            )
        sizes = tuple(axes.values())
        for name, size in axes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(f"mesh axis {name!r} must have a whole size of at least 1; received {size!r:.60}.")
        if not sizes or math.prod(sizes) != self.num_devices:
            raise MeshError(
                f"the axes of a mesh must multiply to the {self.num_devices} devices of slice {self.name!r}; "
                f"received {_show(axes)}, which makes {math.prod(sizes)}. {self._suggestion(len(sizes))}"
            )
        split = self._row_major(sizes)
        if split is None:
            raise MeshError(
                f"each axis of a mesh must lie inside a node or fill it and go on across whole nodes; {_show(axes)} "
                f"crosses a boundary of slice {self.name!r}, whose levels (innermost first) have "
                f"{', '.join(str(level.size) for level in self.levels)} members. {self._suggestion(len(sizes))}"
            )
        return self.laid(tuple(axes), sizes, split)

    def laid(self, names: Sequence[str], sizes: Sequence[int], split: Split) -> LogicalMesh:
        """Axes laid over the slice as a split of its levels says."""
        levels = split.axis_levels(self.levels, len(sizes))
        axes = tuple(MeshAxis(*parts) for parts in zip(names, sizes, levels, strict=True))
        places = split.places(sizes).tolist()
        order = tuple(self.order[place] for place in places) if self.order else tuple(places)
        return LogicalMesh(axes, self.device_type, order, self.torus, self.host)

    def levels_between(self, devices: Sequence[int]) -> tuple[AxisLevel, ...]:
        """The levels, innermost first, of a collective among any devices.

        On a torus these are the parts of its axes that the devices take, while all other such parts are as busy; a
        group that is no grid of equal strides is priced as a line along the slowest axis.

        Args:
          devices: Their numbers: in the order of the cluster, on a torus row-major by coordinates.
        """
        chosen = np.asarray(devices)
        if self.uneven is not None:
            return self._levels_of_units(self.uneven, chosen)
        places = np.argsort(np.array(self.order))[chosen] if self.order else chosen
        if self.torus:
            return self._parts_of_torus(places)
        found = hierarchy(self._tiers(self.levels, places), lambda _, farthest: self.levels[farthest - 1].link)
        room = {level.link: level.size for level in self.levels}
        return tuple(
            dataclasses.replace(level, most=room[level.link]) if level.size <= room[level.link] else level
            for level in found
        )

    @staticmethod
    def _tiers(levels: Sequence[AxisLevel], places: np.ndarray) -> np.ndarray:
        """For each pair of places, how many levels they must go out to meet."""
        tier = np.zeros((len(places), len(places)), np.int64)
        for level in levels:
            tier += places[:, None] != places[None, :]
            places = places // level.size
        return tier

    def _levels_of_units(self, uneven: Uneven, devices: np.ndarray) -> tuple[AxisLevel, ...]:
        size = self.num_devices // uneven.num_units
        units, inside = devices // size, self._tiers(uneven.inside, devices % size)
        one_unit = units[:, None] == units[None, :]
        depth = len(uneven.inside) + 1
        tier = np.where(one_unit, inside, depth + np.array(uneven.tier_of_pair)[np.ix_(units, units)])

        def slowest(pairs: np.ndarray, farthest: int) -> Link:
            if farthest < depth:
                return uneven.inside[farthest - 1].link
            crossing = np.argwhere(pairs & ~one_unit).tolist()
            links = {uneven.link(int(units[i]), int(units[j])) for i, j in crossing}
            return Link(
                max(link.latency_s for link in links),
                min(link.bandwidth_bytes_per_s for link in links),
                uneven.first_level + farthest - depth,
                uneven.pairs.source,
            )

        return hierarchy(tier, slowest)

    def _parts_of_torus(self, places: np.ndarray) -> tuple[AxisLevel, ...]:
        found, left = [], places
        for level in self.levels:
            own = np.unique(left % level.size)
            left = left // level.size
            strides = np.unique(np.diff(own))
            if len(strides) > 1 or (len(own) > 1 and level.size % (int(strides[0]) * len(own))):
                break
            if len(own) > 1:
                found.append(part_of_level(level, int(strides[0]), len(own)))
        else:
            if math.prod(part.size for part in found) == len(places):
                return tuple(found)
        slowest = min(self.levels, key=lambda level: level.link.bandwidth_bytes_per_s)
        return (AxisLevel(len(places), slowest.link),)

    def _row_major(self, sizes: Sequence[int]) -> Split | None:
        return row_major([level.size for level in self.levels], sizes)

    def logical_meshes(self, max_axes: int = 3) -> tuple[LogicalMesh, ...]:
        """Every useful way to lay 1 to `max_axes` axes of size 2 and above over the slice.

        Left out are meshes with an axis that crosses a node boundary unevenly, and meshes that have the same
        axes as an earlier one up to names (the same sizes over the same levels). Orders of the same sizes are
        kept where they differ in hardware: the last axis has the fastest link. Axes are named as `AXIS_NAMES`
        tells.

        Args:
          max_axes: Greatest number of axes, 1 to 3.

        Returns:
          The meshes, fewer axes first, then greater major axes first. A slice of one device gets the one mesh
          `data=1`.

        Raises:
          MeshError: If `max_axes` is not 1, 2 or 3.
        """
        if max_axes not in (1, 2, 3):
            raise MeshError(f"max_axes must be 1, 2 or 3; received {max_axes!r}.")
        if self.num_devices == 1:
            return (self.logical_mesh({"data": 1}),)
        meshes = []
        seen = set()
        for names in AXIS_NAMES[:max_axes]:
            for sizes in ordered_factors(self.num_devices, len(names)):
                split = self._row_major(sizes)
                if split is None:
                    continue
                levels = _multiset(split.axis_levels(self.levels, len(sizes)))
                if levels not in seen:
                    seen.add(levels)
                    meshes.append(self.laid(names, sizes, split))
        return tuple(meshes)

    def _suggestion(self, num_axes: int) -> str:
        fitting = [mesh for mesh in self.logical_meshes() if len(mesh.axes) == num_axes] or self.logical_meshes()
        shown = "; ".join(
            _show(dict(zip(mesh.axis_names, mesh.shape, strict=True))) for mesh in fitting[:_NUM_SUGGESTIONS]
        )
        return f"These would fit: {shown}{'; ...' if len(fitting) > _NUM_SUGGESTIONS else ''}."

    def __str__(self) -> str:
        levels = " x ".join(map(str, self.levels))
        return f"{self.name}: {self.num_devices} x {self.device_type.name}" + (f" ({levels})" if levels else "")


def _multiset(levels: tuple[tuple[AxisLevel, ...], ...]) -> frozenset[tuple[tuple[AxisLevel, ...], int]]:
    """The axes' levels with their multiplicities, without their order."""
    return frozenset(collections.Counter(levels).items())


def _show(axes: Mapping[str, int]) -> str:
    return "{" + ", ".join(f"{name}: {size}" for name, size in axes.items()) + "}"


def ordered_factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All tuples of `count` factors of at least 2 whose product is `number`, greater first factors first."""
    if count == 1:
        if number > 1:
            yield (number,)
        return
    for first in _divisors(number):
        for rest in ordered_factors(number // first, count - 1):
            yield (first, *rest)


def _divisors(number: int) -> list[int]:
    """Divisors of at least 2, greatest first."""
    small = [factor for factor in range(1, math.isqrt(number) + 1) if number % factor == 0]
    return sorted({*small, *(number // factor for factor in small)} - {1}, reverse=True)
