"""What is compiled when, by whom, and on whose time."""

import copy
import os
import pickle
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from generate import grid
from numba.core import event

from autoshard.run_processes import RUN_VARIABLE
from autoshard.solver import SolverOptions, budget, solve, warm_up
from autoshard.solver.budget import Budget, compile_time
from autoshard.solver.factor_graph import FactorGraph, factor_graph_of
from autoshard.solver.labelling import labels_cost
from autoshard.solver.primal.local_search import descend_freely, repair_within
from autoshard.solver.problem import Edge, EdgeUsage, Node, Problem, Usage
from autoshard.solver.reduce.network import Network

ALL = warm_up.ALWAYS + warm_up.WITHIN_CAPACITY + warm_up.SELDOM
UNLIMITED = """
from generate import grid
from autoshard.solver import SolverOptions, solve, warm_up
solution = solve(grid(0, 3, 4, None), SolverOptions(relative_gap=1.0))
assert solution.choices is not None
assert [stage.is_loaded() for stage in warm_up.ALWAYS + warm_up.WITHIN_CAPACITY + warm_up.SELDOM] == {expected}
"""
STALE = """
import numba, pathlib, pickle, sys
from autoshard.solver import warm_up
from autoshard.solver.bound.label_slack import label_slack

module, line = label_slack.__module__.rpartition(".")[2], label_slack.py_func.__code__.co_firstlineno
name = f"{module}.label_slack-{line}.py{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}.nbi"  # numba's
stale = pickle.dumps(numba.__version__, protocol=-1) + pathlib.Path(sys.argv[1]).read_bytes()
(pathlib.Path(label_slack.stats.cache_path) / name).write_bytes(stale)
kernel = next(k for stage in warm_up.WITHIN_CAPACITY for k in stage.kernels if k.function is label_slack)
try:
    kernel.load()
    sys.exit("the stale index was read")
except ModuleNotFoundError:
    pass
sys.executable = "true"  # no child compiles
warm_up.start_compilation()
kernel.load()
assert label_slack.stats.cache_misses
"""


