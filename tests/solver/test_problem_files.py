"""Problem and solution files: round trips, the digest's laws, and what is refused."""

import dataclasses
import itertools
import json
import math
import zipfile

import generate
import numpy as np
import pytest

from autoshard.errors import FileFormatError
from autoshard.solver import Edge, Problem, SolverOptions, solve
from autoshard.solver.io.packed import problem_digest
from autoshard.solver.io.problem_file import ProblemFile, read_problem_file, write_problem_file
from autoshard.solver.io.solution_file import read_solution, write_solution


def same(one: Problem, other: Problem) -> bool:
    """Equal in every number and name."""
    if one.capacity != other.capacity or [n.name for n in one.nodes] != [n.name for n in other.nodes]:
        return False
    for field in ("nodes", "edges", "usages", "edge_usages"):
        for a, b in zip(getattr(one, field), getattr(other, field), strict=True):
            for part in dataclasses.fields(a):
                if not np.array_equal(getattr(a, part.name), getattr(b, part.name)):
                    return False
    return True


def test_round_trip(tmp_path):
    for seed in range(60):
        problem = generate.random_problem(seed)
        file = ProblemFile(problem, f"problem {seed} ≤ µ", ("a at x.py:1", "b", "a at x.py:1"))
        write_problem_file(file, tmp_path / "p.npz")
        found = read_problem_file(tmp_path / "p.npz")
        assert same(found.problem, problem)
        assert (found.title, found.instants) == (file.title, file.instants)
        assert problem_digest(found.problem) == problem_digest(problem)


def test_shared_tables_are_written_once_and_shared_again(tmp_path):
    table, classes = np.random.default_rng(0).random((40, 40)), np.arange(40)
    nodes = generate.chain(200, 40, 0)[0].nodes
    edges = tuple(Edge(i, i + 1, classes.copy(), classes.copy(), table.copy()) for i in range(199))
    write_problem_file(ProblemFile(Problem(nodes, edges)), tmp_path / "p.npz")
    assert (tmp_path / "p.npz").stat().st_size < 2 * (table.nbytes + 200 * 40 * 8)
    found = read_problem_file(tmp_path / "p.npz").problem
    assert len({id(edge.costs) for edge in found.edges}) == 1 and len({id(e.source_class) for e in found.edges}) == 1


def changed(problem: Problem):
    """The problem with one number changed, in every part where there is one."""
    nodes, edges, usages = problem.nodes, problem.edges, problem.usages
    with_first = lambda items, **change: (dataclasses.replace(items[0], **change), *items[1:])
    yield dataclasses.replace(
        problem, capacity=1.0 if problem.capacity is None else np.nextafter(problem.capacity, np.inf)
    )
    yield dataclasses.replace(problem, nodes=with_first(nodes, costs=other(nodes[0].costs)))
    yield dataclasses.replace(problem, nodes=(*nodes, nodes[0]))
    if edges:
        yield dataclasses.replace(problem, edges=edges[1:])
        yield dataclasses.replace(problem, edges=with_first(edges, costs=other(edges[0].costs)))
        turned = with_first(edges, source=edges[0].target, target=edges[0].source)
        yield dataclasses.replace(problem, edges=turned)
    if usages:
        yield dataclasses.replace(problem, usages=with_first(usages, stop=usages[0].stop + 1))
        yield dataclasses.replace(problem, usages=(*usages, usages[0]))


def other(costs: np.ndarray) -> np.ndarray:
    """The costs with the last of them changed by the least that there is."""
    costs = costs.copy()
    costs.flat[-1] = 0.0 if np.isinf(costs.flat[-1]) else np.nextafter(costs.flat[-1], np.inf)
    return costs


def test_the_digest_tells_problems_apart_and_nothing_else():
    seen = {}
    for seed in range(60):
        problem = generate.random_problem(seed)
        digest = problem_digest(problem)
        assert seen.setdefault(digest, seed) == seed
        for different in changed(problem):
            assert problem_digest(different) != digest
        renamed = tuple(
            dataclasses.replace(node, name=f"x{node.name}", costs=node.costs.copy()) for node in problem.nodes
        )
        copies = tuple(dataclasses.replace(edge, costs=edge.costs.copy(order="F")) for edge in problem.edges)
        assert problem_digest(dataclasses.replace(problem, nodes=renamed, edges=copies)) == digest


