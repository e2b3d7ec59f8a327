"""`autoshard.HostTables`: a training step whose embedding tables live in the memory of the host.

with autoshard.HostTables(step, state, batch, execution=autoshard.Execution("pipelined", num_workers=4)) as tables:
    for done in tables.steps(batches):
        print(done.metrics["loss"])
    tables.save("checkpoint")
"""

import contextlib
import os
import pathlib
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.api import BasePlan, load, plan_on_devices
from autoshard.checkpoints.agreement import from_first
from autoshard.cluster import Cluster
from autoshard.errors import ConfigError, TrainingError
from autoshard.host_tables.checkpoint_folder import dense_checkpoints, has_tables, remove_old_tables, tables_folder
from autoshard.host_tables.dense_state import as_key, dense_leaves, with_dense_leaves, without_keys
from autoshard.host_tables.host_params import HostParams
from autoshard.host_tables.hot_part import HotPart
from autoshard.host_tables.options import Execution
from autoshard.host_tables.pipeline import Pipeline, Stepped
from autoshard.host_tables.pool import PIECE_BYTES, WorkerPool
from autoshard.host_tables.row_mover import OneProcess, SeveralProcesses, placed
from autoshard.host_tables.sharding import Layout, RowArray
from autoshard.plans.options import PlanOptions
from autoshard.printing import amount
from autoshard.tables.initial_rows import initial_state
from autoshard.tables.rows_function import rows_function
from autoshard.tables.rows_loss import RowsBatch
from autoshard.tables.rows_of_batch import NO_HOT_ROWS, HotRows
from autoshard.tables.sparse_step import SparseStep, sparse_step
from autoshard.tables.state_rows import rows_of, with_rows
from autoshard.train_step import TrainStep


