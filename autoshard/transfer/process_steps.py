"""What one process does to carry out the routes of one move: cut, hand out, send, receive, copy on, join."""

import dataclasses

import jax

from autoshard.transfer.routes import Box, TileRoute, TransferRoutes


@dataclasses.dataclass(frozen=True, slots=True)
class SliceStep:
    """What is taken from the shard of a local device.

    Attributes:
      device: Which.
      boxes: What is taken of its shard, as parts of the tensor.
      inside: The same, counted from the start of the shard; None where that is taken whole.
      is_read_late: Whether some of it stays on the device, or waits there until another process fetches it.
    """

    device: jax.Device
    boxes: tuple[Box, ...]
    inside: tuple[Box, ...] | None
    is_read_late: bool


@dataclasses.dataclass(frozen=True, slots=True)
class CopyStep:
    """A part that goes from one local device to another."""

    box: Box
    source: jax.Device
    target: jax.Device


@dataclasses.dataclass(frozen=True, slots=True)
class SendReceive:
    """A part that one process sends another; `number` is its place among all crossings of the move."""

    number: int
    route: TileRoute


@dataclasses.dataclass(frozen=True, slots=True)
class ConcatenateStep:
    """What a local device ends with.

    Attributes:
      device: Which.
      shape: Of its shard.
      parts: What the shard is made of, as parts of the tensor; none where it has no elements.
      inside: The same, counted from the start of the shard.
    """

    device: jax.Device
    shape: tuple[int, ...]
    parts: tuple[Box, ...]
    inside: tuple[Box, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessSteps:
    """The work of one process, in order.

    Attributes:
      cuts: From the shards that it holds.
      sends: What it then hands to other processes.
      receives: What it gets from them.
      copies: What goes between its own devices, straight from a cut.
      forwards: What goes between its own devices after it was received.
      joins: What its devices end with, in the order of the new layout.
      num_crossings: Of the whole move, also between other processes.
      is_shardwise: Whether all devices are of this process, and each shard goes whole to the device in the same place:
        then `jax.device_put` makes the same copies in less time.
    """

    cuts: tuple[SliceStep, ...]
    sends: tuple[SendReceive, ...]
    receives: tuple[SendReceive, ...]
    copies: tuple[CopyStep, ...]
    forwards: tuple[CopyStep, ...]
    joins: tuple[ConcatenateStep, ...]
    num_crossings: int
    is_shardwise: bool


def steps_of(routes: TransferRoutes, process: int) -> ProcessSteps:
    """The part that `process` (an index as in `jax.process_index()`) has in moving `routes`."""
    distinct = routes.distinct()
    crossings = [SendReceive(number, route) for number, route in enumerate(p for p in distinct if p.crosses)]
    local = [target for target in routes.targets if target.device.process_index == process]
    given_by: dict[jax.Device, list[TileRoute]] = {}
    for route in distinct:
        given_by.setdefault(route.source, []).append(route)
    cuts = []
    for device, held in routes.held:
        if device.process_index == process and (given := given_by.get(device)):
            boxes = tuple(dict.fromkeys(route.box for route in given))
            inside = None if boxes == (held,) else tuple(box.inside(held) for box in boxes)
            cuts.append(
                SliceStep(device, boxes, inside, any(route.crosses or route.receiver == device for route in given))
            )
    return ProcessSteps(
        cuts=tuple(cuts),
        sends=tuple(one for one in crossings if one.route.source.process_index == process),
        receives=tuple(one for one in crossings if one.route.receiver.process_index == process),
        copies=tuple(
            CopyStep(route.box, route.source, route.receiver)
            for route in distinct
            if route.source != route.receiver and not route.crosses and route.receiver.process_index == process
        ),
        forwards=tuple(
            CopyStep(route.box, route.receiver, target.device)
            for target in local
            for route in target.routes
            if route.receiver != target.device
        ),
        joins=tuple(
            ConcatenateStep(
                target.device,
                target.box.shape,
                tuple(route.box for route in target.routes),
                tuple(route.box.inside(target.box) for route in target.routes),
            )
            for target in local
        ),
        num_crossings=len(crossings),
        is_shardwise=not crossings
        and len(cuts) == len(local) == len(routes.held) == len(routes.targets)
        and all(
            target.box == held and target.routes == (TileRoute(held, device, target.device),)
            for (device, held), target in zip(routes.held, routes.targets, strict=True)
        ),
    )
