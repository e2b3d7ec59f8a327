"""The cache: equal problems are answered, near ones start from a solution, damage is no more than a warning."""

import dataclasses
import gzip
import json
import os
import sys

import generate
import numpy as np
import pytest
from together import run_together

from autoshard.interrupts import StopRequest
from autoshard.solver import SolverOptions, Status, evaluate
from autoshard.solver.cached import solve_cached
from autoshard.solver.io.packed import problem_digest
from autoshard.solver.io.problem_keys import ProblemKeys, carried_over, plain_keys
from autoshard.solver.io.solution_cache import SolutionCache, default_cache
from autoshard.solver.problem import Edge, Node, Problem, Usage

EXACT = SolverOptions(relative_gap=0.0)


def phases(problem, cache, options=EXACT, **more):
    """The solution and what was told on the way."""
    told = []
    solution = solve_cached(problem, options, cache, on_progress=lambda p: told.append(p.phase), **more)
    return solution, told


def test_an_unchanged_problem_is_answered_at_once(tmp_path):
    cache = SolutionCache(tmp_path)
    for seed in range(30):
        problem = generate.random_problem(seed)
        first, told = phases(problem, cache)
        assert "from the cache" not in told
        again, told = phases(problem, cache)
        if first.choices is None:
            assert again.certificate.status is Status.INFEASIBLE  # proven anew
            continue
        assert told == ["from the cache"]
        assert dataclasses.replace(again.certificate, solve_s=0) == dataclasses.replace(first.certificate, solve_s=0)
        assert again.choices == first.choices
        renamed = tuple(dataclasses.replace(node, name=f"other {node.name}") for node in problem.nodes)
        assert phases(dataclasses.replace(problem, nodes=renamed), cache)[1] == ["from the cache"]


def test_what_came_with_a_bound_is_kept_where_a_bound_is_enough(tmp_path):
    """And is no answer where it is not."""
    cache, kept = SolutionCache(tmp_path), 0
    bound_only = dataclasses.replace(EXACT, is_bound_enough=True)
    for seed in range(20):
        problem = generate.repeated(seed, "hub")
        first, told = phases(problem, cache, bound_only)
        again, told = phases(problem, cache, bound_only)
        if first.relaxed is None:
            continue
        kept += 1
        assert told == ["from the cache"] and again.relaxed == first.relaxed and again.choices is None
        assert again.certificate.bound == first.certificate.bound
        solved, told = phases(problem, cache)
        assert "from the cache" not in told and solved.relaxed is None
        assert solved.certificate.bound >= first.certificate.bound
    assert kept > 5


def test_what_came_with_a_bound_of_no_use_is_not_kept(tmp_path):
    cache, searched = SolutionCache(tmp_path), 0
    bound_only = dataclasses.replace(EXACT, is_bound_enough=True)
    for seed in range(20):
        problem = generate.repeated(seed, "hub")
        first, _ = phases(problem, cache, dataclasses.replace(bound_only, useful_bound=1e9))
        again, told = phases(problem, cache, bound_only)
        searched += first.relaxed is not None
        assert first.relaxed is None or "from the cache" not in told
        assert again.certificate.bound >= first.certificate.bound - 1e-9
    assert searched > 5


def test_a_smaller_gap_or_more_time_searches_on_from_what_is_known(tmp_path):
    cache, problem = SolutionCache(tmp_path), generate.grid(2, 9, 5, 0.4)
    stop = StopRequest()
    first, _ = phases(problem, cache, SolverOptions(relative_gap=0.2, time_limit_s=30))
    wanted = SolverOptions(relative_gap=first.certificate.gap / 2, time_limit_s=30)
    second, told = phases(problem, cache, wanted, stop=stop)
    assert told[0] == "hint" and "from the cache" not in told
    assert second.certificate.objective <= first.certificate.objective
    assert second.certificate.bound >= first.certificate.bound


def test_what_the_user_stopped_is_searched_on(tmp_path):
    cache, problem = SolutionCache(tmp_path), generate.grid(0, 20, 6, 0.4)
    stop = StopRequest()
    ask = lambda p: setattr(stop, "is_asked", p.objective < np.inf)
    first = solve_cached(problem, SolverOptions(relative_gap=0.0, time_limit_s=100), cache, on_progress=ask, stop=stop)
    assert first.certificate.status is Status.FEASIBLE
    second, told = phases(problem, cache, SolverOptions(relative_gap=0.0, time_limit_s=3))
    assert told[0] == "hint"
    assert second.certificate.objective <= first.certificate.objective
    assert phases(problem, cache, SolverOptions(relative_gap=0.0, time_limit_s=3))[1] == ["from the cache"]


def layers(count: int, batch: float, capacity: float | None) -> tuple[Problem, ProblemKeys]:
    """A chain of layers with three choices each, of which `split` is best if capacity is short; costs go by `batch`."""
    rng = np.random.default_rng(5)
    table = rng.random((3, 3))
    meanings = ("whole", "split", "copied")
    nodes = tuple(Node(f"n{i}", np.array([1.0, 1.5, 2.5]) * batch) for i in range(count))
    edges = tuple(Edge(i, i + 1, np.arange(3), np.arange(3), table * batch) for i in range(count - 1))
    usages = tuple(Usage(i, 0, 10, np.array([8.0, 2.0, 5.0])) for i in range(count))
    keys = tuple(f"layer {i} weight" for i in range(count))
    return Problem(nodes, edges, usages, (), capacity), ProblemKeys(keys, (meanings,) * count)