class HostTables:
    """A training step with tables in host memory. A context manager; leaving it ends the worker processes.

    Rows of tables, and of the optimizer's state for them, belong to worker processes of this host, which copy those of
    a batch in and out. The step itself runs over these rows on the accelerators, as a plan says; it makes no difference
    to its results where tables are, except in the mode `async`.

    Attributes:
      sparse: The step over rows, and what was found of tables.
      plan: How that runs on the accelerators; None for one device.
      execution: See `Execution`.
      pool: The worker processes.
    """

    def __init__(
        self,
        step: TrainStep,
        state: Any,
        batch: Any,
        *,
        tables: Sequence[str] | None = None,
        hot_rows: Mapping[str, int | np.ndarray] = MappingProxyType({}),
        pooled: Sequence[str] = (),
        host_layers: Sequence[str] = (),
        lazy: bool = False,
        execution: Execution | None = None,
        cluster: Cluster | str | os.PathLike[str] | None = None,
        mesh: Mapping[str, int] | None = None,
        options: PlanOptions | None = None,
        plan: BasePlan | None = None,
        worker_bytes: int | None = None,
    ):
        """Finds the tables, plans the step over rows, and starts the workers.

        Args:
          step: The training step, with any loss that looks rows up (`nnx.Embed`, `jnp.take`, `table[ids]`) and any
            Optax transformation that treats rows by themselves.
          state: Its state, as arrays, the same in all processes; or a function without arguments that makes it, which
            is traced: rows are then made in pieces, the same as it would make, so that a table never needs to be whole
            anywhere.
          batch: Arrays or shapes; all batches have these. Of several processes, each is given all of every batch.
          tables: Paths of the parameters that go to the host; None for all tables.
          hot_rows: By path, which rows of a table stay on the devices: the first so many, or these. No batch waits for
            them. They are updated as whole tables are, also where a batch does not read them.
          pooled: Paths of tables whose rows the loss sums, or averages: the host makes the sums and updates the rows,
            so that only sums and their gradients are sent. Not in `pipelined`, and not of several processes.
          host_layers: Paths of other parameters whose layers run at the host, right behind the rows that they read,
            pooled or not: they live there, the host updates them, and what the last of these layers make is sent. With
            the limits of `pooled`; `autoshard.tables.find_cuts` tells what can be named.
          lazy: Accept an update that leaves rows without a gradient as they are where that of whole tables changes them
            (momentum, Adam, weight decay).
          execution: Mode, number of workers of each process, and what limits them.
          cluster, mesh, options: For `autoshard.plan` of the step over rows; without any of them it runs on the default
            device, or, of several processes, on all devices.
          plan: That of the step over rows, in place of these.
          worker_bytes: Limit of the memory of each worker; None for the system's.

        Raises:
          TraceError: There are no tables, or the update does not fit; names the line.
          ConfigError: The host cannot pool, or run layers, in this mode or with this optimizer; stages are to be tried
            (`PlanOptions.pipelines`).
          PlanMismatchError: `plan` is of another step.
          TrainingError: A worker does not start.
        """
        if options is not None and options.pipelines == "search":
            raise ConfigError(
                'PlanOptions.pipelines="search": the step over rows is one program, beside which hosts look rows up. '
                "Leave the option out."
            )
        num_processes = jax.process_count()
        self.execution = execution or Execution()
        self._shapes = jax.eval_shape(state if callable(state) else lambda: state)
        wanted = {
            path: np.arange(rows) if isinstance(rows, int) else np.unique(np.asarray(rows, np.int64))
            for path, rows in hot_rows.items()
        }
        counts = {path: len(rows) for path, rows in wanted.items()}
        if (pooled or host_layers) and (self.execution.mode == "pipelined" or num_processes > 1):
            raise ConfigError(
                "Tables are pooled at the host, and layers run there, in one process, in `sync` or `async`: what is "
                "made of rows that are in flight cannot be patched. Received "
                f"mode={self.execution.mode!r}, {num_processes} processes. Change that, or leave `pooled` and "
                "`host_layers` out."
            )
        self.sparse: SparseStep = sparse_step(
            step,
            self._shapes,
            batch,
            tables=tables,
            lazy=lazy,
            hot_counts=counts,
            pooled=tuple(pooled),
            host_layers=tuple(host_layers),
        )
        self._params = HostParams(self.sparse.layers)
        self.plan: BasePlan | None = None
        run: Any = jax.jit(self.sparse.step, donate_argnums=0)
        shardings = None
        if num_processes > 1 or not (cluster is None and mesh is None and options is None and plan is None):
            arguments = self.sparse.state, self.sparse.batch
            settings: Any = {"cluster": cluster, "mesh": mesh, "options": options, "donate_argnums": 0}
            make = lambda: plan or plan_on_devices(self.sparse.step, *arguments, **settings)
            self.plan = _planned_by_the_first(make)
            run = self.plan.jit(self.sparse.step)
            run.prepare(*arguments)
            shardings = run.in_shardings(arguments)
        self._shardings = shardings
        leaves = [self.sparse.update.leaves[i] for i in self.sparse.on_devices]
        together = [None] * len(leaves) if shardings is None else rows_of(shardings[0], leaves)
        apart = [self._everywhere] * len(leaves) if counts else together
        self._hot_part = HotPart([self.sparse.hot_counts[leaf.table] for leaf in leaves], together, apart)
        self._mover = self._mover_of([leaf.table for leaf in leaves], apart)
        count = self.execution.num_workers
        own = range(count * jax.process_index(), count * (jax.process_index() + 1))
        layout = _layout(self.sparse, self.execution, count * num_processes)
        self._hot = [_hot_rows(layout, number, wanted.get(t.path)) for number, t in enumerate(self.sparse.tables)]
        self.pool = WorkerPool(layout, self.execution, worker_bytes, own)
        self._step = 0
        try:
            self._run, self._state = run, self._params.take(self._take(state), shardings)
            self._read_hot_rows()
        except BaseException:
            self.pool.close()
            raise
        self._is_running = threading.Lock()

    def __enter__(self) -> "HostTables":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker processes; what they hold is gone."""
        self.pool.close()

    def steps(self, batches: Iterable[Any]) -> Generator[Stepped, None, None]:
        """Trains on batches, one step each, and yields what came of it.

        Batches are taken ahead of their steps, except in the mode `sync`. When the iterator ends, fails or is closed,
        all rows are with the workers.

        Raises:
          TrainingError: A worker is lost; the tables are then gone, and training resumes from a checkpoint.
        """
        with self._alone():
            parts = self._mover, self._hot_part, self._hot, self._params
            pipeline = Pipeline(self.sparse, self._run, self.pool, self.execution, self._shardings, *parts)
            with contextlib.closing(pipeline.steps(self._state, batches, self._step)) as steps:
                for done in steps:
                    self._state, self._step = done.state, done.number + 1
                    yield done

    @property
    def num_steps(self) -> int:
        """Steps taken, those before a checkpoint included."""
        return self._step

    @property
    def dense_state(self) -> Any:
        """The state, with any rows in place of tables."""
        return self._params.put(self._state, self._everywhere)

    def rows(self, path: str) -> Iterator[np.ndarray]:
        """All rows of an array, some at a time, in order.

        Args:
          path: In the state, such as `params.tables.0.embedding`.

        Raises:
          ConfigError: No such array is in host memory, or some rows are with other hosts.
        """
        names = [array.path for array in self.pool.layout.arrays]
        if path not in names:
            raise ConfigError(f"Arrays in host memory are {', '.join(names)}; received `{path}`. Choose one.")
        return self._all_rows(names.index(path))

    def _all_rows(self, array: int) -> Iterator[np.ndarray]:
        if jax.process_count() > 1:
            raise ConfigError(
                "All rows of a table are read where all of them are; this computation has "
                f"{jax.process_count()} processes, each with its own. Save, and restore in one process."
            )
        with self._alone():
            self._write_hot_rows()
            yield from self.pool.rows(array)

    def state(self) -> Any:
        """The whole state as arrays, tables too: for tables that fit."""
        arrays = [np.concatenate(list(self._all_rows(i))) for i in range(len(self.pool.layout.arrays))]
        return with_rows(jax.device_get(without_keys(self.dense_state)), self.sparse.update.leaves, arrays)

    def evaluation(self, fn: Callable[[Any, Any], Any], batch: Any) -> Callable[[Any], Any]:
        """A function of batches: what `fn(state, batch)` returns for the state at that time, such as held-out losses.

        Args:
          fn: Pure; reads tables in host memory by look-ups of whole rows alone.
          batch: Arrays or shapes; all batches have these.

        Raises:
          TraceError: It reads a table otherwise; names the line.
        """
        leaves = self.sparse.update.leaves
        rows = rows_function(fn, self._shapes, batch, self.sparse.tables)
        of_table = {leaf.table: i for i, leaf in enumerate(leaves) if leaf.is_param}
        arrays = [of_table[number] for number in rows.numbers]
        mover, layout = self._mover_of(range(len(arrays)), [self._everywhere] * len(arrays)), self.pool.layout
        run = jax.jit(rows.run)

        def evaluate(batch: Any) -> Any:
            with self._alone():
                self._write_hot_rows()
                read = rows.rows_of_batch(batch, layout.keys)
                wanted = dict(zip(rows.numbers, read.rows, strict=True))
                found = self.pool.take([wanted.get(t, np.zeros(0, np.int64)) for t in range(len(layout.num_rows))])
                padded = [_padded(found[i], capacity) for i, capacity in zip(arrays, rows.capacities, strict=True)]
                spans = [layout.spans(number, layout.keys(number, its)) for number, its in wanted.items()]
                loaded = mover.load(padded, self.pool.own_edges(spans))
                fed = placed(RowsBatch(batch=batch, positions=read.positions), self._everywhere)
                state = with_rows(self.dense_state, [leaves[i] for i in arrays], mover.joined(loaded))
                return run(state, fed)

        return evaluate

    def save(self, folder: str | os.PathLike[str], keep: int | None = None) -> None:
        """Writes a checkpoint of the step taken last, in a folder.

        Every worker writes its own rows, with checksums; the rest of the state goes where checkpoints of autoshard go.

        Args:
          folder: Made if it is missing. keep: The newest checkpoints that stay there; None for all.

        Raises:
          ConfigError: The folder cannot be made.
          TrainingError: It cannot be written, in all processes where one cannot; or `steps` is still running.
        """
        place = pathlib.Path(folder)
        with self._alone(), dense_checkpoints(place, keep) as checkpoints:
            self._write_hot_rows()
            self.pool.save(tables_folder(place, self._step), {"step": self._step})
            checkpoints.save(self._step, dense_leaves(self.dense_state, self.sparse), {})
        if keep:
            remove_old_tables(place, keep)

    def restore(self, folder: str | os.PathLike[str]) -> int:
        """Reads the newest checkpoint of a folder, whatever the number of workers that wrote it; returns its step.

        Raises:
          TrainingError: There is none, or it is of other tables.
        """
        place = pathlib.Path(folder)
        with dense_checkpoints(place) as checkpoints:
            like = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                dense_leaves(self.dense_state, self.sparse),
            )
            found = checkpoints.restore(like)
        if found is None or not has_tables(place, found.step):
            raise TrainingError(f"{place} has no checkpoint with tables. Check the folder.")
        with self._alone():
            self.pool.load(tables_folder(place, found.step))
        self._step = found.step
        self._state = self._params.take(with_dense_leaves(self._state, self.sparse, found.state), self._shardings)
        self._read_hot_rows()
        return found.step

    def __str__(self) -> str:
        own = self.execution
        layout = self.pool.layout
        per_worker = sum(layout.own_rows(a.table, 0) * a.row_bytes for a in layout.arrays)
        hot = sum(self.sparse.hot_counts)
        told = f"max_staleness {own.max_staleness}, " if own.mode == "async" else ""
        return (
            f"{self.sparse}\nin host memory: {own.mode}, {told}{own.num_workers} workers with {amount(per_worker)} "
            f"each, {own.num_slots} batches in flight ({amount(layout.size_bytes)} shared)"
            + (f"; {hot:,} hot rows stay on the devices" if hot else "")
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While no steps run: rows lie with the workers, and slots are free."""
        if not self._is_running.acquire(blocking=False):
            raise TrainingError(
                "Steps and evaluations of one HostTables run one after another; another `steps` is still running. End "
                "or close it."
            )
        try:
            yield
        finally:
            self._is_running.release()

    @property
    def _everywhere(self) -> NamedSharding | None:
        """Whole on each device of the plan; None for the default device."""
        if self._shardings is None:
            return None
        return NamedSharding(jax.tree.leaves(self._shardings[0])[0].mesh, PartitionSpec())

    def _mover_of(self, tables: Sequence[int], shardings: Sequence[Any]) -> OneProcess | SeveralProcesses:
        """Brings rows to the devices, of arrays whose tables have these numbers."""
        if jax.process_count() > 1:
            return SeveralProcesses(tables, shardings)
        return OneProcess(None if self._shardings is None else shardings)

    # ---- hot rows

    @property
    def _hot_in_order(self) -> list[np.ndarray]:
        """Of each table, its hot rows in the order of their places."""
        return [hot.rows[np.argsort(hot.places)] for hot in self._hot]

    def _read_hot_rows(self) -> None:
        """Brings the hot rows of the workers to the devices."""
        if self._hot_part.is_empty:
            return
        leaves, layout, rows = self.sparse.update.leaves, self.pool.layout, self._hot_in_order
        edges = self.pool.own_edges([layout.spans(t, layout.keys(t, own)) for t, own in enumerate(rows)])
        hot = self._mover.joined(self._mover.load(self.pool.take(rows), edges))
        cold = self._hot_part.cold(rows_of(self._state, leaves))
        self._state = with_rows(self._state, leaves, self._hot_part.together(hot, cold))

    def _write_hot_rows(self) -> None:
        """Brings the hot rows of the devices to the workers, which have older ones."""
        if self._hot_part.is_empty:
            return
        hot = self._mover.gathered(self._hot_part.hot(rows_of(self._state, self.sparse.update.leaves)))
        self.pool.put(self._hot_in_order, [self._mover.host(x) for x in hot])

    # ---- making the state

    def _take(self, state: Any) -> Any:
        """Gives the rows of a state to the workers; returns it with rows of no batch in place of tables."""
        leaves, sparse = self.sparse.update.leaves, self.sparse
        sizes = sparse.num_places
        if callable(state):
            initial = initial_state(state, leaves, sizes)
            piece = lambda number, first, count: initial.rows(number, first, count)
        else:
            whole = rows_of(state, leaves)
            piece = lambda number, first, count: whole[number][first : first + count]
        for number, array in enumerate(self.pool.layout.arrays):
            each = max(1, PIECE_BYTES // max(1, array.row_bytes))
            for first in range(0, array.num_rows, each):
                self.pool.fill(number, first, np.asarray(piece(number, first, min(each, array.num_rows - first))))
        if callable(state):
            return (
                initial.dense()
                if self._shardings is None
                else jax.jit(initial.dense, out_shardings=self._shardings[0])()
            )
        empty = [jnp.zeros((sizes[x.table], *x.row_shape), x.dtype) for x in leaves]
        dense = with_rows(state, leaves, empty)
        if jax.process_count() == 1:
            own = jax.tree.map(jnp.array, dense)  # since steps reuse its memory
            return own if self._shardings is None else jax.device_put(own, self._shardings[0])
        assert self._shardings is not None
        parts = placed(without_keys(dense), self._everywhere)
        with_keys = lambda parts: jax.tree.map(as_key, parts, dense)
        return jax.jit(with_keys, out_shardings=self._shardings[0])(parts)


def _hot_rows(layout: Layout, table: int, rows: np.ndarray | None) -> HotRows:
    """Rows of a table as hot rows, in the order of their owners."""
    if rows is None:
        return NO_HOT_ROWS
    if not ((rows >= 0) & (rows < layout.num_rows[table])).all():
        raise ConfigError(
            f"Hot rows are rows of their table, which has {layout.num_rows[table]}; received {rows.min()} to "
            f"{rows.max()}. Leave out what is none."
        )
    places = np.empty(len(rows), np.int32)
    places[np.argsort(layout.keys(table, rows))] = np.arange(len(rows))
    return HotRows(rows, places)


def _planned_by_the_first(make: Callable[[], BasePlan]) -> BasePlan:
    """A plan, the same in all processes."""
    if jax.process_count() == 1:
        return make()
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "plan.json"

        def text() -> str:
            make().save(file)
            return file.read_text()

        file.write_text(from_first(text))
        return load(file)


def _layout(sparse: SparseStep, execution: Execution, num_workers: int) -> Layout:
    arrays = [
        RowArray(
            leaf.path,
            leaf.table,
            sparse.tables[leaf.table].num_rows,
            leaf.row_shape,
            str(leaf.dtype),
            jnp.dtype(leaf.dtype).itemsize,
        )
        for leaf in sparse.update.leaves
    ]
    rows = tuple(table.num_rows for table in sparse.tables)
    return Layout(tuple(arrays), rows, sparse.capacities, num_workers, execution.num_slots)


def _padded(rows: np.ndarray, count: int) -> np.ndarray:
    """Rows filled up to so many."""
    return np.pad(rows, [(0, count - len(rows))] + [(0, 0)] * (rows.ndim - 1))
