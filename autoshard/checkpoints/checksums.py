"""Checksums: XXH3 of 64 bits, of arrays and of files, many at a time.

XXH3 reads as fast as memory does, and lets other threads run meanwhile. Of damage by chance it misses one in 2**64; it
is no protection against someone who changes a checkpoint on purpose.
"""

import concurrent.futures
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import xxhash

THREADS = min(8, os.cpu_count() or 1)
"""At a time; the disk or the memory is the limit before more are."""

_READ_BYTES = 4 << 20

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def checksum_of(data: np.ndarray | bytes | memoryview) -> str:
    """The checksum as 16 hexadecimal digits: of an array's elements in their order (C), or of plain bytes."""
    if isinstance(data, np.ndarray):
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data  # empty arrays have no other view as bytes
    return xxhash.xxh3_64_hexdigest(data)


def checksum_of_file(path: pathlib.Path) -> str:
    """The checksum of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    digest = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(min(_READ_BYTES, max(1, os.fstat(file.fileno()).st_size)))
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def in_threads(function: Callable[[_In], _Out], items: Iterable[_In]) -> list[_Out]:
    """`function` of every item, in order, several at a time; raises what the first failure raises."""
    items = list(items)
    if len(items) < 2 or THREADS == 1:
        return [function(item) for item in items]
    with concurrent.futures.ThreadPoolExecutor(min(THREADS, len(items)), "checksums") as threads:
        return list(threads.map(function, items))


def share_of(sizes_bytes: Sequence[int], count: int) -> list[list[int]]:
    """Deals items to `count` takers: numbers of the items of each, largest first to who has least so far."""
    load, shares = [0] * count, [[] for _ in range(count)]
    for number in sorted(range(len(sizes_bytes)), key=lambda n: -sizes_bytes[n]):
        taker = load.index(min(load))
        load[taker] += sizes_bytes[number] + 4096  # a small file costs an opening, about that of a page
        shares[taker].append(number)
    return shares
