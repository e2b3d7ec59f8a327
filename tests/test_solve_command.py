"""`autoshard solve`: on a machine without JAX, from its first line to its last."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from autoshard.cli import app
from autoshard.solver import Edge, Node, Problem, Usage, evaluate
from autoshard.solver.io.problem_file import ProblemFile, read_problem_file, write_problem_file
from autoshard.solver.io.solution_file import read_solution
from autoshard.solver.warm_up import ALWAYS, SELDOM, WITHIN_CAPACITY, load_kernels

EXAMPLE = {
    "problem": {
        "name": "example",
        "nodes": {
            "intervals": [[30, 70], [40, 70], [50, 120], [110, 140], [110, 150]],
            "costs": [[15], [55, 65], [25, 45, 35], [85, 75], [95]],
            "usages": [[10], [25, 25], [15, 20, 15], [10, 10], [15]],
        },
        "edges": {
            "nodes": [[0, 1], [0, 2], [1, 3], [2, 4], [3, 4]],
            "costs": [[30, 40], [50, 10, 40], [90, 10, 20, 80], [60, 20, 30], [70, 60]],
        },
        "usage_limit": 50,
    }
}
"""The contest's published example; its optimum is 445 (see tests/solver/test_iopddl.py)."""
WITHOUT_JAX = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib", "flax", "optax", "orbax", "grain"):
            raise ImportError(f"{name} is not installed on this machine")

sys.meta_path.insert(0, Blocker())
from autoshard.cli import main
main()
"""


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compiles the kernels, so that the processes below only load them."""
    load_kernels(ALWAYS + WITHIN_CAPACITY + SELDOM)


def example(tmp_path: pathlib.Path, limit: int = 50) -> pathlib.Path:
    path = tmp_path / "example.json"
    path.write_text(json.dumps({"problem": {**EXAMPLE["problem"], "usage_limit": limit}}))
    return path


