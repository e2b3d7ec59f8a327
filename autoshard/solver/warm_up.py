"""Has the solver's kernels compiled before any clock runs, and beside what else is done.

Numba compiles a kernel when it is first called and keeps the result on disk. On a machine that never ran autoshard that
takes twenty seconds of a core, so it is begun before the first problem is there: two child processes share the work,
which this one then reads from disk. They begin with what every problem needs, and go on with the rest while something
else runs. A problem waits for what it is likely to need (`load_kernels_of`); any other kernel is compiled here if it is
called before it is on disk, and a search's clock stands still meanwhile (`budget.py`). Where several processes of a
machine begin at once, as under `autoshard launch`, two children compile for all.

A stage has a file beside its kernels on disk. Who compiles the stage has a lock on it, which the system lets go of when
the process ends, however it does; at the end it tells for which state of things the kernels were compiled.
"""

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from numba import boolean, float64, int64

from autoshard.garbage import collection_paused
from autoshard.run_processes import environment_of_no_run
from autoshard.solver.bound.core import peel, unpeel
from autoshard.solver.bound.label_slack import label_slack
from autoshard.solver.bound.messages import factor_minima, node_costs, price_tables, price_unary, sweep
from autoshard.solver.bound.prices import ascend_prices
from autoshard.solver.evaluate import peak_if
from autoshard.solver.factor_graph import GRAPH_TYPE
from autoshard.solver.labelling import fits, labels_cost, labels_usage
from autoshard.solver.primal.local_search import (
    assign_greedily,
    descend_freely,
    iterated_conditional_modes,
    least_usage_labels,
    repair_within,
)
from autoshard.solver.primal.schedule_run import run_beside
from autoshard.solver.primal.schedule_search import anneal
from autoshard.solver.primal.tree_moves import improve_trees
from autoshard.solver.problem import Problem
from autoshard.solver.reduce.capacity import surviving
from autoshard.solver.reduce.dominance import row_differences, undominated

_PATIENCE_S, _PAUSE_S = 180.0, 0.02
"""How long a process waits for another one that compiles, before it does so itself; and between two looks."""
_NICENESS = 10
"""By how much a child gives way to what has begun once it compiles what few problems need."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled function and the types of its arguments, of which there is one combination."""

    function: Any
    arguments: tuple[numba.types.Type, ...]

    def is_loaded(self) -> bool:
        return bool(self.function.signatures)

    def load(self) -> None:
        """Reads it from disk, or compiles it."""
        self.function.compile(self.arguments)

    def forget(self) -> None:
        """Empties its index on disk, unless it is loaded.

        The index names classes by module, and reading it fails where another version of autoshard had those elsewhere.
        """
        if not self.is_loaded():
            self.function.recompile()  # of nothing, which only writes an empty index


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """Kernels that one process compiles in turn."""

    name: str
    kernels: tuple[Kernel, ...]

    def is_loaded(self) -> bool:
        return all(kernel.is_loaded() for kernel in self.kernels)

    def path(self) -> pathlib.Path:
        """The stage's file."""
        return pathlib.Path(self.kernels[0].function.stats.cache_path) / f"autoshard-{self.name}.stage"

    def state(self) -> str:
        """What its kernels on disk are for: versions, processor and sources."""
        parts = [sys.version, numba.__version__, llvmlite.binding.get_host_cpu_name()]
        for module in sorted({kernel.function.py_func.__code__.co_filename for kernel in self.kernels}):
            with contextlib.suppress(OSError):
                found = os.stat(module)
                parts.append(f"{module} {found.st_mtime_ns} {found.st_size}")
        return "\n".join(parts)

    def is_on_disk(self) -> bool:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return self.path().read_text() == self.state()
        return False


_GRAPH, _INTS, _FLOATS, _FLAGS = GRAPH_TYPE, int64[::1], float64[::1], boolean[::1]

