"""Which worker owns which row, and where rows of a batch lie in the memory that is shared with the workers.

Row r of a table belongs to worker r mod W, as its row r div W: neighbours, which are often read together, are spread.
The rows of a batch are ordered by owner, so that each worker serves one span of them.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class RowArray:
    """An array whose first dimension are the rows of a table: the table itself, or one of the optimizer's for it.

    Attributes:
      path: In the state. table: Number of the table. num_rows: Of the table.
      row_shape: Of a row. dtype: Name of the type, such as `bfloat16`. itemsize_bytes: Of an element.
    """

    path: str
    table: int
    num_rows: int
    row_shape: tuple[int, ...]
    dtype: str
    itemsize_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return int(np.prod(self.row_shape, dtype=np.int64)) * self.itemsize_bytes

    @property
    def element_type(self) -> np.dtype:
        """The type of an element; that of bfloat16 and its like needs ml_dtypes."""
        try:
            return np.dtype(self.dtype)
        except TypeError:
            import ml_dtypes

            return np.dtype(getattr(ml_dtypes, self.dtype))


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """All arrays in host memory, their owners, and the slots by which rows of batches are exchanged.

    Attributes:
      arrays: By number.
      num_rows: Of each table. capacities: Of each table, the most rows of a batch.
      num_workers: Owners of rows. num_slots: Batches that are on their way at a time.
    """

    arrays: tuple[RowArray, ...]
    num_rows: tuple[int, ...]
    capacities: tuple[int, ...]
    num_workers: int
    num_slots: int

    def own_rows(self, table: int, worker: int) -> int:
        """Rows of a table that a worker owns."""
        return len(range(worker, self.num_rows[table], self.num_workers))

    def keys(self, table: int, rows: np.ndarray) -> np.ndarray:
        """Numbers that order rows by owner, then by their place with it."""
        if self.num_workers == 1:
            return rows
        place, owner = np.divmod(rows, self.num_workers)
        return owner * self._stride(table) + place

    def owners(self, table: int, keys: np.ndarray) -> np.ndarray:
        """The worker that owns each key's row, as numbers of a type that is sorted fast."""
        return (keys // self._stride(table)).astype(np.min_scalar_type(self.num_workers))

    def spans(self, table: int, keys: np.ndarray) -> list[tuple[int, int]]:
        """For each worker, which of the keys, in the order of their owners, are its rows."""
        if self.num_workers == 1:
            return [(0, len(keys))]
        edges = np.searchsorted(self.owners(table, keys), np.arange(self.num_workers + 1))
        return [(int(a), int(b)) for a, b in zip(edges[:-1], edges[1:], strict=True)]

    def places(self, table: int, keys: np.ndarray) -> np.ndarray:
        """The place of each key's row with its owner."""
        return keys if self.num_workers == 1 else keys % self._stride(table)

    @property
    def num_keys(self) -> tuple[int, ...]:
        """For each table, a number above all keys of its rows."""
        return tuple(self._stride(t) * self.num_workers for t in range(len(self.num_rows)))

    def _stride(self, table: int) -> int:
        return -(-self.num_rows[table] // self.num_workers)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: places for each table, then rows for each array; each part on its own line."""
        return self._offsets()[-1]

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots."""
        return max(1, self.slot_bytes * self.num_slots)

    def _offsets(self) -> list[int]:
        sizes = [capacity * 8 for capacity in self.capacities]
        sizes += [self.capacities[array.table] * array.row_bytes for array in self.arrays]
        return np.cumsum([0, *(-(-size // 64) * 64 for size in sizes)]).tolist()

    def slots(self, memory: memoryview) -> list["Slot"]:
        """The slots as arrays over the shared memory."""
        offsets = self._offsets()
        made = []
        for slot in range(self.num_slots):
            view = lambda number, shape, kind, base=slot * self.slot_bytes: np.ndarray(
                shape, kind, memory, base + offsets[number]
            )
            count = len(self.capacities)
            places = [view(i, (capacity,), np.dtype(np.int64)) for i, capacity in enumerate(self.capacities)]
            rows = [
                view(count + i, (self.capacities[array.table], *array.row_shape), array.element_type)
                for i, array in enumerate(self.arrays)
            ]
            made.append(Slot(tuple(places), tuple(rows)))
        return made


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Shared memory of one batch.

    Attributes:
      places: For each table, the places of its rows with their owners.
      rows: For each array, the rows.
    """

    places: tuple[np.ndarray, ...]
    rows: tuple[np.ndarray, ...]


def as_items(rows: np.ndarray) -> np.ndarray:
    """Rows as items of one dimension, which NumPy moves whole."""
    count = rows.shape[0]
    length = int(np.prod(rows.shape[1:], dtype=np.int64))
    return rows.reshape(count, length).view(np.dtype((np.void, length * rows.dtype.itemsize))).reshape(count)


Spans = Sequence[tuple[int, int]]
"""For each table: from which to which of a batch's rows belong to one worker."""
