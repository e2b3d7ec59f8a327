"""What one process does to carry out the pieces of one move: cut, hand out, send, receive, copy on, join."""

import dataclasses

import jax

from autoshard.runtime.pieces import Box, Piece, Pieces


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """What is taken from the shard of a local device.

    Attributes:
      device: Which.
      held: What its shard holds of the tensor.
      boxes: What is taken of that.
      is_read_late: Whether some of it stays on the device, or waits there until another process fetches it.
    """

    device: jax.Device
    held: Box
    boxes: tuple[Box, ...]
    is_read_late: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """A part that goes from one local device to another."""

    box: Box
    source: jax.Device
    target: jax.Device


@dataclasses.dataclass(frozen=True, slots=True)
class Crossing:
    """A part that one process sends another; `number` is its place among all crossings of the move."""

    number: int
    piece: Piece


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """What a local device ends with: its `box`, made of `parts`."""

    device: jax.Device
    box: Box
    parts: tuple[Box, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """The work of one process, in order.

    Attributes:
      cuts: From the shards that it holds.
      sends: What it then hands to other processes.
      receives: What it gets from them.
      copies: What goes between its own devices, straight from a cut.
      copies_on: What goes between its own devices after it was received.
      joins: What its devices end with, in the order of the new layout.
      num_crossings: Of the whole move, also between other processes.
    """

    cuts: tuple[Cut, ...]
    sends: tuple[Crossing, ...]
    receives: tuple[Crossing, ...]
    copies: tuple[Copy, ...]
    copies_on: tuple[Copy, ...]
    joins: tuple[Join, ...]
    num_crossings: int


def steps_of(pieces: Pieces, process: int) -> Steps:
    """The part that `process` (an index as in `jax.process_index()`) has in moving `pieces`."""
    landings = pieces.landings()
    crossings = [Crossing(number, piece) for number, piece in enumerate(p for p in landings if p.crosses)]
    local = [target for target in pieces.targets if target.device.process_index == process]
    cuts = []
    for device, held in pieces.held:
        given = [piece for piece in landings if piece.source == device]
        if given and device.process_index == process:
            boxes = tuple(dict.fromkeys(piece.box for piece in given))
            cuts.append(Cut(device, held, boxes, any(piece.crosses or piece.landing == device for piece in given)))
    return Steps(
        cuts=tuple(cuts),
        sends=tuple(one for one in crossings if one.piece.source.process_index == process),
        receives=tuple(one for one in crossings if one.piece.landing.process_index == process),
        copies=tuple(
            Copy(piece.box, piece.source, piece.landing)
            for piece in landings
            if piece.source != piece.landing and not piece.crosses and piece.landing.process_index == process
        ),
        copies_on=tuple(
            Copy(piece.box, piece.landing, target.device)
            for target in local
            for piece in target.pieces
            if piece.landing != target.device
        ),
        joins=tuple(Join(target.device, target.box, tuple(p.box for p in target.pieces)) for target in local),
        num_crossings=len(crossings),
    )
