"""Logical meshes: named axes over homogeneous devices, each axis knowing which hardware levels it crosses."""

import dataclasses
import math

from autoshard.cluster.checks import require_text, require_whole
from autoshard.cluster.device import DeviceType, Link, Wires
from autoshard.cluster.host import Host
from autoshard.errors import ClusterError, MeshError


@dataclasses.dataclass(frozen=True, slots=True)
class TorusPart:
    """Which chips of an axis of a torus a level takes.

    Attributes:
      axis: The number of the axis. axis_size: Chips along it.
      stride: How far apart the chips lie.
      ring: A ring along the whole axis.
    """

    axis: int
    axis_size: int
    stride: int
    ring: Link


@dataclasses.dataclass(frozen=True, slots=True)
class AxisLevel:
    """A run of `size` peers joined by one kind of link.

    Attributes:
      size: Number of peers, at least 2.
      link: What joins them.
      torus: Which chips they are, on a torus; None where they are behind switches.
      most: How many peers there are at the level, where several axes may count the same ones; 0 where they do not.
    """

    size: int
    link: Link
    torus: TorusPart | None = None
    most: int = 0

    def __post_init__(self) -> None:
        require_whole("axis level", "size", self.size, least=2)

    def __str__(self) -> str:
        match self.link.wires:
            case Wires.CLOSED:
                return f"ring of {self.size}"
            case Wires.OPEN:
                return f"line of {self.size}"
            case Wires.SWITCHED:
                return f"{self.size} at level {self.link.level}"


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
        levels = " x ".join(map(str, self.levels))
        return f"{self.name}={self.size}" + (f" ({levels})" if levels else "")


@dataclasses.dataclass(frozen=True, slots=True)
class LogicalMesh:
    """Devices of one type arranged in a grid with named axes, major to minor.

    Attributes:
      axes: The axes, with the hardware levels that each crosses when the devices are arranged so.
      device_type: What the devices are.
      order: The number of the device at each coordinate, row-major; empty if they are in turn.
      torus: The shape of the torus whose chips are numbered; empty where devices are numbered as JAX lists them.
      host: What each node's devices are plugged into; None if nothing is told of it.
    """

    axes: tuple[MeshAxis, ...]
    device_type: DeviceType
    order: tuple[int, ...] = ()
    torus: tuple[int, ...] = ()
    host: Host | None = None

    def __post_init__(self) -> None:
        if self.order == tuple(range(len(self.order))):
            object.__setattr__(self, "order", ())
        if self.order and sorted(self.order) != list(range(self.num_devices)):
            raise MeshError(
                f"the order of a logical mesh must name each of its {self.num_devices} devices once; received "
                f"{self.order!s:.80}."
            )
        if self.torus and math.prod(self.torus) != self.num_devices:
            raise MeshError(f"a torus {self.torus} must hold the {self.num_devices} devices of its logical mesh.")
        if not self.axes:
            raise MeshError("a logical mesh must have at least one axis; received none.")
        if len(set(self.axis_names)) != len(self.axes):
            raise MeshError(f"the axes of a logical mesh must have distinct names; received {self.axis_names}.")

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @property
    def host_link(self) -> Link | None:
        """The link between a device and the memory of its host; None if nothing is told of it."""
        return None if self.host is None else self.host.to_device

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes, major to minor."""
        return tuple(axis.size for axis in self.axes)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the axes, major to minor."""
        return tuple(axis.name for axis in self.axes)

    @property
    def device_numbers(self) -> tuple[int, ...]:
        """The number of the device at each coordinate, row-major."""
        return self.order or tuple(range(self.num_devices))

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
