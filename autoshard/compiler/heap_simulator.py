"""How much memory buffers need once each has an address: what is alive at once, and the gaps between.

A compiler gives every temporary buffer a fixed place in one allocation. Buffers that are alive together lie side by
side, and what one leaves free is seldom exactly what the next one needs, so that the allocation is larger than the most
that is ever alive. XLA packs twice, largest buffers first and longest-lived first, and keeps the smaller result
(`AssignBuffersWithSequentialOrdering` in xla/service/buffer_assignment.cc); each buffer goes into the smallest gap that
it fits in (`GlobalDecreasingSizeBestFitHeap` in xla/service/heap_simulator).
"""

from collections.abc import Sequence

import numba
import numpy as np

from autoshard.side_by_side import side_by_side

ALIGNMENT_BYTES = 256
"""Buffers begin at multiples of it (XLA:GPU, `kXlaAllocatedBufferAlignBytes`)."""


def packed_bytes(starts: np.ndarray, stops: np.ndarray, sizes_bytes: np.ndarray) -> float:
    """The size of the allocation that XLA would make for buffers of known lifetimes.

    Args:
      starts, stops: Integers [n]; buffer k is alive at `starts[k] <= t < stops[k]`, which is not empty.
      sizes_bytes: Bytes of each buffer [n], each counted up to a multiple of `ALIGNMENT_BYTES`.
    """
    sizes = np.ceil(np.asarray(sizes_bytes, np.float64) / ALIGNMENT_BYTES).astype(np.int64)
    some = sizes > 0
    starts, stops, sizes = np.asarray(starts)[some], np.asarray(stops)[some], sizes[some]
    durations = _durations(starts, stops)
    orders = np.lexsort((-durations, -sizes)), np.lexsort((-sizes, -durations))
    most = lambda order: int(np.max(offsets(starts, stops, sizes, order) + sizes, initial=0))
    return float(ALIGNMENT_BYTES * min(side_by_side(most, orders)))


def in_rooms(
    starts: np.ndarray, stops: np.ndarray, sizes_bytes: np.ndarray, rooms: Sequence[tuple[int, float]]
) -> np.ndarray:
    """Which buffers lie in the allocations of results that are made later (bool [n]).

    Results that the caller gets have allocations of their own, there from the start. Largest first, XLA puts each
    buffer into the smallest of them that is no smaller and stands empty while the buffer is there
    (`BufferAssigner::AssignSingleHloBuffer`).

    Args:
      starts, stops, sizes_bytes: As for `packed_bytes`. rooms: (start, bytes) of each result.
    """
    found = np.zeros(len(starts), bool)
    ordered = sorted(rooms, key=lambda room: room[1])
    begins, room_bytes = np.array([b for b, _ in ordered], np.int64), np.array([s for _, s in ordered])
    is_taken = np.zeros((len(ordered), max(stops, default=0)), bool)
    is_wanted = stops <= max(begins, default=0)
    for k in np.argsort(-sizes_bytes, kind="stable").tolist():
        if is_wanted[k] and sizes_bytes[k]:
            fitting = np.flatnonzero((room_bytes >= sizes_bytes[k]) & (begins >= stops[k]))
            empty = fitting[~is_taken[fitting, starts[k] : stops[k]].any(axis=1)]
            if len(empty):
                is_taken[empty[0], starts[k] : stops[k]] = True
                found[k] = True
    return found


def _durations(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """How many buffers are made and freed while each one is there, which is how XLA's heap counts time."""
    made = np.searchsorted(np.sort(stops), starts, side="right") + np.searchsorted(np.sort(starts), starts)
    freed = np.searchsorted(np.sort(stops), stops) + np.searchsorted(np.sort(starts), stops)
    return freed - made


@numba.njit(cache=True, nogil=True)
def offsets(starts: np.ndarray, stops: np.ndarray, sizes: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Where each buffer begins, if they are placed in `order`, each into the smallest gap that it fits in, the lowest
    of equal ones.

    Args:
      starts, stops: As for `packed_bytes`. sizes: Integers [n], positive. order: A permutation of the n buffers.

    Returns:
      int64 [n], in the unit of `sizes`.
    """
    lows = np.zeros(len(sizes), np.int64)
    # of what is placed, by rising place; side by side in memory, as all of it is read for each buffer
    placed_start, placed_stop = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
    placed_low, placed_high = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
    for count in range(len(order)):  # loops over numbers alone take half as long to compile
        k = order[count]
        start, stop, size = starts[k], stops[k], sizes[k]
        taken, found, least = 0, -1, 0  # all below `taken` is in use or too small
        for before in range(count):
            if placed_start[before] < stop and placed_stop[before] > start:
                gap = placed_low[before] - taken
                if gap >= size and (found < 0 or gap < least):
                    found, least = taken, gap
                    if gap == size:
                        break
                taken = max(taken, placed_high[before])
        low = taken if found < 0 else found
        lows[k] = low
        at = count
        while at > 0 and placed_low[at - 1] > low:
            placed_start[at], placed_stop[at] = placed_start[at - 1], placed_stop[at - 1]
            placed_low[at], placed_high[at] = placed_low[at - 1], placed_high[at - 1]
            at -= 1
        placed_start[at], placed_stop[at], placed_low[at], placed_high[at] = start, stop, low, low + size
    return lows
