"""States in files of a host's memory: three places in turn for each process, two with whole states and one to write to.

A process has a folder of its own. `layout.json` tells which parts of which tensors its files hold, and where;
`slot-<n>.bin` holds their bytes; `step-<s>.json` says that the slot it names holds the state after step s, with
checksums. It is there only while that is so: it goes before the slot is written to, and comes by a rename afterwards.
"""

import contextlib
import math
import os
import pathlib
import re
import shutil
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np
import pydantic

from autoshard.checkpoints.checksums import checksum_of, in_threads
from autoshard.checkpoints.layout import LeafShape, Piece
from autoshard.checkpoints.manifest import Checksum, Count, Entry
from autoshard.checkpoints.sealed import read_sealed, write_sealed
from autoshard.errors import FileFormatError
from autoshard.transfer.routes import Box

NUM_SLOTS = 3
"""While a step is written, the two before stay: another process may have the older one only.

Let a process begin to write the state after step s once that state is computed. All others have begun step s by then,
so they have kept the state after step s - 2, which this process still has. Begun any sooner, as while its own step s is
still waiting for the others, there may be no step that all have."""

FOLDER_NAME = re.compile(r"[0-9a-f]{16}-[0-9]{1,9}(-copy)?\Z")
"""A session, the process, and whether the content is a copy for a process of another host."""

_ALIGNED_BYTES = 64
_FEW_BYTES = 64 << 20
"""One thread reads this much in the time that starting others takes several times over."""


class HeldPiece(Entry):
    """A part of a leaf in a slot.

    Attributes:
        leaf: number of the leaf.
        start, stop: the part, as in `Box`.
        offset_bytes: where it begins in the slot; its elements follow in C order.
    """

    leaf: Count
    start: tuple[Count, ...]
    stop: tuple[Count, ...]
    offset_bytes: Count

    @property
    def box(self) -> Box:
        """The part."""
        return Box(self.start, self.stop)


class HeldLeaf(Entry):
    """A leaf of the state: its path, shape and type."""

    name: str
    shape: tuple[Count, ...]
    dtype: str

    @property
    def leaf(self) -> LeafShape:
        """Its shape and type. Raises TypeError for a type that does not exist."""
        return LeafShape(self.name, self.shape, jnp.dtype(self.dtype))


class Layout(Entry):
    """What the slots of one folder hold.

    Attributes:
        session: names the start of the run's processes by which it was written, and which of the shardings and types
            that states have had since; states of different sessions differ.
        started_s: when that was, in seconds since 1970.
        leaves: of the whole state.
        pieces: what is here, first what no other host holds.
        num_sole: of the pieces, how many no other host holds.
    """

    session: Checksum
    started_s: pydantic.NonNegativeFloat
    leaves: tuple[HeldLeaf, ...]
    pieces: tuple[HeldPiece, ...]
    num_sole: Count

    def size_bytes(self, piece: HeldPiece) -> int:
        """Bytes of a piece."""
        return piece.box.size * jnp.dtype(self.leaves[piece.leaf].dtype).itemsize

    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return max((piece.offset_bytes + self.size_bytes(piece) for piece in self.pieces), default=0)

    def sole(self) -> "Layout":
        """The same, of the pieces only that no other host holds."""
        return self.model_copy(update={"pieces": self.pieces[: self.num_sole]})


class Record(Entry):
    """That a slot holds the state after `step`, and the checksums of its pieces."""

    step: Count
    slot: Count
    checksums: tuple[Checksum, ...]


def layout_of(
    session: str, started_s: float, leaves: Sequence[LeafShape], sole: Sequence[Piece], shared: Sequence[Piece]
) -> Layout:
    """The layout of a process that looks after `sole`, which no other host holds, and `shared`."""
    pieces, end = [], 0
    for piece in (*sole, *shared):
        pieces.append(HeldPiece(leaf=piece.leaf, start=piece.box.starts, stop=piece.box.stops, offset_bytes=end))
        size = piece.box.size * leaves[piece.leaf].dtype.itemsize
        end += math.ceil(size / _ALIGNED_BYTES) * _ALIGNED_BYTES
    held = tuple(HeldLeaf(name=leaf.name, shape=leaf.shape, dtype=leaf.dtype.name) for leaf in leaves)
    return Layout(session=session, started_s=started_s, leaves=held, pieces=tuple(pieces), num_sole=len(sole))


