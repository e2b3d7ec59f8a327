"""Which parts of a tensor travel between which devices when it is laid out anew, maybe over other devices.

Each device of the old layout holds one box of the tensor, and each device of the new one wants one. What a device wants
is cut along the old boxes; every part is taken from one device that holds it. Nothing here touches an array, and every
process finds the same routes, so that the two ends of a route need not talk about it.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import jax


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: for each dimension the first index, and the one after the last."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dimension."""
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def size(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    def overlap(self, other: "Box") -> "Box | None":
        """What lies in both boxes; None where that is empty."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        return Box(starts, stops) if all(a < b for a, b in zip(starts, stops, strict=True)) else None

    def inside(self, other: "Box") -> "Box":
        """The same box, counted from the first index of `other`."""
        return Box(
            tuple(a - first for a, first in zip(self.starts, other.starts, strict=True)),
            tuple(b - first for b, first in zip(self.stops, other.starts, strict=True)),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class TileRoute:
    """A part of what a device wants, and its way there.

    Attributes:
      box: Which part.
      source: A device of the old layout that holds it.
      receiver: The device that the source hands it to. Another one than the device that wants it where several in one
        process want what a distant process holds: it travels once between the processes, then is copied on.
    """

    box: Box
    source: jax.Device
    receiver: jax.Device

    @property
    def crosses(self) -> bool:
        """Whether it travels between processes."""
        return self.source.process_index != self.receiver.process_index


@dataclasses.dataclass(frozen=True, slots=True)
class TargetShard:
    """What one device of the new layout wants, and the routes of its tiles; none where it wants no elements."""

    device: jax.Device
    box: Box
    routes: tuple[TileRoute, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TransferRoutes:
    """How one tensor goes from one layout to another.

    Attributes:
      held: What each device of the old layout holds.
      targets: What each device of the new layout gets.
    """

    held: tuple[tuple[jax.Device, Box], ...]
    targets: tuple[TargetShard, ...]

    def distinct(self) -> tuple[TileRoute, ...]:
        """The routes that sources hand out, once each, in an order that all processes share."""
        return tuple(dict.fromkeys(route for target in self.targets for route in target.routes))


def boxes_of(shape: Sequence[int], sharding: jax.sharding.Sharding) -> dict[jax.Device, Box]:
    """The box that each device holds of a tensor of `shape`, in the order of the devices in `sharding`.

    Raises:
      ValueError: JAX's, where `sharding` does not divide `shape`.
    """
    found = {}
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        ranges = [part.indices(size) for part, size in zip(index, shape, strict=True)]
        found[device] = Box(tuple(r[0] for r in ranges), tuple(r[1] for r in ranges))
    return found


def find_routes(shape: Sequence[int], source: jax.sharding.Sharding, target: jax.sharding.Sharding) -> TransferRoutes:
    """The routes that bring a tensor of `shape` from `source` to `target`.

    Of several devices that hold a tile it comes from, in this order: the one that wants it; one in the same process;
    any other. Among equals, the one that has handed out least so far. Routes from distant processes land on the
    device that has received least.

    Args:
      shape: The global shape.
      source, target: Layouts over any devices, not necessarily the same ones or equally many.
    """
    held = boxes_of(shape, source)
    wanted = boxes_of(shape, target)
    holders: dict[Box, list[jax.Device]] = collections.defaultdict(list)
    for device, box in held.items():
        holders[box].append(device)
    given = collections.Counter[jax.Device]()
    taken = collections.Counter[jax.Device]()
    by_device: dict[jax.Device, list[TileRoute]] = {device: [] for device in wanted}
    for box, process, devices in _alike(wanted):
        for whole, sources in holders.items():
            part = box.overlap(whole)
            if part is None:
                continue
            near = [device for device in sources if device.process_index == process]
            distant = _least(sources, given) if not near else None
            receiver = _least(devices, taken)
            if distant is not None:
                given[distant] += part.size
                taken[receiver] += part.size
            for device in devices:
                if distant is not None:
                    by_device[device].append(TileRoute(part, distant, receiver))
                elif device in near:
                    by_device[device].append(TileRoute(part, device, device))
                else:
                    giver = _least(near, given)
                    given[giver] += part.size
                    by_device[device].append(TileRoute(part, giver, device))
    targets = tuple(TargetShard(device, box, tuple(by_device[device])) for device, box in wanted.items())
    return TransferRoutes(tuple(held.items()), targets)


def _alike(wanted: Mapping[jax.Device, Box]) -> Iterable[tuple[Box, int, list[jax.Device]]]:
    """The devices of one process that want the same box, for every such box and process."""
    groups: dict[tuple[Box, int], list[jax.Device]] = collections.defaultdict(list)
    for device, box in wanted.items():
        groups[box, device.process_index].append(device)
    return [(box, process, devices) for (box, process), devices in groups.items()]


def _least(devices: Sequence[jax.Device], load: Mapping[jax.Device, int]) -> jax.Device:
    """The device with the least load, the first of several."""
    return min(devices, key=lambda device: load[device])
