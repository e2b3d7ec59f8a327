"""The worker processes that own the rows: started, told what to do, and watched."""

import contextlib
import dataclasses
import json
import mmap
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from autoshard.checkpoints.agreement import from_all, from_first
from autoshard.errors import ConfigError, TrainingError
from autoshard.host_tables.messages import Begin, Done, Failed, Fetch, Fill, Load, Read, Save, Write
from autoshard.host_tables.options import Execution
from autoshard.host_tables.sharding import Layout, Slot

PIECE_BYTES = 8 << 20
"""Rows that are sent to a worker at a time."""
_START_S = 60.0
"""A process may take so long to start on a busy machine; an estimate."""


class Answers:
    """What the workers answer to one order of the pool.

    Attributes:
      results: Of the workers that have answered, by their numbers.
    """

    def __init__(self, workers: Sequence[int]):
        self.results: dict[int, Any] = {}
        self.missing = set(workers)
        self.are_there = threading.Event()
        if not self.missing:
            self.are_there.set()


@dataclasses.dataclass
class _Process:
    process: subprocess.Popen[bytes]
    connection: Connection


class WorkerPool:
    """Worker processes of one host, each with its rows of all tables. A context manager; leaving it ends them.

    All workers get all orders in the same sequence: what is read after a write was ordered sees it.

    Attributes:
      layout: What all workers own. own: The numbers of those of this pool.
      slots: The shared memory by which rows are exchanged.
    """

    def __init__(self, layout: Layout, execution: Execution, worker_bytes: int | None = None, own: range | None = None):
        """Starts the workers; their rows are zero.

        Args:
          layout: What they own. execution: See `Execution`.
          own: The workers of this pool, where there are others on other hosts; None for all.
          worker_bytes: Limit of each process's memory (RLIMIT_DATA); None for the system's.

        Raises:
          ConfigError: This process may not use one of the CPUs that the workers are to use.
          TrainingError: A worker does not start, or cannot have the memory for its rows.
        """
        _check_cpus(execution.worker_cpus)
        self.layout, self._execution = layout, execution
        self.own = range(layout.num_workers) if own is None else own
        self._failure: str | None = None
        self._waiting: dict[int, Answers] = {}
        self._lock = threading.Lock()
        self._number = 0
        self._is_closing = False
        memory = _anonymous_file(layout.size_bytes)
        self.slots: list[Slot] = layout.slots(memoryview(mmap.mmap(memory, layout.size_bytes)))
        self._processes: dict[int, _Process] = {}
        try:
            for worker in self.own:
                self._processes[worker] = _start(Begin(layout, worker, memory, execution.worker_cpus, worker_bytes))
        finally:
            os.close(memory)
        self._number_of = {p.connection: n for n, p in self._processes.items()}
        starting = self._waiting[-1] = Answers(self.own)
        self._collector = threading.Thread(target=self._collect, name="host-table-answers", daemon=True)
        self._collector.start()
        try:
            self.wait(starting, _START_S)
        except TrainingError:
            self.close()
            raise

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def process_ids(self) -> list[int]:
        """Of the workers."""
        return [p.process.pid for p in self._processes.values()]

    def own_edges(self, spans: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
        """For each table, which of a batch's rows belong to workers of this pool, from the spans of all workers."""
        return [(s[self.own[0]][0], s[self.own[-1]][1]) for s in spans]

    # ---- orders

    def read(self, slot: int, spans: Sequence[Sequence[tuple[int, int]]]) -> Answers:
        """Has the rows whose places are in a slot copied into it.

        Args:
          slot: Its number. spans: For each table, for each worker, which of the rows are its.
        """
        return self._order(lambda number, worker: Read(number, slot, [s[worker] for s in spans]))

    def write(
        self,
        slot: int,
        spans: Sequence[Sequence[tuple[int, int]]],
        added: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> Answers:
        """Has the rows in a slot copied to the tables.

        Args:
          slot: Its number. spans: For each table, for each worker, which of the rows are its.
          added: Likewise, which of these, from the start of each span on, are added to what is there instead; None for
            none.
        """
        none = [(0, 0)] * len(spans)
        own = lambda worker: none if added is None else [s[worker] for s in added]
        return self._order(lambda number, worker: Write(number, slot, [s[worker] for s in spans], own(worker)))

    def fill(self, array: int, first: int, rows: np.ndarray) -> None:
        """Sets rows of an array, from row `first` on; waits until they are there."""
        count = self.layout.num_workers
        answers = []
        for worker in self.own:
            skipped = (worker - first) % count
            own = np.ascontiguousarray(rows[skipped::count])
            if len(own):
                to = (first + skipped) // count
                order = lambda number, _, to=to: Fill(number, array, to)
                answers.append(self._order(order, [worker], own.reshape(-1).view(np.uint8).data))
        for one in answers:
            self.wait(one)

    def rows(self, array: int, pieces: int = PIECE_BYTES) -> Iterator[np.ndarray]:
        """All rows of an array, in order, some at a time."""
        told, count = self.layout.arrays[array], self.layout.num_workers
        assert len(self.own) == count, "some rows are with other pools"
        each = max(1, pieces // max(1, told.row_bytes) // count)
        for first in range(0, -(-told.num_rows // count), each):
            answers = self.wait(self._order(lambda number, _, a=first: Fetch(number, array, a, a + each)))
            parts = [np.frombuffer(answers[w], told.element_type).reshape(-1, *told.row_shape) for w in range(count)]
            joined = np.empty((sum(map(len, parts)), *told.row_shape), told.element_type)
            for worker, part in enumerate(parts):
                joined[worker::count] = part
            yield joined

    def take(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Copies of some rows of each array, by way of the first slot; no batch may be on its way.

        Args:
          rows: Of each table, in the order of their `layout.keys`; any number.
        """
        found = [np.empty((len(rows[a.table]), *a.row_shape), a.element_type) for a in self.layout.arrays]
        for parts, spans in self._through_first_slot(rows):
            self.wait(self.read(0, spans))
            for array, to, of in zip(self.layout.arrays, found, self.slots[0].rows, strict=True):
                part = parts[array.table]
                to[part] = of[: part.stop - part.start]
        return found

    def put(self, rows: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> None:
        """Sets some rows of each array, as `take` gives them."""
        for parts, spans in self._through_first_slot(rows):
            for array, of, to in zip(self.layout.arrays, values, self.slots[0].rows, strict=True):
                part = parts[array.table]
                to[: part.stop - part.start] = of[part]
            self.wait(self.write(0, spans))

    def _through_first_slot(
        self, rows: Sequence[np.ndarray]
    ) -> Iterator[tuple[list[slice], list[list[tuple[int, int]]]]]:
        """Parts of rows that fit the first slot, in which their places are, and the spans of workers in it."""
        layout, tables = self.layout, range(len(self.layout.num_rows))
        keys = [layout.keys(t, rows[t]) for t in tables]
        rounds = max((-(-len(own) // most) for own, most in zip(keys, layout.capacities, strict=True)), default=0)
        for n in range(rounds):
            bounds = [(n * most, (n + 1) * most) for most in layout.capacities]
            parts = [slice(*(min(x, len(own)) for x in bound)) for own, bound in zip(keys, bounds, strict=True)]
            for t in tables:
                self.slots[0].places[t][: parts[t].stop - parts[t].start] = layout.places(t, keys[t][parts[t]])
            yield parts, [layout.spans(t, keys[t][parts[t]]) for t in tables]

    def save(self, folder: pathlib.Path, about: dict[str, Any]) -> None:
        """Writes all rows, by worker; the folder is there whole or not at all.

        All pools of a run call it together, with a folder that all of them see.

        Args:
          folder: To be made. about: Plain data that `load` returns.

        Raises:
          TrainingError: They cannot be written.
        """
        unfinished = folder.with_name(folder.name + ".unfinished")

        def begin() -> None:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)

        def commit() -> None:
            told = {"num_workers": self.layout.num_workers, "arrays": _told(self.layout), "about": about}
            (unfinished / "tables.json").write_text(json.dumps(told))
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)

        try:
            from_first(begin)
            if failure := next(filter(None, from_all(self._saved(unfinished))), None):
                raise TrainingError(failure)
            from_first(commit)
        except OSError as error:
            raise TrainingError(
                f"A checkpoint of tables in host memory cannot be written to {folder}: {error}. The one before is "
                "untouched. Make room there, or name another folder."
            ) from error

    def _saved(self, folder: pathlib.Path) -> str | None:
        """Has the workers of this process write their rows; tells what went wrong, so that no other process waits."""
        try:
            order = self._order(lambda number, _: Save(number, folder))
            self.wait(order, self._execution.timeout_s * 60)
        except TrainingError as error:
            return str(error)
        return None

    def load(self, folder: pathlib.Path) -> dict[str, Any]:
        """Reads all rows that a pool of any number of workers has written; returns what it was told besides.

        Raises:
          TrainingError: The folder has other tables, or was changed.
        """
        told = json.loads((folder / "tables.json").read_text())
        if told["arrays"] != _told(self.layout):
            raise TrainingError(
                f"Tables are read back into the same tables; {folder} has other arrays than this step. Resume with the "
                "model and optimizer that it was saved with."
            )
        order = lambda number, _: Load(number, folder, told["num_workers"])
        self.wait(self._order(order), self._execution.timeout_s * 60)
        return told["about"]

    def _order(
        self, make: Callable[[int, int], Any], workers: Sequence[int] | None = None, payload: memoryview | None = None
    ) -> Answers:
        with self._lock:
            self._raise_failure()
            self._number += 1
            to = self.own if workers is None else workers
            answers = self._waiting[self._number] = Answers(to)
            for worker in to:
                try:
                    self._processes[worker].connection.send(make(self._number, worker))
                    if payload is not None:
                        self._processes[worker].connection.send_bytes(payload)
                except OSError:
                    self._fail(f"worker {worker} of the host tables is gone")
        return answers

    # ---- answers

    def wait(self, answers: Answers, timeout_s: float | None = None) -> dict[int, Any]:
        """Waits until all workers have answered; returns their results.

        Raises:
          TrainingError: A worker has died, failed, or does not answer.
        """
        limit = self._execution.timeout_s if timeout_s is None else timeout_s
        if not answers.are_there.wait(limit) and self._failure is None:
            self._fail(f"worker {min(answers.missing)} of the host tables has not answered for {limit:g} s")
        self._raise_failure()
        return answers.results

    def check(self) -> None:
        """Raises TrainingError if a worker is lost."""
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise TrainingError(
                f"A step with tables in host memory needs all workers, which own their rows; {self._failure}. The last "
                "checkpoint is untouched: resume from it."
            )

    def _fail(self, why: str) -> None:
        if self._failure is None and not self._is_closing:
            self._failure = why
        for answers in list(self._waiting.values()):
            answers.are_there.set()

    def _collect(self) -> None:
        bind_thread(self._execution.worker_cpus)
        open_ends = dict(self._number_of)
        while open_ends:
            for end in wait(list(open_ends)):
                assert isinstance(end, Connection)
                worker = open_ends[end]
                try:
                    answer = end.recv()
                except (EOFError, OSError):
                    del open_ends[end]
                    code = self._processes[worker].process.poll()
                    end_of = f", with exit status {code}" if code is not None else ""
                    self._fail(f"worker {worker} (process {self._processes[worker].process.pid}) has ended{end_of}")
                    continue
                if isinstance(answer, Failed):
                    self._fail(f"worker {worker} cannot go on: {answer.why}")
                    continue
                assert isinstance(answer, Done)
                answers = self._waiting[answer.number]
                answers.results[worker] = answer.result
                answers.missing.discard(worker)
                if not answers.missing:
                    del self._waiting[answer.number]
                    answers.are_there.set()

    def close(self) -> None:
        """Ends the workers."""
        self._is_closing = True
        for p in self._processes.values():
            with contextlib.suppress(OSError):
                p.process.terminate()
        deadline = time.monotonic() + 5
        for p in self._processes.values():
            try:
                p.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                p.process.kill()
                p.process.wait()
        self._collector.join(5)
        for p in self._processes.values():
            p.connection.close()


def _told(layout: Layout) -> list[list[Any]]:
    return [[a.path, a.num_rows, list(a.row_shape), a.dtype] for a in layout.arrays]


def _start(begin: Begin) -> _Process:
    mine, its = socket.socketpair()
    with its:
        command = [sys.executable, "-m", "autoshard.host_tables.worker", str(its.fileno())]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        process = subprocess.Popen(
            command, pass_fds=(its.fileno(), begin.memory), env=environment, start_new_session=True
        )
    connection = Connection(mine.detach())
    connection.send(begin)
    return _Process(process, connection)


def _anonymous_file(size_bytes: int) -> int:
    """The descriptor of a file in memory that has no name, and so cannot be left behind."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("autoshard-host-tables")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def _check_cpus(cpus: Sequence[int] | None) -> None:
    if not cpus or not hasattr(os, "sched_getaffinity"):
        return
    usable = os.sched_getaffinity(0)
    if missing := sorted(set(cpus) - usable):
        raise ConfigError(
            f"worker_cpus: workers run on CPUs that this process may use, {', '.join(map(str, sorted(usable)))}; "
            f"received {', '.join(map(str, missing))}. Name some of these, or leave it out for all."
        )


def bind_thread(cpus: Sequence[int] | None) -> None:
    """Has this thread alone run on some CPUs; None for all."""
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)
