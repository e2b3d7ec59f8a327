"""The contest's format: its published example, and a round trip through a file."""

import gzip
import json

import pytest

from autoshard.errors import FileFormatError
from autoshard.solver import SolverOptions, Status, evaluate, solve
from autoshard.solver.io.iopddl import read_iopddl

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


@pytest.mark.parametrize("name", ["example.json", "example.json.gz"])
def test_example(tmp_path, name):
    path = tmp_path / name
    text = json.dumps(EXAMPLE)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    problem = read_iopddl(path)
    # Choosing 1 for node 2 would take 10 + 25 + 20 = 55 > 50 at instant 50; the cheapest that fits follows.
    assert evaluate(problem, (0, 0, 1, 1, 0)).peak_usage == 55
    solution = solve(problem, SolverOptions(relative_gap=0.0))
    assert solution.certificate.status is Status.OPTIMAL
    assert solution.choices == (0, 0, 2, 1, 0)
    # nodes 15 + 55 + 35 + 75 + 95 = 275, edges 30 + 40 + 10 + 30 + 60 = 170
    assert solution.certificate.objective == 445


def test_huge_costs_forbid(tmp_path):
    data = json.loads(json.dumps(EXAMPLE))
    data["problem"]["nodes"]["costs"][1][0] = 10**18
    path = tmp_path / "forbidden.json"
    path.write_text(json.dumps(data))
    assert solve(read_iopddl(path)).choices[1] == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"problem": {"nodes": {"costs": [[1]]}}}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match="other.json"):
        read_iopddl(path)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(FileFormatError, match="missing.json"):
        read_iopddl(tmp_path / "missing.json")
