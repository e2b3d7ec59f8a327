"""MathOptRunner in a process of their own: same answers, killed when they overrun, gone with their owner."""

import datetime
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from ortools.math_opt.python import mathopt

from autoshard.errors import SolverError
from autoshard.interrupts import StopRequest
from autoshard.solver.exact import mathopt_runner
from autoshard.solver.exact.mathopt_runner import MathOptRunner

HIGHS = mathopt.SolverType.HIGHS


def knapsacks(columns: int, rows: int):
    """A program with many knapsack rows; with 90 columns and 60 rows it takes minutes."""
    rng = np.random.default_rng(0)
    model = mathopt.Model()
    x = [model.add_binary_variable() for _ in range(columns)]
    for _ in range(rows):
        weights = rng.integers(1, 100, columns)
        model.add_linear_constraint(sum(int(w) * v for w, v in zip(weights, x, strict=True)) <= int(weights.sum() // 3))
    model.maximize(sum(int(c) * v for c, v in zip(rng.integers(1, 100, columns), x, strict=True)))
    return model.export_model()


def limited(seconds: float | None) -> mathopt.SolveParameters:
    return mathopt.SolveParameters(time_limit=None if seconds is None else datetime.timedelta(seconds=seconds))


@pytest.fixture
def always_apart(monkeypatch):
    monkeypatch.setattr(mathopt_runner, "IN_PROCESS_ENTRIES", 0)


def test_a_child_gives_the_answers_of_this_process(monkeypatch):
    model = knapsacks(16, 8)
    with MathOptRunner(StopRequest()) as here:
        expected = here.run(model, HIGHS, limited(None), None)
        assert here._child is None
    monkeypatch.setattr(mathopt_runner, "IN_PROCESS_ENTRIES", 0)
    with MathOptRunner(StopRequest()) as apart:
        found = apart.run(model, HIGHS, limited(None), None)
        assert (found.reason, found.primal_bound, found.dual_bound) == (
            "OPTIMAL",
            expected.primal_bound,
            expected.dual_bound,
        )
        assert found.ids.tolist() == expected.ids.tolist() and found.nodes == expected.nodes
        hinted = apart.run(model, HIGHS, limited(None), (expected.ids, expected.values))
        assert hinted.primal_bound == pytest.approx(expected.primal_bound)
        child = apart._child
        assert child.poll() is None
    assert child.poll() is not None  # it ends with its owner's context


def test_an_overrun_is_killed_and_the_next_program_runs(always_apart):
    with MathOptRunner(StopRequest(), time.perf_counter() + 1.0) as owner:
        killed = owner.run(knapsacks(90, 60), HIGHS, limited(None), None)
        assert killed.reason == "KILLED" and killed.dual_bound == -math.inf and not len(killed.ids)
        assert owner._child is None
        owner.deadline = math.inf
        assert owner.run(knapsacks(10, 5), HIGHS, limited(None), None).reason == "OPTIMAL"


def test_a_request_to_stop_ends_a_program(always_apart):
    stop = StopRequest()
    threading.Timer(0.5, lambda: setattr(stop, "is_asked", True)).start()
    with MathOptRunner(stop) as owner:
        assert owner.run(knapsacks(90, 60), HIGHS, limited(None), None).reason == "KILLED"


def test_what_ortools_refuses_is_an_error(always_apart):
    model = knapsacks(4, 2)
    model.variables.lower_bounds[0] = math.nan
    with MathOptRunner(StopRequest()) as owner, pytest.raises(SolverError, match="refused"):
        owner.run(model, HIGHS, limited(None), None)


def test_a_child_that_dies_gives_the_program_up(always_apart):
    with MathOptRunner(StopRequest()) as owner:
        threading.Timer(0.7, lambda: owner._child.kill()).start()
        assert owner.run(knapsacks(90, 60), HIGHS, limited(None), None).reason == "KILLED"
        assert owner.run(knapsacks(10, 5), HIGHS, limited(None), None).reason == "OPTIMAL"


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="POSIX signals")
def test_a_child_does_not_outlive_its_owner(tmp_path):
    """The owner is killed in the midst of a solve; the child notices that its input has ended."""
    script = tmp_path / "owner.py"
    script.write_text(
        textwrap.dedent(f"""
        import importlib.util, math, os, sys, threading, time
        spec = importlib.util.spec_from_file_location("tested", {__file__!r})
        tested = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tested)
        tested.mathopt_runner.IN_PROCESS_ENTRIES = 0
        owner = tested.MathOptRunner(tested.StopRequest())
        threading.Thread(target=lambda: (time.sleep(1.5), print(owner._child.pid, flush=True))).start()
        owner.run(tested.knapsacks(90, 60), tested.HIGHS, tested.limited(None), None)
        """)
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as owner:
        child = int(owner.stdout.readline())
        assert is_running(child)
        owner.send_signal(signal.SIGKILL)
    for _ in range(100):
        if not is_running(child):
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child went on")


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
