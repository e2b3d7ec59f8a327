"""A training step over the rows that a batch reads: a `TrainStep` like any other, in which tables are small."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.errors import ConfigError, TraceError
from autoshard.tables.find import Reading, found_in, pooled_reading
from autoshard.tables.look_ups import Table, Tables
from autoshard.tables.pooled import HostPooling, PooledBatch, PooledStep, host_pooling
from autoshard.tables.row_updates import RowUpdate, row_updates
from autoshard.tables.rows_loss import IdsFunction, RowsBatch, RowsLoss, ids_function
from autoshard.tables.rows_of_batch import BatchRows, Different, HotRows, rows_of_batch
from autoshard.tables.state_rows import row_leaves, rows_of, with_rows
from autoshard.tables.traced_loss import TracedLoss, shape_like, trace_loss
from autoshard.train_step import TrainStep


@dataclasses.dataclass(frozen=True)
class SparseStep:
    """A training step cut at its look-ups.

    Attributes:
      found: What was found in the loss.
      tables: Those that are cut out. update: What running on some rows means for them.
      step: The step over rows: its state has, in place of each table and of the optimizer's leaves of it, `hot_counts`
        and then `capacities` rows; its batch is a `RowsBatch`. With tables that are pooled at the host, a `PooledStep`.
      capacities: For each table, the most rows that a batch can read, hot ones aside, and so the places for them.
      hot_counts: For each table, rows that are always there.
      ids: From a batch to the ids of each look-up, tables first: computed on the host.
      state, batch: The arguments of `step`, by shape.
      pooling: What the host does for tables whose rows it sums; None where there are none.
    """

    found: Tables
    tables: tuple[Table, ...]
    update: RowUpdate
    step: TrainStep | PooledStep
    capacities: tuple[int, ...]
    hot_counts: tuple[int, ...]
    ids: IdsFunction
    state: Any
    batch: RowsBatch | PooledBatch
    pooling: HostPooling | None = None

    @property
    def on_devices(self) -> tuple[int, ...]:
        """Numbers of those of `update.leaves` whose rows are sent to the devices."""
        apart = () if self.pooling is None else self.pooling.leaves
        return tuple(i for i in range(len(self.update.leaves)) if i not in apart)

    @property
    def num_places(self) -> tuple[int, ...]:
        """For each table, the rows in its place on the devices: one that means nothing where it is pooled."""
        pooled = () if self.pooling is None else self.pooling.tables
        pairs = enumerate(zip(self.hot_counts, self.capacities, strict=True))
        return tuple(1 if number in pooled else n + capacity for number, (n, capacity) in pairs)

    def fed(self, batch: Any, positions: Sequence[Any], pooled: Sequence[Any] = ()) -> Any:
        """The batch of `step`: a `RowsBatch`, or with tables that are pooled at the host a `PooledBatch`.

        Args:
          batch: As the user gives it. positions: Of all look-ups.
          pooled: Sums of the tables that are pooled at the host.
        """
        if self.pooling is None:
            return RowsBatch(batch=batch, positions=tuple(positions))
        sent = tuple(x for i, x in enumerate(positions) if i not in self.pooling.look_ups)
        return PooledBatch(batch=batch, positions=sent, pooled=tuple(pooled))

    def rows_of_batch(
        self,
        batch: Any,
        order: Callable[[int, np.ndarray], np.ndarray] | None = None,
        hot: Sequence[HotRows] | None = None,
        different: Different | None = None,
    ) -> BatchRows:
        """Which rows a batch reads, each once.

        Args:
          batch: Arrays.
          order: From the number of a table and its rows to keys, by which its rows are put in order; default the rows.
          hot: Of each table, the rows that are always there, as many as `hot_counts`.
          different: Finds the different keys of a table; see `rows_of_batch`.
        """
        return rows_of_batch(self.tables, self.capacities, self.ids.on_host(batch), order, hot, different)

    def state_of(self, state: Any, rows: Sequence[np.ndarray]) -> Any:
        """The state over some rows of each table, from one with whole tables; places behind the last row are zero."""
        leaves = self.update.leaves
        taken = []
        for leaf, whole in zip(leaves, rows_of(state, leaves), strict=True):
            own, capacity = rows[leaf.table], self.capacities[leaf.table]
            pad = [(0, capacity - len(own))] + [(0, 0)] * len(leaf.row_shape)
            taken.append(jnp.pad(jnp.asarray(whole)[own], pad))
        return with_rows(state, leaves, taken)

    def write_back(self, state: Any, rows: Sequence[np.ndarray], after: Any) -> Any:
        """The state with whole tables, after a step over some of their rows."""
        leaves = self.update.leaves
        written = []
        for leaf, whole, new in zip(leaves, rows_of(state, leaves), rows_of(after, leaves), strict=True):
            own = rows[leaf.table]
            written.append(jnp.asarray(whole).at[own].set(new[: len(own)]))
        return with_rows(after, leaves, written)

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Takes one step with whole tables at hand, on one device: what every way of running it equals. No hot rows."""
        read, pooling = self.rows_of_batch(batch), self.pooling
        before = self.state_of(state, read.rows)
        if pooling is None:
            after, metrics = self.step(before, self.fed(batch, tuple(map(jnp.asarray, read.positions))))
            return self.write_back(state, read.rows, after), metrics
        leaves, rows = self.update.leaves, rows_of(before, self.update.leaves)
        sums = pooling.pool(rows, read.positions, batch)
        alone = [x[:n] for x, n in zip(rows, [self.num_places[leaf.table] for leaf in leaves], strict=True)]
        result: Any
        after, result = self.step(with_rows(before, leaves, alone), self.fed(batch, read.positions, sums))
        new = dict(zip(pooling.leaves, pooling.update(rows, read.positions, batch, result), strict=True))
        merged = [new.get(i, x) for i, x in enumerate(rows_of(after, leaves))]
        return self.write_back(state, read.rows, with_rows(after, leaves, merged)), result.metrics

    def __str__(self) -> str:
        return f"{self.found}\n{self.update}"


