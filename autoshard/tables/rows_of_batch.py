"""Which rows of tables a batch reads, each once, and where each id finds its row among them."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from autoshard.tables.look_ups import Table


@dataclasses.dataclass(frozen=True)
class HotRows:
    """Rows of a table that stay on the devices, in front of those of a batch.

    Attributes:
      rows: Which, rising, as int64. places: Where each lies among them, as int32.
    """

    rows: np.ndarray
    places: np.ndarray

    def find(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of some rows are hot, and the places of these."""
        if not len(self.rows):
            return np.zeros(len(rows), np.bool_), np.zeros(0, np.int32)
        at = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        are_hot = self.rows[at] == rows
        return are_hot, self.places[at[are_hot]]


Different = Callable[[int, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""From the number of a table and keys: where each different key stands once, and each key's number among these."""

NO_HOT_ROWS = HotRows(np.zeros(0, np.int64), np.zeros(0, np.int32))


@dataclasses.dataclass(frozen=True)
class BatchRows:
    """Which rows a batch reads.

    Attributes:
      rows: For each table, the different rows that are read and are not hot, as int64.
      positions: For each look-up, tables first, where among hot rows and these each id's row is, as int32; one behind
        the last place for an id that is no row, where the look-up fills.
    """

    rows: tuple[np.ndarray, ...]
    positions: tuple[np.ndarray, ...]


def rows_of_batch(
    tables: Sequence[Table],
    capacities: Sequence[int],
    ids: Sequence[np.ndarray],
    order: Callable[[int, np.ndarray], np.ndarray] | None = None,
    hot: Sequence[HotRows] | None = None,
    different: Different | None = None,
) -> BatchRows:
    """Which rows a batch reads.

    Args:
      tables: What is looked up. capacities: Of each, places for the rows of a batch.
      ids: Of each look-up, tables first.
      order: From the number of a table and its rows to keys, by which its rows are put in order; default the rows.
      hot: Of each table, the rows that stay on the devices; None for none.
      different: Finds the different keys, and puts them in order; default `different_keys`, called for each table once.
    """
    remaining = iter(ids)
    all_rows, positions = [], []
    for number, (table, capacity) in enumerate(zip(tables, capacities, strict=True)):
        own = [next(remaining) for _ in table.look_ups]
        by = None if order is None else lambda r, n=number: order(n, r)
        find = different_keys if different is None else lambda keys, n=number: different(n, keys)
        rows, places = _unique(table, capacity, own, by, NO_HOT_ROWS if hot is None else hot[number], find)
        all_rows.append(rows)
        positions += places
    return BatchRows(tuple(all_rows), tuple(positions))


def _unique(
    table: Table,
    capacity: int,
    ids: Sequence[np.ndarray],
    order: Callable[[np.ndarray], np.ndarray] | None,
    hot: HotRows,
    different: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The different rows that ids name and that are not hot, and the position of each id's row among all."""
    rows = np.concatenate([x.reshape(-1) for x in ids]).astype(np.int64)
    places = np.full(rows.shape, len(hot.rows) + capacity, np.int32)
    is_read: np.ndarray | slice = slice(None)
    if len(hot.rows) or (len(rows) and (rows.min() < 0 or rows.max() >= table.num_rows)):
        fills = np.concatenate([np.full(look_up.num_ids, look_up.fills) for look_up in table.look_ups])
        is_read = ((rows >= 0) & (rows < table.num_rows)) | ~fills
        rows = np.clip(rows, 0, table.num_rows - 1)
        are_hot, hot_places = hot.find(rows)
        are_read_hot = are_hot & is_read
        places[are_read_hot] = hot_places[is_read[are_hot]]
        is_read &= ~are_hot
    keys = rows if order is None else order(rows)
    first, numbers = different(keys[is_read])
    places[is_read] = numbers + np.int32(len(hot.rows))
    stops = np.cumsum([x.size for x in ids])[:-1]
    shaped = [part.reshape(x.shape) for part, x in zip(np.split(places, stops), ids, strict=True)]
    return rows[is_read][first], shaped


def different_keys(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each different key stands first, in the order of keys; and for each key its number in that order.

    Keys and their positions are sorted as one integer, which is several times faster than sorting positions by keys.
    """
    count = len(keys)
    bits = max(1, (count - 1).bit_length())
    if not count or int(keys.max()).bit_length() + bits > 63:
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        return first, inverse
    joined = np.sort((keys << bits) | np.arange(count))
    order = joined & ((1 << bits) - 1)
    is_new = np.empty(count, np.bool_)
    is_new[0] = True
    np.not_equal(joined[1:] >> bits, joined[:-1] >> bits, out=is_new[1:])
    inverse = np.empty(count, np.int32)
    inverse[order] = np.cumsum(is_new, dtype=np.int32) - 1
    return order[is_new], inverse
