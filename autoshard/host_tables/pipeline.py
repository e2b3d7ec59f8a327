"""Look-ups, steps and write-backs as three stages with credits between them.

A batch takes a credit (a slot of shared memory) when it is looked up, and gives it back when its rows are written. The
stages run in threads of their own, which mostly wait: for workers, for the device, or for each other. No queue can hold
more than there are credits.

    look-up:     batch -> rows wanted -> slot, ordered from the workers -> on the device
    step:        rows patched from steps in flight (`pipelined`) -> the step, as planned
    write-back:  new rows off the device -> slot, ordered from the workers -> credit

Where the loss begins here, the look-up makes the values that it goes on with on the devices, of rows and of parameters
that live here, and the write-back updates both by the gradients of these values. A later step's values may be made of
parameters that miss as many updates as its rows do.

Of several processes each does so for its own rows. What runs on devices of all is launched by the stage `step` alone,
so that all launch it in one order; and since it depends on the moment which steps have been written back where, rows
are patched from all steps that may not have been.
"""

import collections
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from autoshard.host_tables.host_params import HostParams
from autoshard.host_tables.hot_part import HotPart
from autoshard.host_tables.in_flight import InFlight, Patch, Patcher, marks_fit
from autoshard.host_tables.options import Execution
from autoshard.host_tables.pool import WorkerPool, bind_thread
from autoshard.host_tables.row_mover import Loaded, OneProcess, SeveralProcesses, placed
from autoshard.tables.host_layers import CutBatch, CutResult
from autoshard.tables.rows_loss import RowsBatch
from autoshard.tables.rows_of_batch import HotRows
from autoshard.tables.sparse_step import SparseStep
from autoshard.tables.state_rows import rows_of, with_rows


@dataclasses.dataclass(frozen=True, slots=True)
class MadeFrom:
    """Of what the host has made its values for a batch.

    Attributes:
      params: Leaves of parameters that live here. positions: Of all look-ups. batch: As the user gives it.
    """

    params: Sequence[np.ndarray]
    positions: Sequence[np.ndarray]
    batch: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Fed:
    """A batch whose rows are on the devices.

    Attributes:
      number: Of the step, from 0. slot: The credit that it holds.
      batch: For the step. rows: In place of each array of rows, as loaded.
      spans: For each table, for each worker, which of its rows are whose.
      patches: What is to be taken from steps in flight, the oldest first.
      added: For each table, for each worker, which of its rows, its first ones, earlier steps may change between their
        look-up and their write-back, so that what this step changes is added to them; None where rows are patched.
      staleness: Steps before it whose rows were not written back when its own were looked up.
      num_rows: Different rows, of all tables.
      made_from: Where the loss begins here; else None.
    """

    number: int
    slot: int
    batch: RowsBatch | CutBatch
    rows: Loaded
    spans: list[list[tuple[int, int]]]
    patches: tuple[Patch, ...]
    added: list[list[tuple[int, int]]] | None
    staleness: int
    num_rows: int
    made_from: MadeFrom | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """What a step has made for the host.

    Attributes:
      rows: New rows on the devices, of the arrays that are sent there.
      result: Gradients of the values that were made here, and what else the update needs; None without any.
    """

    rows: Sequence[Any]
    result: CutResult | None


@dataclasses.dataclass(frozen=True, slots=True)
class Stepped:
    """What came of a step.

    Attributes:
      number: From 0. metrics: As of the step.
      state: After it, with the rows of its batch in place of tables, and numbers that mean nothing in place of
        parameters that live at the host; `HostTables.dense_state` has these.
      staleness: Steps before it whose updates its rows may lack; 0 where they were patched.
      num_rows: Different rows that it read, of all tables.
      wait_s: Seconds for which it waited for its batch and its rows, and in `sync` for their write-back.
    """

    number: int
    state: Any
    metrics: Any
    staleness: int
    num_rows: int
    wait_s: float


