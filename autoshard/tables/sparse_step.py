"""A training step over the rows that a batch reads: a `TrainStep` like any other, in which tables are small."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.errors import ConfigError, TraceError
from autoshard.tables.cuts import Cut, chosen_cuts, cuts_in
from autoshard.tables.find import found_in
from autoshard.tables.host_layers import CutBatch, CutStep, HostLayers, host_layers_of, without_dense
from autoshard.tables.look_ups import Table, Tables
from autoshard.tables.row_updates import RowUpdate, row_updates
from autoshard.tables.rows_loss import IdsFunction, RowsBatch, RowsLoss, ids_function
from autoshard.tables.rows_of_batch import BatchRows, Different, HotRows, rows_of_batch
from autoshard.tables.state_rows import row_leaves, rows_of, with_rows
from autoshard.tables.traced_loss import shape_like, trace_loss
from autoshard.train_step import TrainStep


@dataclasses.dataclass(frozen=True)
class SparseStep:
    """A training step cut at its look-ups.

    Attributes:
      found: What was found in the loss.
      tables: Those that are cut out. update: What running on some rows means for them.
      step: The step over rows: its state has, in place of each table and of the optimizer's leaves of it, `hot_counts`
        and then `capacities` rows; its batch is a `RowsBatch`. Where the loss begins at the host, a `CutStep`.
      capacities: For each table, the most rows that a batch can read, hot ones aside, and so the places for them.
      hot_counts: For each table, rows that are always there.
      ids: From a batch to the ids of each look-up, tables first: computed on the host.
      state, batch: The arguments of `step`, by shape.
      layers: What the host does of the loss and of the update; None where that is nothing.
    """

    found: Tables
    tables: tuple[Table, ...]
    update: RowUpdate
    step: TrainStep | CutStep
    capacities: tuple[int, ...]
    hot_counts: tuple[int, ...]
    ids: IdsFunction
    state: Any
    batch: RowsBatch | CutBatch
    layers: HostLayers | None = None

    @property
    def on_devices(self) -> tuple[int, ...]:
        """Numbers of those of `update.leaves` whose rows are sent to the devices."""
        apart = () if self.layers is None else self.layers.leaves
        return tuple(i for i in range(len(self.update.leaves)) if i not in apart)

    @property
    def num_places(self) -> tuple[int, ...]:
        """For each table, the rows in its place on the devices: one that means nothing where the host reads it."""
        apart = () if self.layers is None else self.layers.tables
        pairs = enumerate(zip(self.hot_counts, self.capacities, strict=True))
        return tuple(1 if number in apart else n + capacity for number, (n, capacity) in pairs)

    def fed(self, batch: Any, positions: Sequence[Any], values: Sequence[Any] = ()) -> Any:
        """The batch of `step`: a `RowsBatch`, or where the loss begins at the host a `CutBatch`.

        Args:
          batch: As the user gives it. positions: Of all look-ups.
          values: What the host has made.
        """
        if self.layers is None:
            return RowsBatch(batch=batch, positions=tuple(positions))
        sent = tuple(x for i, x in enumerate(positions) if i not in self.layers.look_ups)
        return CutBatch(batch=batch, positions=sent, values=tuple(values))

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
        read, layers = self.rows_of_batch(batch), self.layers
        before = self.state_of(state, read.rows)
        if layers is None:
            after, metrics = self.step(before, self.fed(batch, tuple(map(jnp.asarray, read.positions))))
            return self.write_back(state, read.rows, after), metrics
        leaves, rows, dense = self.update.leaves, rows_of(before, self.update.leaves), rows_of(before, layers.dense)
        values = layers.values(rows, dense, read.positions, batch)
        alone = [x[:n] for x, n in zip(rows, [self.num_places[leaf.table] for leaf in leaves], strict=True)]
        result: Any
        own = without_dense(with_rows(before, leaves, alone), layers)
        after, result = self.step(own, self.fed(batch, read.positions, values))
        made, dense = layers.update(rows, dense, read.positions, batch, result)
        new = dict(zip(layers.leaves, made, strict=True))
        merged = with_rows(after, leaves, [new.get(i, x) for i, x in enumerate(rows_of(after, leaves))])
        whole = with_rows(merged, layers.dense, list(map(jnp.asarray, dense)))
        return self.write_back(state, read.rows, whole), result.metrics

    def __str__(self) -> str:
        at_host = () if self.layers is None else (f"at the host: {cut}" for cut in self.layers.cuts)
        return "\n".join((str(self.found), str(self.update), *at_host))


def sparse_step(
    step: TrainStep,
    state: Any,
    batch: Any,
    *,
    tables: Sequence[str] | None = None,
    lazy: bool = False,
    hot_counts: Mapping[str, int] = MappingProxyType({}),
    pooled: Sequence[str] = (),
    host_layers: Sequence[str] = (),
) -> SparseStep:
    """Cuts a training step at its look-ups, so that it runs on the rows that a batch reads.

    Args:
      step: The training step. state, batch: Its arguments, arrays or shapes; nothing is allocated.
      tables: Paths of the parameters to cut out; None for all tables.
      lazy: Accept an update that leaves rows without a gradient as they are where that of whole tables changes them.
      hot_counts: By path of a table, how many of its rows are always there; these are updated as whole tables are.
      pooled: Paths of tables whose rows the loss sums, or makes less otherwise, and the host is to do that; no table
        has hot rows then.
      host_layers: Paths of other parameters whose layers run at the host, behind the rows that they read, pooled or
        not; see `find_cuts`.

    Raises:
      TraceError: There is no such table, or the optimizer's update couples rows or is lazy without `lazy`; or there is
        no cut behind a pooled table or layer, or their update needs other parameters.
      ConfigError: The loss begins at the host, and the step scales its loss, runs in micro-batches, or has hot rows.
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
    if (pooled or host_layers) and any(counts):
        raise ConfigError(
            "Tables are pooled at the host, and layers run there, or hot rows of tables stay on the devices, not both "
            f"in one step; received hot rows of {', '.join(hot_counts)} and {', '.join((*pooled, *host_layers))} at "
            "the host. Leave one of them out."
        )
    layers = None
    if pooled or host_layers:
        shapes = jax.tree.map(shape_like, state)
        readings = [next(r for r in found_all.readings if r.table is table) for table in chosen]
        cuts = chosen_cuts(loss, found_all.readings, chosen, pooled, host_layers)
        layers = host_layers_of(step, shapes, loss, cuts, readings, capacities, update)
    ids = ids_function(step, state, batch, chosen)
    apart, pairs = () if layers is None else layers.tables, enumerate(zip(counts, capacities, strict=True))
    sizes = [1 if i in apart else n + capacity for i, (n, capacity) in pairs]
    own, shapes, fed = cut_at_look_ups(step, state, batch, chosen, sizes, () if layers is None else layers.cuts)
    if layers is None:
        return SparseStep(found, chosen, update, own, capacities, counts, ids, shapes, fed)
    at_host = [update.leaves[i].index for i in layers.leaves] + [leaf.index for leaf in layers.dense]
    alone = CutStep(own, layers.cuts, tuple(at_host), layers.shared)
    on_devices = without_dense(shapes, layers)
    made = SparseStep(found, chosen, update, alone, capacities, counts, ids, on_devices, fed, layers)
    return dataclasses.replace(made, batch=made.fed(fed["batch"], fed["positions"], layers.shapes))