_CORE = Stage(
    "core",
    (
        Kernel(
            peel,
            (_GRAPH, _FLAGS, _FLAGS, _FLOATS, _FLOATS, _INTS, _INTS, _FLAGS, _FLAGS, float64[:, ::1], _INTS, _INTS),
        ),
        Kernel(price_unary, (_GRAPH, _FLOATS, _FLOATS)),
        Kernel(node_costs, (_GRAPH, _FLOATS, _FLOATS, _FLOATS)),
        Kernel(unpeel, (_GRAPH, _FLOATS, _INTS, _INTS, _INTS)),
    ),
)
_DOMINANCE = Stage(
    "dominance",
    (
        Kernel(undominated, (_FLOATS, float64[:, ::1], int64[:, ::1], _FLOATS, _FLOATS, _INTS, _INTS, _INTS)),
        Kernel(row_differences, (float64[:, ::1],)),
    ),
)
_MESSAGES = Stage(
    "messages",
    (
        Kernel(sweep, (_GRAPH, _FLOATS, _FLOATS, _FLOATS, boolean, float64[:, ::1], _INTS)),
        Kernel(descend_freely, (_GRAPH, _INTS, _FLOATS)),
        Kernel(labels_cost, (_GRAPH, _INTS)),
    ),
)
_PRICES = Stage(
    "prices",
    (
        Kernel(labels_usage, (_GRAPH, _INTS)),
        Kernel(ascend_prices, (_GRAPH, _FLOATS, _FLOATS, _FLOATS, _FLOATS, float64)),
        Kernel(price_tables, (_GRAPH, _FLOATS, _FLOATS)),
        Kernel(factor_minima, (_GRAPH, _FLOATS, _FLOATS)),
        Kernel(label_slack, (_GRAPH, _FLOATS, _FLOATS, _FLOATS)),
        Kernel(surviving, (int64[:, ::1], _FLOATS, _INTS)),
    ),
)
_REPAIR = Stage(
    "repair",
    (
        Kernel(iterated_conditional_modes, (_GRAPH, _INTS, _FLOATS, _FLOATS, int64, _FLOATS)),
        Kernel(repair_within, (_GRAPH, _INTS, _FLOATS, int64, _FLOATS)),
        Kernel(fits, (_GRAPH, _INTS)),
    ),
)
_PAIRS_OF_INTS, _PAIRS_OF_FLOATS = int64[:, ::1], float64[:, ::1]
_EXPOSURE = Stage(
    "exposure",
    (
        Kernel(
            run_beside,
            (_FLOATS, _INTS, _INTS, _FLOATS, _INTS, float64, _FLOATS, _INTS, _PAIRS_OF_INTS, _PAIRS_OF_INTS)
            + (_PAIRS_OF_FLOATS,),
        ),
    ),
)
_TREES = Stage(
    "trees",
    (
        Kernel(least_usage_labels, (_GRAPH,)),
        Kernel(assign_greedily, (_GRAPH, _INTS, _INTS, _FLOATS)),
        Kernel(improve_trees, (_GRAPH, _INTS, _FLOATS, _FLOATS, _FLOATS, int64, int64, int64, _FLOATS)),
    ),
)
_ADDS, _WINDOWS = (_FLOATS, _INTS, _INTS, _FLOATS, float64[:, ::1], _INTS, _INTS), (*(_INTS,) * 5, int64, int64)
_SCHEDULES = Stage(
    "schedules",
    (Kernel(anneal, (*_ADDS, *_WINDOWS, float64, float64, _INTS, _INTS, _INTS, _FLOATS)),),
)
SHARES = ((_CORE, _PRICES), (_DOMINANCE, _MESSAGES, _REPAIR, _EXPOSURE, _TREES, _SCHEDULES))
"""What each child compiles, in this order."""
ALWAYS, WITHIN_CAPACITY, SELDOM = (_CORE, _DOMINANCE, _MESSAGES), (_PRICES, _REPAIR), (_EXPOSURE, _TREES, _SCHEDULES)
"""What every problem needs, what most need whose capacity may be exceeded, and what few need, or not at first."""


def is_warm() -> bool:
    """Whether the kernels that every problem needs are compiled or loaded in this process."""
    return all(stage.is_loaded() for stage in ALWAYS)


def start_compilation() -> None:
    """Has what is not on disk compiled by child processes, which go on when this one ends. Returns at once."""
    if is_warm():
        return
    for number, share in enumerate(SHARES):
        with contextlib.ExitStack() as stack:
            locks = [lock for stage in share if (lock := stack.enter_context(_lock(stage))) is not None]
            missing = [stage for stage in share if not stage.is_on_disk()]
            if len(locks) == len(share) and missing:
                for kernel in (kernel for stage in missing for kernel in stage.kernels):
                    kernel.forget()
                _start(number, locks)


def load_kernels_of(problem: Problem) -> None:
    """Loads what a problem needs to begin with."""
    load_kernels(ALWAYS)
    if not all(stage.is_loaded() for stage in WITHIN_CAPACITY) and problem.capacity is not None:
        is_quick = all(stage.is_on_disk() for stage in WITHIN_CAPACITY)
        if is_quick or peak_if(problem, np.max)[0] > problem.capacity:
            load_kernels(WITHIN_CAPACITY)


def load_kernels(stages: Sequence[Stage]) -> None:
    """Reads kernels from disk; waits for those that are being compiled, and compiles those that nobody does.

    Args:
      stages: What to load: `ALWAYS`, `WITHIN_CAPACITY`, `SELDOM`.
    """
    if all(stage.is_loaded() for stage in stages):
        return
    start_compilation()
    until = time.monotonic() + _PATIENCE_S
    for stage in stages:
        while not _is_free(stage) and time.monotonic() < until:
            time.sleep(_PAUSE_S)
        for kernel in stage.kernels:
            kernel.load()


def _start(number: int, locks: list[int]) -> None:
    """Starts a child that compiles a share, if that is possible here. It inherits the locks, and so keeps them.

    It is no process of the supervised run that this one may belong to: what it compiles serves the next run as well.
    """
    program = f"from autoshard.solver.warm_up import compile_share; compile_share({number}, {locks})"
    with contextlib.suppress(OSError):
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", program],  # not what the current folder has by these names
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**environment_of_no_run(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            pass_fds=locks,
            start_new_session=True,
        )
        threading.Thread(target=child.wait, daemon=True).start()  # so that nothing is left of it when it ends


@collection_paused()
def compile_share(number: int, locks: Sequence[int]) -> None:
    """What a child does: compiles the stages of a share; `locks` are on their files, which are open."""
    for stage, lock in zip(SHARES[number], locks, strict=True):
        state = stage.state()
        if stage in SELDOM:
            os.nice(_NICENESS)
        for kernel in stage.kernels:
            kernel.load()
        os.ftruncate(lock, 0)
        os.pwrite(lock, state.encode(), 0)
        os.close(lock)


@contextlib.contextmanager
def _lock(stage: Stage) -> Iterator[int | None]:
    """The stage's file, open and locked, in this context and in children that inherit it.

    None if another process has the lock, or where no such file can be made.
    """
    descriptor = None
    try:
        with contextlib.suppress(OSError):
            descriptor = os.open(stage.path(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                descriptor = None
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _is_free(stage: Stage) -> bool:
    """Whether no other process compiles the stage, as far as the file system can tell."""
    try:
        descriptor = os.open(stage.path(), os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    finally:
        os.close(descriptor)
    return True