class SlotWriter:
    """Writes states to one folder, a step at a time."""

    def __init__(self, folder: pathlib.Path, layout: Layout):
        """Makes the folder anew, with room for all slots.

        Raises:
            OSError: it cannot be made, as when the memory is full.
            FileFormatError: its description cannot be written.
        """
        self.layout, self._folder = layout, folder
        folder.mkdir(mode=0o700)
        try:
            self._slots = [self._open(folder / f"slot-{n}.bin") for n in range(NUM_SLOTS)]
            write_sealed(folder / "layout.json", layout)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # what there is of it would keep the memory full
            raise
        spans = [(p.offset_bytes, p.offset_bytes + layout.size_bytes(p)) for p in layout.pieces]
        self._places = [[slot[start:stop] for start, stop in spans] for slot in self._slots]
        self._steps = [-1] * NUM_SLOTS

    def _open(self, path: pathlib.Path) -> np.ndarray:
        size = max(self.layout.slot_bytes(), 1)
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a page that is missing later would end the process
        return np.asarray(np.memmap(path, np.uint8, "r+", shape=(size,)))  # views of a plain array are made sooner

    @property
    def is_there(self) -> bool:
        """Whether nobody has removed the folder."""
        return (self._folder / "layout.json").exists()

    def begin(self) -> int:
        """The slot with the oldest state, which is none from now on; to be called once the new one is computed."""
        slot = self._steps.index(min(self._steps))
        with contextlib.suppress(FileNotFoundError):
            (self._folder / f"step-{self._steps[slot]}.json").unlink()
        self._steps[slot] = -1
        return slot

    def bytes_of(self, slot: int) -> np.ndarray:
        """All bytes of a slot."""
        return self._slots[slot]

    def places(self, slot: int) -> list[np.ndarray]:
        """The bytes of each piece in a slot."""
        return self._places[slot]

    def publish(self, step: int, slot: int, checksums: Sequence[str]) -> None:
        """Says that `slot` holds the state after `step`.

        Raises:
            FileFormatError: it cannot be said, as when the folder is gone.
        """
        write_sealed(self._folder / f"step-{step}.json", Record(step=step, slot=slot, checksums=tuple(checksums)))
        self._steps[slot] = step


class SlotReader:
    """Reads what some process, maybe one that is gone, left in a folder."""

    def __init__(self, folder: pathlib.Path):
        """Reads the description.

        Raises:
            FileFormatError: it is damaged.
        """
        self.name, self._folder = folder.name, folder
        self.layout = read_sealed(folder / "layout.json", Layout)
        self.steps = sorted(
            int(path.stem.removeprefix("step-"))
            for path in folder.glob("step-*.json")
            if path.stem.removeprefix("step-").isdecimal()
        )

    def damaged(self, step: int, numbers: Iterable[int]) -> list[int]:
        """Those of the pieces `numbers` that are not what was written in `step`; all if that cannot be told."""
        numbers = list(numbers)
        try:
            record, slot = self._record(step)
        except (FileFormatError, OSError):
            return numbers
        is_sound = lambda n: checksum_of(self._bytes(slot, n)) == record.checksums[n]
        return [n for n, sound in zip(numbers, in_threads(is_sound, numbers), strict=True) if not sound]

    def read(self, step: int, number: int, box: Box) -> np.ndarray:
        """A copy of the part `box` (of the leaf) of piece `number` after `step`.

        Raises:
            FileFormatError, OSError: it is not there.
        """
        _, slot = self._record(step)
        piece = self.layout.pieces[number]
        data = self._bytes(slot, number).view(jnp.dtype(self.layout.leaves[piece.leaf].dtype)).reshape(piece.box.shape)
        inside = box.inside(piece.box)
        return np.array(data[tuple(map(slice, inside.starts, inside.stops))], order="C", copy=True)

    def drop_all_but(self, step: int) -> None:
        """Frees the memory of all other steps."""
        record, _ = self._record(step)
        for other in self.steps:
            if other != step:
                (self._folder / f"step-{other}.json").unlink(missing_ok=True)
        for number in range(NUM_SLOTS):
            if number != record.slot:
                (self._folder / f"slot-{number}.bin").unlink(missing_ok=True)

    def _record(self, step: int) -> tuple[Record, np.ndarray]:
        record = read_sealed(self._folder / f"step-{step}.json", Record)
        if record.step != step or len(record.checksums) != len(self.layout.pieces) or record.slot >= NUM_SLOTS:
            raise FileFormatError(f"{self._folder}: the record of step {step} does not fit the layout beside it.")
        path = self._folder / f"slot-{record.slot}.bin"
        size = max(self.layout.slot_bytes(), 1)
        if path.stat().st_size != size:
            raise FileFormatError(f"{path}: it has {path.stat().st_size} bytes, but {size} were written.")
        return record, np.memmap(path, np.uint8, "r", shape=(size,))

    def _bytes(self, slot: np.ndarray, number: int) -> np.ndarray:
        piece = self.layout.pieces[number]
        return slot[piece.offset_bytes : piece.offset_bytes + self.layout.size_bytes(piece)]


def checksums_of(places: Sequence[np.ndarray]) -> list[str]:
    """The checksum of each piece, given as its bytes."""
    if sum(place.nbytes for place in places) < _FEW_BYTES:
        return [checksum_of(place) for place in places]
    return in_threads(checksum_of, places)


def readers_in(folder: pathlib.Path) -> list[SlotReader]:
    """What is readable in a folder of such folders."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if FOLDER_NAME.match(path.name):
            with contextlib.suppress(FileFormatError, OSError):
                found.append(SlotReader(path))
    return found
