"""Look-ups whose rows are exchanged for ids: how many slots, what is sent, what is moved and kept on each device.

Of N devices, each owns an even block of the table's rows and has B ids. It sends each distinct id once to the device
that owns the row, in C slots for each owner, and gets the rows back; a scatter-add sends its sums for each distinct id.
With w bytes of a row on a device:

    ids sent     N (C + 1) 4        one more for the most that any device has for any owner, which all learn
    rows sent    N C w
    C            factor x expected largest number of distinct ids for one owner (`id_distribution.py`)

Both are all-to-alls (N - 1 of N parts leave the device). Where a device has more for an owner, all go round again, so
that nothing is lost; with C as above that is expected not to happen. TorchRec sends ids and rows in the same two steps
for tables that are split by rows (docs.pytorch.org/torchrec, "input dist" and "output dist"), of lengths that are sent
beforehand and with all duplicates.

On the device ids are sorted to find duplicates, by radix in four passes over keys and values (Merrill, Grimshaw, "High
Performance and Scalable Radix Sorting", 2011), and each row is read and written once on either side.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal

from autoshard.cluster import MeshAxis
from autoshard.cost.collectives import Collective, all_to_all
from autoshard.cost.id_distribution import IdDistribution
from autoshard.errors import ConfigError

ID_BYTES = 4
"""Ids are exchanged as 32-bit integers."""
MOST_KEYS = 2**31 - 1
"""Rows of all tables together are numbered in 32 bits."""
SECTOR_BYTES = 32
"""The least that a device reads or writes of its memory at a place by itself: rows far apart, of which it has less,
cost as much. Source: NVIDIA, CUDA C++ Best Practices Guide, "Coalesced Access to Global Memory": transactions of 32
bytes.
"""
_SORTED_BYTES = 4 * 2 * (ID_BYTES + ID_BYTES)
"""Moved for each id to sort it: four passes that read and write a key and a value."""
_NUMBERED_BYTES = 12 * ID_BYTES
"""Moved for each id to tell duplicates, number the distinct ones, and find each one's slot: counted in the compiled
program."""
_LAUNCHES = 12
"""Kernels of an exchange beside its two collectives: counted in the compiled program (XLA:GPU of jax 0.10.2)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lookups:
    """What a caller says of look-ups of rows in tables.

    Attributes:
      ids: How often which row is looked up; of all tables.
      slots_factor: Slots for the ids that a device has for an owner, as a multiple of the largest number expected. What
        has no slot is sent in further rounds: more slots take memory and traffic, fewer take rounds.
      exchange: For which look-ups rows may be exchanged for ids: "sparse", those with fewer ids than rows; "any"; or
        "never".

    Raises:
      ConfigError: The factor is not positive.
    """

    ids: IdDistribution = IdDistribution()  # noqa: RUF009 - frozen
    slots_factor: float = 1.0
    exchange: Literal["sparse", "any", "never"] = "sparse"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.slots_factor) and self.slots_factor > 0):
            raise ConfigError(
                f"`Lookups.slots_factor` multiplies the expected ids for an owner, and is positive; received "
                f"{self.slots_factor}. With 1, further rounds are expected not to happen."
            )
        if self.exchange not in ("sparse", "any", "never"):
            raise ConfigError(f'`Lookups.exchange` is "sparse", "any" or "never"; received {self.exchange!r}.')


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """What a look-up exchanges, for each device.

    Attributes:
      num_owners: Devices that share the rows. num_ids: Of a device.
      expected: Distinct ids that a device has for the busiest owner, in the mean.
      slots: Ids that it can send to each owner in a round.
      row_bytes: Of the part of a row that a device has.
    """

    num_owners: int
    num_ids: int
    expected: float
    slots: int
    row_bytes: float

    @property
    def ids_bytes(self) -> float:
        """Ids on a device before the exchange, those that stay included."""
        return float(self.num_owners * (self.slots + 1) * ID_BYTES)

    @property
    def rows_bytes(self) -> float:
        """Rows on a device before the exchange, those that stay included."""
        return self.num_owners * self.slots * self.row_bytes

    def collectives(self, axes: Sequence[MeshAxis]) -> tuple[Collective, Collective]:
        """The exchange of ids, and that of rows, over `axes`."""
        return all_to_all(axes, self.ids_bytes), all_to_all(axes, self.rows_bytes)

    def moved_bytes(self, *, is_update: bool) -> float:
        """What kernels read and write: ids; each device's own rows on one side, those in slots on the other.

        A look-up reads rows and writes them into slots, and reads slots and writes results. A scatter-add fills sums
        for its distinct ids, adds to them (reads what is added, reads and writes the sum), reads them and writes slots,
        and adds these to its rows (reads slots, reads and writes rows).
        """
        own_bytes, slots_bytes = self.num_ids * self.row_bytes, self.rows_bytes
        table_bytes = slots_bytes * scattered(self.row_bytes)
        if is_update:
            rows_bytes = 4 * own_bytes + 3 * slots_bytes + 2 * table_bytes
        else:
            rows_bytes = 2 * own_bytes + slots_bytes + table_bytes
        return self.num_ids * (_SORTED_BYTES + _NUMBERED_BYTES) + rows_bytes

    @property
    def launches(self) -> int:
        """Kernels."""
        return _LAUNCHES

    def buffer_bytes(self, *, is_update: bool) -> float:
        """What it needs beside operands and result at once: slots that are sent and that are got, ids and their order;
        and the sums of a scatter-add.
        """
        sums_bytes = self.num_ids * self.row_bytes if is_update else 0.0
        return 2 * (self.rows_bytes + self.ids_bytes) + 4 * self.num_ids * ID_BYTES + sums_bytes


def scattered(row_bytes: float) -> float:
    """How many times more than `row_bytes` a device moves of its memory for each of some rows that lie far apart."""
    return max(1.0, SECTOR_BYTES / row_bytes)


@functools.lru_cache(maxsize=4096)
def exchange_of(
    num_owners: int, num_ids: int, num_tables: int, num_rows: int, row_bytes: float, lookups: Lookups
) -> Exchange:
    """What a look-up exchanges.

    Args:
      num_owners: Devices that share the rows of each table evenly.
      num_ids: Of a device, in all its tables. num_tables: On a device. num_rows: Of each table.
      row_bytes: Of the part of a row that a device has. lookups: What is known of the ids.
    """
    each, ids = num_ids / num_tables, lookups.ids
    largest = num_tables * ids.largest_load(each, num_rows, num_owners)
    most = min(num_ids, num_tables * num_rows // num_owners)
    slots = max(1, min(math.ceil(lookups.slots_factor * largest), most))
    return Exchange(num_owners, num_ids, num_tables * ids.busiest_owner(each, num_rows, num_owners), slots, row_bytes)
