"""Logical meshes: named axes over homogeneous devices, each axis knowing which hardware levels it crosses."""

import dataclasses
import math

from autoshard.cluster.checks import require_text, require_whole
from autoshard.cluster.device import DeviceType, Link
from autoshard.errors import ClusterError, MeshError


@dataclasses.dataclass(frozen=True, slots=True)
class AxisLevel:
    """A run of `size` peers joined by one kind of link.

    Attributes:
      size: Number of peers, at least 2.
      link: What joins them.
    """

    size: int
    link: Link

    def __post_init__(self) -> None:
        require_whole("axis level", "size", self.size, least=2)


@dataclasses.dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis of a logical mesh.

    Attributes:
      name: Axis name, as in `jax.sharding.Mesh`.
      size: Number of devices along the axis.
      levels: The hardware levels that the axis crosses, innermost first; the product of their sizes is `size`.
        An axis of 16 over two 8-GPU nodes has the levels (8, inside a node) and (2, between nodes), and a
        collective over it is hierarchical over them. An axis of size 1 has none.
    """

    name: str
    size: int
    levels: tuple[AxisLevel, ...]

    def __post_init__(self) -> None:
        try:
            require_text("mesh axis", "name", self.name)
            require_whole(f"mesh axis {self.name!r}", "size", self.size)
        except ClusterError as error:
            raise MeshError(str(error)) from error
        if math.prod(level.size for level in self.levels) != self.size:
            raise MeshError(
                f"mesh axis {self.name!r}: the sizes of its levels must multiply to its size {self.size}; "
                f"received {[level.size for level in self.levels]}."
            )

    def __str__(self) -> str:
        levels = " x ".join(f"{level.size} at level {level.link.level}" for level in self.levels)
        return f"{self.name}={self.size}" + (f" ({levels})" if levels else "")


@dataclasses.dataclass(frozen=True, slots=True)
class LogicalMesh:
    """Devices of one type arranged in a grid with named axes, major to minor.

    Attributes:
      axes: The axes; neighbours along the last one are neighbours in the hardware (row-major device order).
      device_type: What the devices are.
    """

    axes: tuple[MeshAxis, ...]
    device_type: DeviceType

    def __post_init__(self) -> None:
        if not self.axes:
            raise MeshError("a logical mesh must have at least one axis; received none.")
        if len(set(self.axis_names)) != len(self.axes):
            raise MeshError(f"the axes of a logical mesh must have distinct names; received {self.axis_names}.")

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes, major to minor."""
        return tuple(axis.size for axis in self.axes)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the axes, major to minor."""
        return tuple(axis.name for axis in self.axes)

    def axis(self, name: str) -> MeshAxis:
        """The axis called `name`.

        Raises:
          MeshError: If there is none.
        """
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise MeshError(f"the mesh has no axis {name!r}; it has {', '.join(self.axis_names)}.")

    def __str__(self) -> str:
        return f"{self.num_devices} x {self.device_type.name} as " + ", ".join(str(axis) for axis in self.axes)


def split_levels(levels: tuple[AxisLevel, ...], sizes: tuple[int, ...]) -> tuple[tuple[AxisLevel, ...], ...] | None:
    """Lays axes of the given sizes over hardware levels, in row-major device order.

    Device indices count through the innermost level first, so the last axis takes its part of the innermost
    level, the axis before it continues where that one stopped, and so on. An axis either ends inside what is
    left of a level (its size divides it) or uses it up and goes on in the next level outwards (it is divided
    by it); any other axis would straddle a boundary unevenly and has no hierarchical form.

    Args:
      levels: Hardware levels, innermost first.
      sizes: Axis sizes, major to minor; their product is the number of devices.

    Returns:
      For each axis, major to minor, its levels, innermost first; None if an axis straddles a boundary.
    """
    pending = list(reversed(levels))
    level, room = None, 1
    result = []
    for size in reversed(sizes):
        parts = []
        wanted = size
        while wanted > 1:
            if level is None or room == 1:
                level = pending.pop()
                room = level.size
            taken = math.gcd(wanted, room)
            if taken != min(wanted, room):
                return None
            parts.append(AxisLevel(taken, level.link))
            wanted //= taken
            room //= taken
        result.append(tuple(parts))
    return tuple(reversed(result))