def sparse_step(
    step: TrainStep,
    state: Any,
    batch: Any,
    *,
    tables: Sequence[str] | None = None,
    lazy: bool = False,
    hot_counts: Mapping[str, int] = MappingProxyType({}),
    pooled: Sequence[str] = (),
) -> SparseStep:
    """Cuts a training step at its look-ups, so that it runs on the rows that a batch reads.

    Args:
      step: The training step. state, batch: Its arguments, arrays or shapes; nothing is allocated.
      tables: Paths of the parameters to cut out; None for all tables.
      lazy: Accept an update that leaves rows without a gradient as they are where that of whole tables changes them.
      hot_counts: By path of a table, how many of its rows are always there; these are updated as whole tables are.
      pooled: Paths of tables whose rows the loss sums, once, and the host is to sum; no table has hot rows then.

    Raises:
      TraceError: There is no such table, or the optimizer's update couples rows or is lazy without `lazy`; or the loss
        does not sum rows of a pooled table, or their update needs other parameters.
      ConfigError: The step pools, and scales its loss, runs in micro-batches, or has hot rows.
    """
    loss = trace_loss(step, state.params, state.mutable, batch, jax.eval_shape(step.key, state))
    found_all = found_in(loss)
    found = found_all.tables
    by_path = {table.path: table for table in found.tables}
    wanted = list(by_path) if tables is None else list(tables)
    missing = [path for path in (*wanted, *hot_counts, *pooled) if path not in by_path or path not in wanted]
    if missing or not wanted:
        why = next((f": {r.why}" for r in found.refused if missing and r.path == missing[0]), "")
        raise TraceError(
            f"A step is cut at the look-ups of embedding tables; `{missing[0] if missing else 'the loss'}` "
            f"{'is no such table' if missing else 'has none'}{why}.\n{found}\nLook up whole rows with ids that depend "
            "on the batch alone."
        )
    chosen = tuple(table for table in found.tables if table.path in wanted)
    update = row_updates(step, state, chosen, lazy)
    counts = tuple(hot_counts.get(table.path, 0) for table in chosen)
    for table, count in zip(chosen, counts, strict=True):
        if not 0 <= count < table.num_rows:
            raise ConfigError(
                f"Hot rows of a table are some of its rows; received {count} for the {table.num_rows} rows of "
                f"`{table.path}`. Give fewer, or keep all of that table on the devices: leave it out of `tables`."
            )
    capacities = tuple(min(table.most_rows, table.num_rows - n) for table, n in zip(chosen, counts, strict=True))
    pooling = None
    if pooled and any(counts):
        raise ConfigError(
            "Tables are pooled at the host, or hot rows of tables stay on the devices, not both in one step; received "
            f"hot rows of {', '.join(hot_counts)} and pooled {', '.join(pooled)}. Leave one of them out."
        )
    if pooled:
        shapes = jax.tree.map(shape_like, state)
        readings = [next(r for r in found_all.readings if r.table is table) for table in chosen]
        pooling = _pooling(step, shapes, loss, readings, pooled, capacities, update)
    ids = ids_function(step, state, batch, chosen)
    sums = {} if pooling is None else dict(zip(pooling.tables, pooling.sums, strict=True))
    sizes = [1 if i in sums else n + capacity for i, (n, capacity) in enumerate(zip(counts, capacities, strict=True))]
    own, shapes, fed = cut_at_look_ups(step, state, batch, chosen, sizes, tuple(pooled))
    if pooling is None:
        return SparseStep(found, chosen, update, own, capacities, counts, ids, shapes, fed)
    pooled_tables = tuple(chosen[number] for number in pooling.tables)
    alone = PooledStep(own, pooled_tables, pooling.shared)
    made = SparseStep(found, chosen, update, alone, capacities, counts, ids, shapes, fed, pooling)
    return dataclasses.replace(made, batch=made.fed(fed["batch"], fed["positions"], pooling.sums))


