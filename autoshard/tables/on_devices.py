"""A training step whose tables stay whole on the devices, and whose gradients stay sparse up to the optimizer.

Everything is in one traced function, so that it is planned and sharded like any other: the different rows of a batch
are found on the devices, taken from the tables and from the optimizer's leaves of them, updated, and put back. No
gradient and no update is as large as a table. For what that means under each optimizer see `row_updates`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.tables.find import find_tables
from autoshard.tables.look_ups import Table
from autoshard.tables.sparse_step import SparseStep, sparse_step
from autoshard.tables.state_rows import rows_of, with_rows
from autoshard.train_step import TrainStep


@dataclasses.dataclass(frozen=True, eq=False)
class SparseOnDevices:
    """A function (state, batch) -> (state, metrics), to be planned with a donated state.

    Attributes:
      sparse: The step over the rows of a batch.
    """

    sparse: SparseStep

    @property
    def __name__(self) -> str:
        step = self.sparse.step
        return f"sparse_{getattr(step.loss_fn if isinstance(step, TrainStep) else step, '__name__', 'step')}"

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """One step, with whole tables."""
        ids = iter(self.sparse.ids(batch))
        rows: list[jax.Array] = []
        positions: list[jax.Array] = []
        for table, capacity in zip(self.sparse.tables, self.sparse.capacities, strict=True):
            own, places = _different_rows(table, capacity, [next(ids) for _ in table.look_ups])
            rows.append(own)
            positions += places
        leaves = self.sparse.update.leaves
        whole = rows_of(state, leaves)
        taken = [x.at[rows[leaf.table]].get(mode="fill", fill_value=0) for leaf, x in zip(leaves, whole, strict=True)]
        fed = self.sparse.fed(batch, positions)
        after, metrics = self.sparse.step(with_rows(state, leaves, taken), fed)
        written = [
            x.at[rows[leaf.table]].set(new, mode="drop", indices_are_sorted=True, unique_indices=True)
            for leaf, x, new in zip(leaves, whole, rows_of(after, leaves), strict=True)
        ]
        return with_rows(after, leaves, written), metrics

    def __str__(self) -> str:
        return str(self.sparse)


def sparse_on_devices(
    step: TrainStep, state: Any, batch: Any, *, tables: Sequence[str] | None = None, lazy: bool = False
) -> SparseOnDevices:
    """The step with sparse gradients for tables on the devices.

    Args:
      step: The training step. state, batch: Its arguments, arrays or shapes; nothing is allocated.
      tables: Paths of the parameters with sparse gradients; None for all tables of more rows than a batch has ids: a
        batch reads most rows of the others.
      lazy: Accept an update that leaves rows without a gradient as they are where that of whole tables changes them.

    Raises:
      TraceError: There is no such table, or the optimizer's update couples rows or is lazy without `lazy`.
    """
    if tables is None:
        found = find_tables(step, state, batch).tables
        tables = [table.path for table in found if table.num_rows > table.num_ids]
    return SparseOnDevices(sparse_step(step, state, batch, tables=tables, lazy=lazy))


def _different_rows(table: Table, capacity: int, ids: Sequence[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """The different rows that ids name, ascending, behind them the number of rows; and each id's place among them, one
    behind the last for an id that is no row where the look-up fills.
    """
    read = [
        ((x >= 0) & (x < table.num_rows)) | (not look_up.fills) for look_up, x in zip(table.look_ups, ids, strict=True)
    ]
    keys = [
        jnp.where(own, jnp.clip(x, 0, table.num_rows - 1).astype(jnp.int32), table.num_rows)
        for own, x in zip(read, ids, strict=True)
    ]
    flat = jnp.concatenate([x.reshape(-1) for x in keys])
    rows, inverse = jnp.unique(flat, size=capacity, fill_value=table.num_rows, return_inverse=True)
    parts = jnp.split(inverse.reshape(-1), [*_stops(keys)])
    places = [
        jnp.where(own, part.reshape(own.shape), capacity).astype(jnp.int32)
        for own, part in zip(read, parts, strict=True)
    ]
    return rows, places


def _stops(arrays: Sequence[jax.Array]) -> list[int]:
    """Where each but the last of flat arrays end that are joined."""
    stops = [0]
    for x in arrays[:-1]:
        stops.append(stops[-1] + x.size)
    return stops[1:]