def test_the_digest_does_not_change_with_versions():
    """Files and caches outlive a version of autoshard: a new digest must come with a new `VERSION` of both."""
    assert problem_digest(generate.chain(5, 3, 0)[0]) == "9cd0c432a64f9710428462d05190ab06"


def test_damaged_problem_files_are_refused(tmp_path):
    path = tmp_path / "p.npz"
    write_problem_file(ProblemFile(generate.random_problem(7)), path)
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(whole[: rng.integers(4, len(whole))]) if rng.random() < 0.3 else bytearray(whole)
        for place in rng.integers(4, len(damaged), 3):
            damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            read_problem_file(path)
        except FileFormatError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 100  # zip's checksums do not cover every byte


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("header", lambda h: {**h, "version": 2}),
        ("header", lambda h: {**h, "format": "other"}),
        ("header", lambda h: {**h, "names": h["names"][1:]}),
        ("header", lambda h: {**h, "capacity": "much"}),
        ("header", lambda h: {k: v for k, v in h.items() if k != "title"}),
        ("nodes", lambda a: a + 1000),
        ("nodes", lambda a: a.astype(np.float64)),
        ("edges", lambda a: a - 1),
        ("edges", lambda a: a[:, :4]),
        ("value_start", lambda a: a[::-1].copy()),
        ("values", lambda a: np.full_like(a, np.nan)),
        ("usages", lambda a: a + 10**6),
    ],
)  # fmt: skip
def test_contradictions_are_refused(tmp_path, name, change):
    problems = map(generate.random_problem, itertools.count())
    problem = next(problem for problem in problems if problem.edges and problem.usages)
    path = tmp_path / "p.npz"
    write_problem_file(ProblemFile(problem), path)
    with np.load(path) as archive:
        arrays = dict(archive)
    if name == "header":
        header = change(json.loads(arrays["header"].tobytes()))
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    else:
        arrays[name] = change(arrays[name])
    np.savez_compressed(path, **arrays)
    with pytest.raises(FileFormatError, match="p.npz"):
        read_problem_file(path)


def test_other_files_are_refused(tmp_path):
    for content in (b"", b"PK\x03\x04", b"\x1f\x8b\x08", b"{", b'{"problem": {}}', b"\x00" * 100):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(FileFormatError, match="file"):
            read_problem_file(tmp_path / "file")
    with zipfile.ZipFile(tmp_path / "file", "w") as archive:
        archive.writestr("hello.txt", "hello")
    with pytest.raises(FileFormatError, match="not a problem file"):
        read_problem_file(tmp_path / "file")
    with pytest.raises(FileFormatError, match="none"):
        read_problem_file(tmp_path / "none")


def test_solutions_come_back_and_are_checked(tmp_path):
    path = tmp_path / "s.json"
    for seed in range(40):
        problem = generate.random_problem(seed)
        solution = solve(problem, SolverOptions(relative_gap=0.0))
        write_solution(solution, problem, "a title", path)
        if solution.choices is None:
            with pytest.raises(FileFormatError, match="no solution in it: .* 'infeasible'"):
                read_solution(path, problem)
            continue
        assert read_solution(path, problem) == solution
        for different in changed(problem):
            with pytest.raises(FileFormatError, match="another problem .a title"):
                read_solution(path, different)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": "x"}, "not a solution"),
        ({"version": 7}, "version 7"),
        ({"choices": [0] * 99}, "one valid choice for each"),
        ({"choices": [9] * 5}, "one valid choice for each"),
        ({"choices": [0.0] * 5}, "one valid choice for each"),
        ({"choices": [2, 2, 2, 2, 2]}, "not a solution"),
        ({"bound": 1e9}, "bound"),
        ({"status": "fine"}, "malformed"),
    ],
)
def test_wrong_solutions_are_refused(tmp_path, change, told):
    problem, _ = generate.chain(5, 3, 0)
    costs = problem.nodes[0].costs.copy()
    costs[2] = math.inf
    problem = dataclasses.replace(
        problem, nodes=(dataclasses.replace(problem.nodes[0], costs=costs), *problem.nodes[1:])
    )
    path = tmp_path / "s.json"
    write_solution(solve(problem), problem, "", path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FileFormatError, match=told):
        read_solution(path, problem)