def sums_of_batch(step: TrainStep, state: Any, batch: Any) -> dict[str, int]:
    """By path of each table that the host could pool, how many sums of its rows a batch has.

    Args:
      step: The training step. state, batch: Its arguments, arrays or shapes.
    """
    state = jax.tree.map(shape_like, state)
    loss = trace_loss(step, state.params, state.mutable, batch, jax.eval_shape(step.key, state))
    sums = {}
    for reading in found_in(loss).readings:
        table = reading.table
        with contextlib.suppress(ConfigError, TraceError):
            update = row_updates(step, state, (table,), is_lazy=True)
            pooling = _pooling(step, state, loss, (reading,), (table.path,), (table.most_rows,), update)
            sums[table.path] = math.prod(pooling.sums[0].shape) // math.prod(table.row_shape)
    return sums


def _pooling(
    step: TrainStep,
    state: Any,
    loss: TracedLoss,
    readings: Sequence[Reading],
    pooled: Sequence[str],
    capacities: Sequence[int],
    update: RowUpdate,
) -> HostPooling:
    """What the host does for the tables at these paths."""
    cut, numbers = [], []
    for number, reading in enumerate(readings):
        path = reading.table.path
        if path not in pooled:
            continue
        found = pooled_reading(loss, reading)
        if isinstance(found, str):
            raise TraceError(
                f"A table is pooled at the host where the loss does nothing but sum its rows, once; of `{path}`, "
                f"{found}. Leave it out of `pooled`."
            )
        cut.append(found)
        numbers.append(number)
    return host_pooling(step, state, loss, cut, numbers, [r.table for r in readings], capacities, update)


def cut_at_look_ups(
    step: TrainStep,
    state: Any,
    batch: Any,
    tables: Sequence[Table],
    num_rows: Sequence[int],
    pooled: tuple[str, ...] = (),
) -> tuple[TrainStep, Any, RowsBatch]:
    """A training step over some rows of tables, with its state and its batch by shape.

    Args:
      step: The training step. state, batch: Its arguments, arrays or shapes.
      tables: Of its loss. num_rows: Rows that stand in place of each.
      pooled: Paths of those whose parameter is, for the loss, sums of rows.
    """
    arrays, leaves = step.of_arrays(state.params), row_leaves(state, tables)
    own = dataclasses.replace(arrays, loss_fn=RowsLoss(arrays, tuple(tables), pooled))
    rows = [jax.ShapeDtypeStruct((num_rows[x.table], *x.row_shape), x.dtype) for x in leaves]
    places = [jax.ShapeDtypeStruct(look_up.shape, jnp.int32) for table in tables for look_up in table.look_ups]
    fed = RowsBatch(batch=jax.tree.map(shape_like, batch), positions=tuple(places))
    return own, with_rows(jax.tree.map(shape_like, state), leaves, rows), fed