class Pipeline:
    """The stages of one run over batches."""

    def __init__(
        self,
        sparse: SparseStep,
        run: Callable[[Any, Any], tuple[Any, Any]],
        pool: WorkerPool,
        execution: Execution,
        shardings: tuple[Any, Any] | None,
        mover: OneProcess | SeveralProcesses,
        hot_part: HotPart,
        hot: Sequence[HotRows],
        params: HostParams,
    ):
        """
        Args:
          sparse: The step over rows. run: The same, as it is planned.
          pool: Where the rows are. execution: See `Execution`. mover: Brings rows to the devices and back.
          hot_part: Puts hot rows and those of a batch together. hot: Of each table, which are hot.
          params: Parameters that live here.
          shardings: Of its state and of its batch; None for the default device.
        """
        self._sparse, self._run, self._pool, self._execution = sparse, run, pool, execution
        self._leaves = [sparse.update.leaves[i] for i in sparse.on_devices]
        self._batch_shardings = None if shardings is None else shardings[1]
        self._mover, self._hot_part, self._hot, self._params = mover, hot_part, hot, params
        self._patcher = Patcher([leaf.table for leaf in self._leaves])
        has_marks, is_async = marks_fit(pool.layout, pool.own), execution.mode == "async"
        self._in_flight = InFlight(pool.layout, execution.num_slots, has_marks, newest_first=is_async)
        self._order = threading.Lock()
        """What is ordered from the workers, and what is known to have been ordered, go together."""
        self._written = -1
        self._free: queue.Queue[int] = queue.Queue()
        for slot in range(execution.num_slots):
            self._free.put(slot)
        self._fed: queue.Queue[Fed | BaseException | None] = queue.Queue(execution.num_slots)
        self._new: queue.Queue[tuple[Fed, Made] | None] = queue.Queue(execution.num_slots)
        self._stop = threading.Event()
        self._error: BaseException | None = None

    def steps(self, state: Any, batches: Iterable[Any], first: int = 0) -> Generator[Stepped, None, None]:
        """Runs steps over batches, from a state with rows of any batch in place of tables; see `Stepped`.

        When it ends, or is closed, all rows are written back.

        Raises:
          TrainingError: A worker is lost.
        """
        self._written = first - 1
        if self._execution.mode == "sync":
            yield from self._in_turn(state, batches, first)
            return
        threads = [
            threading.Thread(target=self._look_ups, args=(batches, first), name="look-ups", daemon=True),
            threading.Thread(target=self._write_backs, name="write-backs", daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            yield from self._steps(state)
        finally:
            self._stop.set()
            self._put(self._new, None, even_if_stopped=True)
            for thread in threads:
                thread.join()
            if self._error is not None:
                raise self._error

    # ---- stages

    def _in_turn(self, state: Any, batches: Iterable[Any], first: int) -> Iterator[Stepped]:
        cpus = self._execution.worker_cpus
        with ThreadPoolExecutor(1, "look-ups", initializer=bind_thread, initargs=(cpus,)) as host:
            began_s = time.perf_counter()
            for number, batch in enumerate(batches, first):
                fed = host.submit(self._look_up, number, 0, batch, first).result()
                wait_s = time.perf_counter() - began_s
                state, metrics, new, result = self._step(state, fed, self._mover.joined(fed.rows))
                made = Made(jax.block_until_ready(self._mover.gathered(new)), jax.block_until_ready(result))
                stepped_s = time.perf_counter()
                host.submit(self._write_back, fed, made).result()
                yield Stepped(number, state, metrics, 0, fed.num_rows, wait_s + time.perf_counter() - stepped_s)
                began_s = time.perf_counter()

    def _steps(self, state: Any) -> Iterator[Stepped]:
        recent: collections.deque[tuple[int, Sequence[Any]]] = collections.deque(maxlen=self._execution.num_slots)
        while True:
            began_s = time.perf_counter()
            fed = self._get(self._fed)
            wait_s = time.perf_counter() - began_s
            if fed is None:
                return
            if isinstance(fed, BaseException):
                raise fed
            rows = self._mover.joined(fed.rows)
            for patch in fed.patches:
                rows = self._patcher(rows, next(new for number, new in recent if number == patch.step), patch)
            state, metrics, new, result = self._step(state, fed, rows)
            if self._execution.mode == "pipelined":
                recent.append((fed.number, new))
                # the next step reuses the memory of its state, but the rows in that are those of its own batch
            self._put(self._new, (fed, Made(self._mover.gathered(new), result)))
            stale = fed.staleness if self._execution.mode == "async" else 0
            yield Stepped(fed.number, state, metrics, stale, fed.num_rows, wait_s)

    def _look_ups(self, batches: Iterable[Any], first: int) -> None:
        bind_thread(self._execution.worker_cpus)
        try:
            for number, batch in enumerate(batches, first):
                slot = self._get(self._free)
                if slot is None:
                    return
                self._put(self._fed, self._look_up(number, slot, batch, first))
                if self._stop.is_set():
                    return
            self._put(self._fed, None)
        except BaseException as error:
            self._put(self._fed, error)

    def _write_backs(self) -> None:
        bind_thread(self._execution.worker_cpus)
        try:
            while (item := self._new.get()) is not None:
                self._write_back(*item)
                self._free.put(item[0].slot)
        except BaseException as error:
            self._error = error
            self._stop.set()

    # ---- what stages do

    def _step(self, state: Any, fed: Fed, rows: Sequence[Any]) -> tuple[Any, Any, list[Any], CutResult | None]:
        """The state after a step, its metrics, the rows of its batch, and what the host's update needs."""
        together = self._hot_part.with_batch(rows_of(state, self._leaves), rows)
        state, result = self._run(with_rows(state, self._leaves, together), fed.batch)
        metrics, own = (result.metrics, result) if isinstance(result, CutResult) else (result, None)
        return state, metrics, self._hot_part.cold(rows_of(state, self._leaves)), own

    def _look_up(self, number: int, slot: int, batch: Any, first: int) -> Fed:
        layout, tables = self._pool.layout, range(len(self._pool.layout.num_rows))
        self._in_flight.begin(number)
        read = self._sparse.rows_of_batch(batch, layout.keys, self._hot, self._in_flight.different)
        keys = tuple(layout.keys(t, rows) for t, rows in enumerate(read.rows))
        for t in tables:
            self._pool.slots[slot].places[t][: len(keys[t])] = layout.places(t, keys[t])
        spans = [layout.spans(t, keys[t]) for t in tables]
        with self._order:
            answers = self._pool.read(slot, spans)
            written, params = self._written, self._params.leaves
        is_patched = self._execution.mode == "pipelined"
        if is_patched and jax.process_count() > 1:
            # others may have written less; these have surely been written by all
            written = max(first, number - self._execution.num_slots + 1) - 1
        found = self._in_flight.found(written + 1)
        patches = self._in_flight.patches(found) if is_patched else ()
        added = None
        if self._execution.mode == "async":
            added = [_first_of(each, own.to) for each, own in zip(spans, found, strict=True)]
        stale, layers, here = number - 1 - written, self._sparse.layers, self._pool.slots[slot].rows
        told = spans, patches, added, stale, sum(map(len, keys))
        load = lambda: self._mover.load([here[i] for i in self._sparse.on_devices], self._pool.own_edges(spans))
        if layers is None:
            on_devices = placed(self._sparse.fed(batch, read.positions), self._batch_shardings)
            self._pool.wait(answers)
            return Fed(number, slot, on_devices, load(), *told)
        self._pool.wait(answers)
        own = MadeFrom(params, read.positions, batch)
        values = layers.values(here, own.params, own.positions, batch)
        on_devices = placed(self._sparse.fed(batch, read.positions, values), self._batch_shardings)
        return Fed(number, slot, on_devices, load(), *told, own)

    def _write_back(self, fed: Fed, made: Made) -> None:
        edges = self._pool.own_edges(fed.spans)
        own, slot, layers = self._pool.own, self._pool.slots[fed.slot].rows, self._sparse.layers
        new, newest = dict(zip(self._sparse.on_devices, made.rows, strict=True)), self._params.leaves
        if layers is not None and made.result is not None and (of := fed.made_from) is not None:
            rows, newest = layers.update(slot, of.params, of.positions, of.batch, made.result, newest)
            new |= zip(layers.leaves, rows, strict=True)
        for number, leaf in enumerate(self._sparse.update.leaves):
            (start, stop), rows, after = edges[leaf.table], slot[number], self._mover.host(new[number])
            for first, end in () if fed.added is None else fed.added[leaf.table][own.start : own.stop]:
                rows[start:first] = after[start:first]
                np.subtract(after[first:end], rows[first:end], out=rows[first:end])
                start = end
            rows[start:stop] = after[start:stop]
        with self._order:
            answers = self._pool.write(fed.slot, fed.spans, fed.added)
            self._written, self._params.leaves = fed.number, newest
        self._pool.wait(answers)

    # ---- queues that end

    def _get(self, source: queue.Queue[Any]) -> Any:
        """The next item; None once the run has stopped."""
        while not self._stop.is_set():
            with contextlib.suppress(queue.Empty):
                return source.get(timeout=0.1)
        if self._error is not None:
            raise self._error
        return None

    def _put(self, to: queue.Queue[Any], item: Any, even_if_stopped: bool = False) -> None:
        """Puts an item where there is room; credits see to it that there soon is."""
        while even_if_stopped or not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                return to.put(item, timeout=0.1)
            if self._error is not None:
                return


def _first_of(spans: Sequence[tuple[int, int]], positions: np.ndarray) -> list[tuple[int, int]]:
    """The part of each span that rising positions fill from its start on."""
    starts = [start for start, _ in spans]
    counts = np.diff(np.searchsorted(positions, [*starts, spans[-1][1]]))
    return [(start, start + int(count)) for start, count in zip(starts, counts, strict=True)]
