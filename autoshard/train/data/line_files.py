"""Files of lines, read by the number of the line, also where they are larger than memory.

Files are mapped, not loaded. What is kept of each is where every `EVERY`-th line begins: 8 bytes for so many lines,
about a thousandth of a click log, found by reading the file once and then kept on disk (`autoshard.user_cache`).
"""

import concurrent.futures
import dataclasses
import io
import os
import pathlib
from collections.abc import Sequence

import numpy as np
import xxhash

from autoshard.errors import ConfigError, FileFormatError
from autoshard.files import write_bytes_atomically
from autoshard.user_cache import user_cache

EVERY = 32
"""Lines between two of which it is known where they begin."""

_NEWLINE = ord("\n")
_PIECE_BYTES = 64 << 20
"""Of a file, what is searched for line ends at once."""
_GZIP = b"\x1f\x8b"


@dataclasses.dataclass(frozen=True, slots=True)
class LineFile:
    """A file of lines.

    Attributes:
        path: the file.
        content: its bytes, mapped: uint8 (length,).
        starts: at which byte the lines 0, `EVERY`, 2 * `EVERY` ... begin: int64.
        num_lines: all lines; the last one may lack its line end.
    """

    path: pathlib.Path
    content: np.ndarray
    starts: np.ndarray
    num_lines: int

    def read(self, first: int, stop: int) -> np.ndarray:
        """The lines from number `first` on, before number `stop`, with a line end behind each: uint8."""
        begin, behind = self.starts[first // EVERY], -(-stop // EVERY)
        text = self.content[begin : self.starts[behind] if behind < len(self.starts) else None]
        if stop == self.num_lines and text[-1] != _NEWLINE:
            text = np.append(text, np.uint8(_NEWLINE))
        skipped, wanted = first % EVERY, stop - first
        if skipped == 0 and stop in (behind * EVERY, self.num_lines):
            return np.asarray(text)
        ends = np.flatnonzero(text == _NEWLINE) + 1
        return np.asarray(text[ends[skipped - 1] if skipped else 0 : ends[skipped + wanted - 1]])


@dataclasses.dataclass(frozen=True, slots=True)
class LineFiles:
    """Several files of lines, one after another.

    Attributes:
        files: in their order.
        firsts: the number of the first line of each, and behind them the number of all lines.
    """

    files: tuple[LineFile, ...]
    firsts: tuple[int, ...]

    @property
    def num_lines(self) -> int:
        """Lines of all files."""
        return self.firsts[-1]

    def read(self, first: int, stop: int) -> np.ndarray:
        """The lines from number `first` on, before number `stop`, with a line end behind each: uint8."""
        number, texts = int(np.searchsorted(self.firsts, first, side="right")) - 1, []
        while first < stop:
            begin, end = self.firsts[number : number + 2]
            if first < end:
                texts.append(self.files[number].read(first - begin, min(stop, end) - begin))
            first, number = max(first, end), number + 1
        return texts[0] if len(texts) == 1 else np.concatenate([*texts, np.zeros(0, np.uint8)])

    def place(self, line: int) -> str:
        """File and number of a line, for people, who count from 1."""
        number = int(np.searchsorted(self.firsts, line, side="right")) - 1
        return f"{self.files[number].path}, line {line - self.firsts[number] + 1}"


def open_lines(path: str | os.PathLike[str]) -> LineFiles:
    """The lines of a file, or of all files right in a folder in the order of their names.

    Raises:
        ConfigError: there is no such file, it cannot be read, or there is no line.
        FileFormatError: a file is compressed.
    """
    root = pathlib.Path(path)
    try:
        paths = sorted(p for p in root.iterdir() if p.is_file()) if root.is_dir() else [root]
        with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            files = tuple(pool.map(_open, paths))
    except OSError as error:
        raise ConfigError(
            f"data.path: {error.filename or root} cannot be read: {error.strerror}. Correct the path, or make it "
            "readable."
        ) from error
    firsts = np.cumsum([0, *(file.num_lines for file in files)])
    if not firsts[-1]:
        raise ConfigError(f"data.path: there must be at least one line; {root} has none. Choose another.")
    return LineFiles(files, tuple(int(n) for n in firsts))


def _open(path: pathlib.Path) -> LineFile:
    status = path.stat()
    if not status.st_size:
        return LineFile(path, np.zeros(0, np.uint8), np.zeros(0, np.int64), 0)
    content = np.asarray(np.memmap(path, np.uint8, mode="r"))
    if content[:2].tobytes() == _GZIP:
        raise FileFormatError(f"{path} must be plain text to be read at any line; it is compressed. Unpack it: gunzip.")
    folder, kept = user_cache("lines"), None
    if folder is not None:
        what = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {EVERY}"
        kept = folder / f"lines-{xxhash.xxh3_128_hexdigest(what.encode())}.npy"
        try:
            found = np.load(kept, mmap_mode="r", allow_pickle=False)
            return LineFile(path, content, found[1:], int(found[0]))
        except (OSError, ValueError, IndexError):
            pass  # not searched yet, or the entry is damaged
    starts, num_lines = line_starts(content)
    if kept is not None:
        _keep(kept, np.concatenate([[num_lines], starts]))
    return LineFile(path, content, starts, num_lines)


def line_starts(content: np.ndarray, piece_bytes: int = _PIECE_BYTES) -> tuple[np.ndarray, int]:
    """Where every `EVERY`-th line of a file begins, and how many lines it has.

    Args:
        content: uint8 (length,), of at least one byte.
        piece_bytes: of the file, what is looked at at once.
    """
    found: list[np.ndarray] = [np.zeros(1, np.int64)]
    ended = 0
    for begin in range(0, content.size, piece_bytes):
        behind = np.flatnonzero(content[begin : begin + piece_bytes] == _NEWLINE) + begin + 1
        found.append(behind[(EVERY - 1 - ended) % EVERY :: EVERY])
        ended += behind.size
    starts = np.concatenate(found)
    has_rest = content[-1] != _NEWLINE
    return starts[starts < content.size], ended + has_rest


def _keep(path: pathlib.Path, index: np.ndarray) -> None:
    """Writes an index as a whole or not at all; a cache that cannot be written is done without."""
    written = io.BytesIO()
    np.save(written, index)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(path, written.getvalue())
    except (OSError, FileFormatError):
        pass


def runs_of(numbers: np.ndarray) -> Sequence[tuple[int, int]]:
    """Numbers as runs of consecutive ones, in their order: (first, one behind the last)."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(numbers, breaks) if run.size]