@pytest.mark.parametrize(
    "change", [{"batch": 2.0}, {"count": 13}, {"count": 11}, {"capacity": 40.0}, {"capacity": 60.0}]
)
def test_a_changed_problem_starts_from_the_nearest(tmp_path, change):
    cache = SolutionCache(tmp_path)
    given = {"count": 12, "batch": 1.0, "capacity": 50.0}
    problem, keys = layers(**given)
    base = solve_cached(problem, EXACT, cache, lambda: keys)
    far = tuple(f"other {k}" for k in keys.nodes)
    solve_cached(layers(12, 3.0, None)[0], EXACT, cache, lambda: ProblemKeys(far, keys.choices))
    other, other_keys = layers(**{**given, **change})
    carried = cache.nearest(other, other_keys)
    common = min(len(carried), len(base.choices))
    assert carried[:common] == base.choices[:common]
    _, told = phases(other, cache, keys=lambda: other_keys)
    if evaluate(other, carried).feasible:
        assert told[0] == "hint"


def test_choices_are_carried_over_by_meaning(tmp_path):
    """The new problem lists its choices in another order, and lacks one."""
    cache = SolutionCache(tmp_path)
    problem, keys = layers(6, 1.0, 30.0)
    base = solve_cached(problem, EXACT, cache, lambda: keys)
    turned = [("split", "whole", "copied"), ("copied", "split")]
    nodes = [Node("a", np.zeros(3)), Node("b", np.array([3.0, 2.0]))]
    new = ProblemKeys(("layer 0 weight", "layer 3 weight"), tuple(turned))
    entry = cache.find(problem_digest(problem))
    carried = carried_over(entry.nodes, entry.chosen, Problem(tuple(nodes), ()), new)
    meaning = lambda i: keys.choices[i][base.choices[i]]
    assert turned[0][carried[0]] == meaning(0)
    assert turned[1][carried[1]] == (meaning(3) if meaning(3) in turned[1] else "split")


def test_nothing_is_carried_over_from_another_kind_of_problem(tmp_path):
    cache = SolutionCache(tmp_path)
    problem, keys = layers(12, 1.0, None)
    solve_cached(problem, EXACT, cache, lambda: keys)
    other = generate.random_problem(3)
    assert cache.nearest(other, plain_keys(other)) is None


@pytest.mark.parametrize("damage", ["cut", "flip", "text", "empty", "other choices", "other bound"])
def test_damaged_entries_are_ignored_with_a_warning(tmp_path, damage):
    cache = SolutionCache(tmp_path)
    problem, _ = generate.chain(8, 4, 1)
    first = solve_cached(problem, EXACT, cache)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        path.write_bytes(content[:60] + bytes([content[60] ^ 255]) + content[61:])
    elif damage in ("text", "empty"):
        path.write_bytes(b"hello" if damage == "text" else b"")
    else:
        header, body = map(json.loads, gzip.decompress(content).splitlines())
        if damage == "other choices":
            body["choices"] = [(k + 1) % 4 for k in body["choices"]]
        else:
            header["objective"] /= 2
        path.write_bytes(gzip.compress(f"{json.dumps(header)}\n{json.dumps(body)}\n".encode()))
    with pytest.warns(UserWarning, match="ignored"):
        again = solve_cached(problem, EXACT, cache)
    assert again.choices == first.choices
    assert phases(problem, cache)[1] == ["from the cache"]  # the damaged entry was replaced


def test_the_longest_unused_go_when_the_folder_is_full(tmp_path):
    problems = [generate.chain(30, 5, seed)[0] for seed in range(6)]
    cache = SolutionCache(tmp_path)
    for n, problem in enumerate(problems[:5]):
        solve_cached(problem, EXACT, cache)
        (newest,) = [p for p in tmp_path.iterdir() if problem_digest(problem) in p.name]
        os.utime(newest, (1000 + n, 1000 + n))
    cache.find(problem_digest(problems[0]))  # used just now
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    solve_cached(problems[5], EXACT, SolutionCache(tmp_path, max_bytes=int(size * 0.7)))
    kept = [cache.find(problem_digest(problem)) is not None for problem in problems]
    assert kept[0] and kept[5] and not kept[1] and not kept[2]


FILL = """
import sys, generate
from autoshard.solver.cached import solve_cached
from autoshard.solver.io.solution_cache import SolutionCache
from autoshard.solver.options import SolverOptions
cache = SolutionCache(sys.argv[1], max_bytes=4000)
for turn in range(8):
    seed = (int(sys.argv[2]) + turn) % 6
    solve_cached(generate.chain(20, 4, seed)[0], SolverOptions(relative_gap=0.0), cache)
"""


def test_several_processes_share_a_folder(tmp_path):
    fill = lambda seed: [sys.executable, "-c", FILL, str(tmp_path), str(seed)]
    run_together([fill(seed) for seed in range(3)])
    assert all(path.name.endswith(".json.gz") for path in tmp_path.iterdir())
    run_together([fill(0)])


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="not kept"):
        solution = solve_cached(generate.chain(5, 3, 0)[0], EXACT, SolutionCache(tmp_path / "file" / "cache"))
    assert solution.choices is not None


def test_a_work_limit_does_without_the_cache(tmp_path):
    cache = SolutionCache(tmp_path)
    solve_cached(generate.chain(5, 3, 0)[0], SolverOptions(work_limit=1.0), cache)
    assert list(tmp_path.iterdir()) == []


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOSHARD_CACHE", "off")
    assert default_cache() is None
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path))
    assert default_cache().folder == tmp_path
    monkeypatch.delenv("AUTOSHARD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert "autoshard" in default_cache().folder.parts
