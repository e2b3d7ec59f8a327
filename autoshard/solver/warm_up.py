"""Compiles the solver's kernels before any clock runs.

Numba compiles a kernel when it is first called and keeps the result on disk; on a machine that never ran autoshard that
takes half a minute of one core. Two processes share the work: what the child compiles, this process reads from disk.
Where several processes of a machine begin at once, as under `autoshard launch`, one of them compiles for all.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
from numba.extending import is_jitted

from autoshard.solver.bound.dual_ascent import DualAscent
from autoshard.solver.bound.label_slack import label_slack
from autoshard.solver.factor_graph import FactorGraph, factor_graph_of
from autoshard.solver.labelling import labels_cost
from autoshard.solver.options import SolverOptions
from autoshard.solver.primal.local_search import repair
from autoshard.solver.primal.tree_moves import improve_trees
from autoshard.solver.problem import Edge, EdgeUsage, Node, Problem, Usage
from autoshard.solver.reduce.network import Network

_NODES, _LABELS, _CLASSES = 24, 5, 3

_PATIENCE_S, _PAUSE_S = 180.0, 0.1
"""How long a process waits for another one that compiles, before it does so itself."""


def is_warm() -> bool:
    """Whether the kernels are compiled or loaded in this process."""
    return bool(label_slack.signatures)


def share_compilation() -> None:
    """Compiles the larger kernels in two processes, if they are not on disk yet."""
    with _one_at_a_time():
        graph = _warm_up_graph()
        labels = np.zeros(len(graph.label_start) - 1, np.int64)
        if not _is_on_disk(graph, labels):
            _compile_in_two(graph, labels)


def _compile_in_two(graph: FactorGraph, labels: np.ndarray) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "from autoshard.solver.warm_up import compile_ascent; compile_ascent()"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        start_new_session=True,
    )
    try:
        ascent = DualAscent(graph)
        repair(graph, labels, ascent.penalties(), 1, ascent.scratch[0])
        child.wait()
    finally:
        child.kill()
        child.wait()


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Lets one process of a machine in at a time, as far as its file system can tell.

    The system lets go of the lock, which is on numba's folder, when a process ends, however it does.
    """
    descriptor = None
    try:
        with contextlib.suppress(OSError):
            descriptor = os.open(str(labels_cost.stats.cache_path), os.O_RDONLY)
            until = time.monotonic() + _PATIENCE_S
            while not _is_locked(descriptor) and time.monotonic() < until:
                time.sleep(_PAUSE_S)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    """Whether this process now has the lock on an open folder."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_on_disk(graph: FactorGraph, labels: np.ndarray) -> bool:
    """Whether `labels_cost`, which it runs, is on disk; if not, empties numba's indices of all other kernels.

    They name classes by module, and where another version of autoshard had those elsewhere, reading them fails.
    """
    try:
        labels_cost(graph, labels)
        if not labels_cost.stats.cache_misses:
            return True
    except (ImportError, AttributeError):  # the module or class is no more
        pass
    modules = [module for name, module in sys.modules.items() if name.startswith("autoshard.solver.")]
    for kernel in (x for module in modules for x in vars(module).values() if is_jitted(x)):
        if not kernel.signatures:
            kernel.recompile()  # of nothing, which only writes an empty index
    labels_cost(graph, labels)
    return False


def compile_ascent() -> None:
    """The child's share."""
    graph = _warm_up_graph()
    ascent = DualAscent(graph)
    ascent.climb(50, np.inf, np.inf, -1.0)
    point = ascent.reparametrization()
    label_slack(graph, point.tables, point.messages, point.theta)
    usage, cost = np.zeros(len(graph.capacity)), np.zeros(len(graph.unary))
    improve_trees(graph, ascent.decoded[0], usage, point.theta, point.tables, 4, 1, 0, cost)


def _warm_up_graph() -> FactorGraph:
    graph, _ = factor_graph_of(Network(warm_up_problem()))
    return graph


def warm_up_problem() -> Problem:
    """A small problem that reaches every kernel: dense enough to survive presolve, with copies and a binding
    capacity.
    """
    random = np.random.default_rng(0)
    classes = np.arange(_LABELS) % _CLASSES
    costs = random.random((4, _LABELS))
    amounts = random.random((4, _LABELS))
    nodes = tuple(Node(str(i), costs[i % 4] if i < 8 else random.random(_LABELS))
                  for i in range(_NODES))  # fmt: skip
    edges = tuple(
        Edge(i, j, classes, classes, random.random((_CLASSES, _CLASSES)))
        for i in range(_NODES)
        for j in (i + 1, i + 3, i + 7)
        if j < _NODES
    )
    usages = tuple(Usage(i, i // 2, i // 2 + 6, amounts[i % 4]) for i in range(_NODES))
    edge_usages = tuple(EdgeUsage(e, e // 4, e // 4 + 2, random.random((_CLASSES, _CLASSES)))
                        for e in range(0, len(edges), 3))  # fmt: skip
    return Problem(nodes, edges, usages, edge_usages, 5.0)


def warm_up_options() -> SolverOptions:
    """Options under which the search takes the road of large problems."""
    return SolverOptions(time_limit_s=600.0, relative_gap=0.0, ilp_entries=10, dual_passes=50, neighbourhoods=4)
