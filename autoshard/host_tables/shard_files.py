"""Rows of workers in files: each writes its own, in blocks with checksums, and reads those of any number of others."""

import json
import os
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from autoshard.checkpoints.checksums import checksum_of
from autoshard.errors import FileFormatError
from autoshard.host_tables.sharding import Layout

BLOCK_BYTES = 4 << 20
"""Read and checked at a time: what is held in memory besides the rows."""


def save_shard(folder: pathlib.Path, worker: int, arrays: Sequence[np.ndarray]) -> None:
    """Writes the rows of one worker, and the checksums of the blocks of each array.

    Raises:
        OSError: they cannot be written.
    """
    found = []
    for number, rows in enumerate(arrays):
        with _path(folder, number, worker).open("wb") as file:
            sums = []
            for block in _blocks(rows):
                file.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
                sums.append(checksum_of(block))
            file.flush()
            os.fsync(file.fileno())
            found.append(sums)
    _sums_path(folder, worker).write_text(json.dumps(found))


def load_shard(
    folder: pathlib.Path, layout: Layout, worker: int, num_writers: int, arrays: Sequence[np.ndarray]
) -> None:
    """Reads the rows of one worker from the files of `num_writers`; only of those that have some of its rows.

    Raises:
        FileFormatError: A block is not what was written.
    """
    own, common = layout.num_workers, np.gcd(layout.num_workers, num_writers)
    for number, (array, rows) in enumerate(zip(layout.arrays, arrays, strict=True)):
        block_rows = max(1, BLOCK_BYTES // max(1, array.row_bytes))
        for writer in range(worker % int(common), num_writers, int(common)):
            count = len(range(writer, array.num_rows, num_writers))
            path, sums = _path(folder, number, writer), json.loads(_sums_path(folder, writer).read_text())[number]
            with path.open("rb") as file:
                for block, first in enumerate(range(0, count, block_rows)):
                    size = min(block_rows, count - first)
                    content = np.fromfile(file, np.uint8, size * array.row_bytes)
                    if checksum_of(content) != sums[block]:
                        raise FileFormatError(
                            f"{path}: block {block} does not have the checksum that was told when it was written; the "
                            "file was changed or cut short. Resume from an earlier checkpoint."
                        )
                    read = content.view(array.element_type).reshape(size, *array.row_shape)
                    ids = np.arange(first, first + size) * num_writers + writer
                    mine = ids % own == worker
                    rows[ids[mine] // own] = read[mine]


def _blocks(rows: np.ndarray) -> Iterator[np.ndarray]:
    row_bytes = max(1, rows[:1].nbytes)
    count = max(1, BLOCK_BYTES // row_bytes)
    for first in range(0, len(rows), count):
        yield rows[first : first + count]


def _path(folder: pathlib.Path, number: int, worker: int) -> pathlib.Path:
    return folder / f"array-{number}-worker-{worker}.bin"


def _sums_path(folder: pathlib.Path, worker: int) -> pathlib.Path:
    return folder / f"checksums-worker-{worker}.json"