def needing_all() -> Problem:
    """A small problem that reaches every kernel: dense enough to survive presolve, with copies and a binding
    capacity.
    """
    random = np.random.default_rng(0)
    classes = np.arange(5) % 3
    costs, amounts = random.random((4, 5)), random.random((4, 5))
    nodes = tuple(Node(str(i), costs[i % 4] if i < 8 else random.random(5)) for i in range(24))
    ends = [(i, j) for i in range(24) for j in (i + 1, i + 3, i + 7) if j < 24]
    edges = tuple(Edge(i, j, classes, classes, random.random((3, 3))) for i, j in ends)
    usages = tuple(Usage(i, i // 2, i // 2 + 6, amounts[i % 4]) for i in range(24))
    edge_usages = tuple(EdgeUsage(e, e // 4, e // 4 + 2, random.random((3, 3))) for e in range(0, len(edges), 3))
    return Problem(nodes, edges, usages, edge_usages, 5.0)


@pytest.mark.parametrize("problem", [needing_all(), grid(2, 9, 5, 0.4), grid(1, 9, 5, None)], ids=str)
def test_nothing_is_compiled_but_what_is_listed(problem):
    warm_up.load_kernels(ALL)
    large = {"ilp_entries": 10, "dual_passes": 50, "neighbourhoods": 4}  # the road of large problems
    with compile_time() as compiling:
        solve(problem, SolverOptions(work_limit=1.0, relative_gap=0.0, **large))
    assert compiling.total_s == 0
    assert {len(kernel.function.signatures) for stage in ALL for kernel in stage.kernels} == {1}


def test_a_problem_without_capacity_loads_only_what_all_need():
    expected = [stage in warm_up.ALWAYS for stage in ALL]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    subprocess.run([sys.executable, "-c", UNLIMITED.format(expected=expected)], env=environment, check=True)


@pytest.mark.parametrize("seed", range(6))
def test_descent_without_instants_is_that_of_all_kernels(seed):
    graph, _ = factor_graph_of(Network(grid(seed, 8, 6, None)))
    start = np.random.default_rng(seed).integers(0, np.diff(graph.label_start))
    free, within, scratch = start.copy(), start.copy(), np.zeros(6)
    assert descend_freely(graph, free, scratch) == repair_within(graph, within, np.zeros(0), 30, scratch)
    assert free.tolist() == within.tolist() != start.tolist()


def test_a_copy_of_a_graph_is_one_for_kernels_too():
    def cost_of(graph: FactorGraph) -> float:
        return labels_cost(graph, np.zeros(len(graph.label_start) - 1, np.int64))

    graph, _ = factor_graph_of(Network(needing_all()))
    cost = cost_of(graph)
    for again in (pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph)):
        assert again.address != graph.address
        graph.unary[:] = 0.0
        assert cost_of(again) == cost != cost_of(graph)
        graph.unary[:] = again.unary


def test_kernels_read_a_graph_made_of_other_arrays():
    """Strided ones and those of other types."""
    graph, _ = factor_graph_of(Network(needing_all()))
    arrays = {name: getattr(graph, name) for name in FactorGraph.__dataclass_fields__ if name != "places"}
    wide = np.repeat(graph.unary, 2)
    other = FactorGraph(**{**arrays, "unary": wide[::2], "classes": graph.classes.astype(np.int64)})
    labels = np.ones(len(graph.label_start) - 1, np.int64)
    assert labels_cost(other, labels) == labels_cost(graph, labels)


def test_indices_of_another_version(tmp_path):
    index = pickle.dumps(("stamp", {"key": os.path.join}), protocol=0).replace(b"posixpath", b"autoshard_of_yore")
    (tmp_path / "index").write_bytes(index)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", STALE, tmp_path / "index"], env=environment, check=True)


class Recorded:
    """Stands for a compiled function of a module, with its folder on disk."""

    def __init__(self, folder, module) -> None:
        self.stats = types.SimpleNamespace(cache_path=str(folder))
        self.py_func = types.SimpleNamespace(__code__=types.SimpleNamespace(co_filename=str(module)))
        self.signatures, self.emptied = [], 0

    def compile(self, arguments) -> None:
        self.signatures.append(arguments)

    def recompile(self) -> None:
        self.emptied += 1


@pytest.fixture
def stage(tmp_path):
    module = tmp_path / "module.py"
    module.write_text("pass")
    return warm_up.Stage("some", (warm_up.Kernel(Recorded(tmp_path, module), ()),))


def test_a_stage_is_compiled_again_when_its_source_changes(stage, tmp_path, monkeypatch):
    monkeypatch.setattr(warm_up, "SHARES", ((stage,),))
    assert not stage.is_on_disk()
    with warm_up._lock(stage) as lock:
        warm_up.compile_share(0, [os.dup(lock)])
    assert stage.is_loaded() and stage.is_on_disk()
    (tmp_path / "module.py").write_text("another")
    assert not stage.is_on_disk()


def test_a_child_is_started_for_what_is_not_on_disk_and_nobody_compiles(stage, monkeypatch):
    started = []
    monkeypatch.setattr(warm_up, "ALWAYS", (stage,))
    monkeypatch.setattr(warm_up, "SHARES", ((stage,),))
    monkeypatch.setattr(warm_up, "_start", lambda number, locks: started.append(number))
    with warm_up._lock(stage) as lock:
        assert lock is not None and not warm_up._is_free(stage)
        warm_up.start_compilation()
    assert started == [] and stage.kernels[0].function.emptied == 0
    assert warm_up._is_free(stage)
    warm_up.start_compilation()
    assert started == [0] and stage.kernels[0].function.emptied == 1
    with warm_up._lock(stage) as lock:
        warm_up.compile_share(0, [os.dup(lock)])
    stage.kernels[0].function.signatures.clear()
    warm_up.start_compilation()
    assert started == [0]


def test_a_child_is_no_process_of_the_run_that_started_it(tmp_path, monkeypatch):
    """It may go on when the run ends, and whoever looks for what a run left must not take it for that."""
    told, python = tmp_path / "told", tmp_path / "python"
    python.write_text(f"#!/bin/sh\nenv > {told}.new; mv {told}.new {told}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    monkeypatch.setenv("KEPT", "yes")
    warm_up._start(0, [])
    until = time.monotonic() + 60.0
    while not told.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    names = dict(line.partition("=")[::2] for line in told.read_text().splitlines())
    assert RUN_VARIABLE not in names and names["KEPT"] == "yes"


def test_without_a_folder_to_write_to_a_process_compiles_for_itself(tmp_path, monkeypatch):
    stage = warm_up.Stage("some", (warm_up.Kernel(Recorded(tmp_path / "absent", tmp_path / "module.py"), ()),))
    monkeypatch.setattr(warm_up, "ALWAYS", (stage,))
    monkeypatch.setattr(warm_up, "SHARES", ((stage,),))
    monkeypatch.setattr(warm_up, "_start", lambda number, locks: pytest.fail("a child would not be of use"))
    warm_up.load_kernels((stage,))
    assert stage.is_loaded() and not stage.is_on_disk()


def test_a_process_waits_for_another_that_compiles(tmp_path):
    program = "from autoshard.solver import warm_up as w; print(flush=True); w.load_kernels(w.ALWAYS[:1])"
    with warm_up._lock(warm_up.ALWAYS[0]):
        # elsewhere, so that it imports the package from where this process has it
        other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=tmp_path)
        assert other.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(20 * warm_up._PAUSE_S)
    other.communicate(timeout=120)
    assert other.returncode == 0


def test_the_clock_of_a_search_stands_still_while_kernels_are_compiled(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(budget.time, "perf_counter", lambda: now[0])
    data = {"dispatcher": None, "args": (), "return_type": None}
    with compile_time() as compiling:
        spent = Budget(SolverOptions(time_limit_s=10.0), types.SimpleNamespace(requested=False), 1, compiling)
        now[0] = 3.0
        with event.trigger_event("numba:compile", data=data):
            now[0] = 50.0
            with event.trigger_event("numba:compile", data=data):  # what it calls
                now[0] = 60.0
        now[0] = 61.0
        assert (spent.elapsed(), spent.remaining()) == (4.0, 6.0)