def endless(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file with a problem that is not solved to the end in minutes."""
    rng, side, path = np.random.default_rng(0), 30, tmp_path / "endless.npz"
    nodes = tuple(Node(f"n{i}", rng.random(6)) for i in range(side * side))
    classes = np.arange(6)
    pairs = [(i, i + step) for i in range(side * side) for step in (1, side) if i + step < side * side]
    edges = tuple(Edge(i, j, classes, classes, 2 * rng.random((6, 6))) for i, j in pairs)
    usages = tuple(Usage(i, i, i + 20, rng.random(6)) for i in range(side * side))
    write_problem_file(ProblemFile(Problem(nodes, edges, usages, (), 9.0)), path)
    return path


def invoke(*args: object):
    return CliRunner().invoke(app, ["solve", *map(str, args)])


def test_without_jax(tmp_path):
    command = [sys.executable, "-c", WITHOUT_JAX, "solve", example(tmp_path), "--out", tmp_path / "s.json"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "cost 445, lower bound 445\n[0, 0, 2, 1, 0]\n"
    problem = read_problem_file(example(tmp_path)).problem
    assert read_solution(tmp_path / "s.json", problem).choices == (0, 0, 2, 1, 0)
    assert "5 nodes, 5 edges, 5 usages" in done.stderr and "bound 445" in done.stderr


def test_json(tmp_path):
    result = invoke(example(tmp_path), "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["objective"], found["bound"], found["status"]) == (445, 445, "optimal")
    assert found["choices"] == [0, 0, 2, 1, 0]


def test_costs_that_are_no_integers_are_printed_in_full(tmp_path):
    path = tmp_path / "p.npz"
    write_problem_file(ProblemFile(Problem((Node("n", np.array([0.1 + 0.2, 1.0])),), ())), path)
    assert invoke(path).stdout == "cost 0.30000000000000004, lower bound 0.30000000000000004\n[0]\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_give_the_best_so_far(tmp_path, number):
    path = endless(tmp_path)
    command = [sys.executable, "-c", "from autoshard.cli import main; main()", "solve", path, "--time-limit", "600"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        for line in process.stderr:
            if "cost" in line and "cost -" not in line:  # a solution is there
                break
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    check_lines(out, path)


@pytest.mark.slow
def test_the_limit_counts_from_the_start_of_the_process(tmp_path):
    path = endless(tmp_path)
    command = [sys.executable, "-c", "from autoshard.cli import main; main()", "solve", path, "--time-limit", "15"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    check_lines(done.stdout, path)


def check_lines(out: str, path: pathlib.Path) -> None:
    figures, choices = out.splitlines()
    cost, bound = (float(part.split()[-1]) for part in figures.split(", "))
    result = evaluate(read_problem_file(path).problem, json.loads(choices))
    assert result.feasible and result.objective == pytest.approx(cost) and bound < cost


def test_a_work_limit_gives_the_same_output_again(tmp_path):
    path = endless(tmp_path)
    args = path, "--work-limit", "0.3", "--seed", "2"
    first, second = invoke(*args), invoke(*args)
    assert first.exit_code == 0 and first.stdout == second.stdout


def test_a_shortage_is_explained(tmp_path):
    result = invoke(example(tmp_path, limit=20))
    assert result.exit_code == 2 and result.stdout == ""
    told = " ".join(result.stderr.split())
    assert "Proven: there is no solution under the capacity of 20" in told
    # Nodes 0, 1 and 2 are live together from 50 on, and take 10 + 25 + 15 at least.
    assert "Every solution takes at least 50; a capacity of 50 would do" in told
    assert "instant 50, where these take most: node 1 (25), node 2 (15), node 0 (10)" in told
    assert "cost 445" not in told
    assert invoke(example(tmp_path, limit=50)).exit_code == 0


def test_a_shortage_tells_the_line_where_it_is_known(tmp_path):
    nodes = (Node("weights", np.array([1.0, 2.0])), Node("copy", np.array([0.0])))
    usages = (Usage(0, 0, 2, np.array([6.0, 4.0])), Usage(1, 1, 2, np.array([3.0])))
    path = tmp_path / "p.npz"
    write_problem_file(ProblemFile(Problem(nodes, (), usages, (), 5.0), "", ("add at f.py:1", "dot at f.py:2")), path)
    told = " ".join(invoke(path).stderr.split())
    assert "at least 7; a capacity of 7 would do" in told
    assert "at instant 1, dot at f.py:2, where these take most: weights (4), copy (3)" in told


def test_forbidden_pairs_that_leave_nothing(tmp_path):
    wrong = dataclasses.replace(
        Problem((Node("a", np.zeros(2)), Node("b", np.zeros(2))), ()),
        edges=(Edge(0, 1, np.arange(2), np.arange(2), np.full((2, 2), np.inf)),),
    )
    for capacity in (None, 5.0):
        path = tmp_path / "p.npz"
        write_problem_file(ProblemFile(dataclasses.replace(wrong, capacity=capacity)), path)
        result = invoke(path)
        assert result.exit_code == 2 and "Forbidden choices" in " ".join(result.stderr.split())


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2", b"\x1f\x8b\x00", b"PK\x03\x04abc", b"\xff\xfe"])
def test_malformed_files_are_one_message(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    result = invoke(path)
    assert result.exit_code == 2 and result.stdout == ""
    assert "bad.json" in result.stderr and "Traceback" not in result.stderr
    assert invoke(tmp_path / "none.json").exit_code == 2
    assert invoke(example(tmp_path), "--out", tmp_path / "no" / "folder.json").exit_code == 2


def test_the_cache_is_used_unless_it_is_off(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path / "cache"))
    path = example(tmp_path)
    first = invoke(path)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    again = invoke(path)
    assert again.stdout == first.stdout and "from the cache" in again.stderr
    assert "from the cache" not in invoke(path, "--no-cache").stderr


@pytest.mark.parametrize(("has_solution", "limit_s"), [(True, 20), (False, 6)])
def test_a_search_that_looks_at_no_clock_is_cut_off(tmp_path, has_solution, limit_s):
    """The main thread is held up after its first progress, as by a library; the best so far is shown in time."""
    code = f"""
import time
import autoshard.solve_file
from autoshard.cli import main

story = autoshard.solve_file._Story
tell = story.progress

def hang(self, progress):
    tell(self, progress)
    if progress.choices is not None or not {has_solution}:
        time.sleep(1000)

story.progress = hang
main()
"""
    path = endless(tmp_path)
    command = [sys.executable, "-c", code, "solve", path, "--time-limit", limit_s, "--out", tmp_path / "s.json"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    if has_solution:
        assert done.returncode == 0, done.stderr
        check_lines(done.stdout, path)
        assert read_solution(tmp_path / "s.json", read_problem_file(path).problem).choices is not None
    else:
        assert done.returncode == 2 and done.stdout == "" and f"No solution was found within {limit_s} s" in done.stderr


def test_a_limit_that_ends_while_kernels_are_compiled_is_told(tmp_path):
    code = """
import time
import autoshard.solve_file
from autoshard.cli import main

autoshard.solve_file.load_kernels = lambda stages: time.sleep(1000)
main()
"""
    command = [sys.executable, "-c", code, "solve", endless(tmp_path), "--time-limit", "4"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    told = " ".join(done.stderr.split())
    assert "within 4 s, as the solver's kernels were still being compiled; what is compiled is kept" in told
