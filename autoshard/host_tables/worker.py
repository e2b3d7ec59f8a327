"""A worker process: it owns rows of all tables in its own memory, and serves the pool that started it.

    python -m autoshard.host_tables.worker DESCRIPTOR

It ends when the connection does. It needs NumPy alone, no JAX, so that nearly all of its memory is for rows.
"""

import mmap
import os
import resource
import sys
import traceback
from multiprocessing.connection import Connection

import numpy as np

from autoshard.host_tables.messages import Begin, Done, Failed, Fetch, Fill, Load, Order, Read, Save, Write
from autoshard.host_tables.shard_files import load_shard, save_shard
from autoshard.host_tables.sharding import Slot, Spans, as_items


class Worker:
    """The rows that one process owns, and what is done with them."""

    def __init__(self, begin: Begin):
        self._begin, layout = begin, begin.layout
        memory = mmap.mmap(begin.memory, layout.size_bytes)
        os.close(begin.memory)
        self._slots: list[Slot] = layout.slots(memoryview(memory))
        self._arrays = [
            np.zeros((layout.own_rows(array.table, begin.worker), *array.row_shape), array.element_type)
            for array in layout.arrays
        ]
        self._items = [as_items(array) for array in self._arrays]

    def obey(self, order: Order, connection: Connection) -> object:
        """Does what it is told; returns the result, if there is one."""
        layout = self._begin.layout
        match order:
            case Read(_, slot, spans):
                for i, rows in enumerate(self._slots[slot].rows):
                    places, (start, stop) = self._span(i, slot, spans)
                    if start < stop:
                        np.take(self._items[i], places, out=as_items(rows[start:stop]), mode="clip")
            case Write(_, slot, spans, added):
                for i, rows in enumerate(self._slots[slot].rows):
                    places, (start, stop) = self._span(i, slot, spans)
                    if start == stop:
                        continue
                    first, end = added[layout.arrays[i].table]
                    if first < end:
                        rows[first:end] += self._arrays[i].take(places[: end - first], axis=0, mode="clip")
                    self._items[i].put(places, as_items(rows[start:stop]), mode="clip")
            case Fill(_, array, first):
                kind, shape = layout.arrays[array].element_type, layout.arrays[array].row_shape
                rows = np.frombuffer(connection.recv_bytes(), kind).reshape(-1, *shape)
                self._arrays[array][first : first + len(rows)] = rows
            case Fetch(_, array, first, stop):
                return np.ascontiguousarray(self._arrays[array][first:stop]).tobytes()
            case Save(_, folder):
                save_shard(folder, self._begin.worker, self._arrays)
            case Load(_, folder, num_workers):
                load_shard(folder, layout, self._begin.worker, num_workers, self._arrays)
        return None

    def _span(self, array: int, slot: int, spans: Spans) -> tuple[np.ndarray, tuple[int, int]]:
        table = self._begin.layout.arrays[array].table
        start, stop = spans[table]
        return self._slots[slot].places[table][start:stop], (start, stop)


def serve(connection: Connection) -> None:
    """Obeys until the connection ends."""
    begin: Begin = connection.recv()
    if begin.cpus:
        os.sched_setaffinity(0, begin.cpus)
    if begin.most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (begin.most_bytes, begin.most_bytes))
    try:
        worker = Worker(begin)
    except MemoryError as error:
        sizes = [begin.layout.own_rows(a.table, begin.worker) * a.row_bytes for a in begin.layout.arrays]
        connection.send(Failed(-1, f"its rows take {sum(sizes):,} bytes, which it cannot have ({error})"))
        return
    connection.send(Done(-1))
    while True:
        try:
            order: Order = connection.recv()
        except EOFError:
            return
        try:
            connection.send(Done(order.number, worker.obey(order, connection)))
        except Exception as error:
            connection.send(Failed(order.number, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