def cuts_of_step(step: TrainStep, state: Any, batch: Any) -> tuple[Cut, ...]:
    """The cuts of a step's loss that its optimizer allows, each by itself, in their order.

    Args:
      step: The training step. state, batch: Its arguments, arrays or shapes.
    """
    state = jax.tree.map(shape_like, state)
    loss = trace_loss(step, state.params, state.mutable, batch, jax.eval_shape(step.key, state))
    all_readings = found_in(loss).readings
    allowed = []
    for at in cuts_in(loss, all_readings):
        readings = [r for r in all_readings if r.table in at.cut.tables]
        with contextlib.suppress(ConfigError, TraceError):
            update = row_updates(step, state, at.cut.tables, is_lazy=True)
            host_layers_of(step, state, loss, [at], readings, [t.most_rows for t in at.cut.tables], update)
            allowed.append(at.cut)
    return tuple(allowed)


def cut_at_look_ups(
    step: TrainStep,
    state: Any,
    batch: Any,
    tables: Sequence[Table],
    num_rows: Sequence[int],
    cuts: tuple[Cut, ...] = (),
) -> tuple[TrainStep, Any, RowsBatch]:
    """A training step over some rows of tables, with its state and its batch by shape.

    Args:
      step: The training step. state, batch: Its arguments, arrays or shapes.
      tables: Of its loss. num_rows: Rows that stand in place of each.
      cuts: Behind which the loss begins.
    """
    arrays, leaves = step.of_arrays(state.params), row_leaves(state, tables)
    own = dataclasses.replace(arrays, loss_fn=RowsLoss(arrays, tuple(tables), cuts))
    rows = [jax.ShapeDtypeStruct((num_rows[x.table], *x.row_shape), x.dtype) for x in leaves]
    places = [jax.ShapeDtypeStruct(look_up.shape, jnp.int32) for table in tables for look_up in table.look_ups]
    fed = RowsBatch(batch=jax.tree.map(shape_like, batch), positions=tuple(places))
    return own, with_rows(jax.tree.map(shape_like, state), leaves, rows), fed
