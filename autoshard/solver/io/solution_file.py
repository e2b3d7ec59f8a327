"""Solution files: versioned JSON that names the problem it solves.

The keys:

    format     "autoshard-solution"
    version    1
    problem    digest of the problem (`packed.py`); a solution is of use for that problem alone
    title      the problem's title
    status     `Status` by value
    objective, bound, capacity_price
               see `Certificate`; null where unknown
    solve_s    time spent
    choices    one number per node
"""

import json
import math
import os
from collections.abc import Sequence
from typing import Any

from autoshard.errors import FileFormatError
from autoshard.files import read_json, write_text_atomically
from autoshard.solver.evaluate import evaluate
from autoshard.solver.io.packed import problem_digest
from autoshard.solver.problem import CapacityPrice, Certificate, Problem, Solution, Status, relative_gap

FORMAT, VERSION = "autoshard-solution", 1


def write_solution(solution: Solution, problem: Problem, title: str, path: str | os.PathLike[str]) -> None:
    """Writes a solution of `problem`.

    Raises:
      FileFormatError: if the file cannot be written.
    """
    write_text_atomically(path, json.dumps(solution_document(solution, problem, title)) + "\n")


def solution_document(solution: Solution, problem: Problem, title: str) -> dict[str, Any]:
    """The content of a solution file, as plain data."""
    certificate = solution.certificate
    price = certificate.capacity_price
    finite = lambda value: value if value is not None and math.isfinite(value) else None
    return {
        "format": FORMAT,
        "version": VERSION,
        "problem": problem_digest(problem),
        "title": title,
        "status": certificate.status.value,
        "objective": finite(certificate.objective),
        "bound": finite(certificate.bound),
        "capacity_price": None if price is None else {"bound": finite(price.bound), "per_unit": finite(price.per_unit)},
        "solve_s": certificate.solve_s,
        "choices": None if solution.choices is None else list(solution.choices),
    }


def read_solution(path: str | os.PathLike[str], problem: Problem) -> Solution:
    """Reads a solution of `problem`.

    Its cost is evaluated anew; its bound is the one that the file states.

    Raises:
      FileFormatError: if the file is malformed, of another version, belongs to another problem, holds no solution, or
        holds one that breaks the problem's limits.
    """
    path = os.fspath(path)
    data = read_json(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FileFormatError(
            f"{path}: this is not a solution file of autoshard. Make one with `autoshard solve --out`."
        )
    if data.get("version") != VERSION:
        raise FileFormatError(
            f"{path}: this is a solution of version {data.get('version')!r}; this autoshard reads version {VERSION}. "
            "Solve the problem again."
        )
    if data.get("problem") != problem_digest(problem):
        about = f" ({data['title']})" if data.get("title") else ""
        raise FileFormatError(
            f"{path}: this solves another problem{about}: its digest is {data.get('problem')!r}, this problem's is "
            f"{problem_digest(problem)!r}. The problem depends on the model, the batch, the cluster, the mesh, the "
            "memory budget, the pins and the versions of autoshard and JAX. Write and solve this problem."
        )
    try:
        status, choices = Status(data["status"]), data["choices"]
        bound = -math.inf if data["bound"] is None else float(data["bound"])
        price = data["capacity_price"]
        price = None if price is None else CapacityPrice(float(price["bound"]), float(price["per_unit"]))
        solve_s = float(data["solve_s"])
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{path}: the solution is malformed: {type(error).__name__}: {error}.") from error
    if choices is None:
        raise FileFormatError(f"{path}: there is no solution in it: the solver ended with {status.value!r}.")
    objective = _evaluated(path, problem, choices)
    if bound > objective + 1e-9 * abs(objective):
        raise FileFormatError(f"{path}: the bound {bound} lies above the solution's cost {objective}. Solve it again.")
    bound = min(bound, objective)
    gap = relative_gap(objective, bound)
    return Solution(tuple(choices), Certificate(status, objective, bound, gap, solve_s, price))


def _evaluated(path: str, problem: Problem, choices: Sequence[int]) -> float:
    """The cost of the choices, which have to be within the problem's limits."""
    nodes = problem.nodes
    is_whole = isinstance(choices, list) and len(choices) == len(nodes)
    if not is_whole or not all(type(k) is int and 0 <= k < len(n.costs) for k, n in zip(choices, nodes, strict=True)):
        raise FileFormatError(
            f"{path}: there must be one valid choice for each of the {len(nodes)} nodes. Solve it again."
        )
    result = evaluate(problem, choices)
    if not result.feasible:
        raise FileFormatError(
            f"{path}: the choices are not a solution: they cost {result.objective} and take {result.peak_usage} at "
            f"most, with a capacity of {problem.capacity}. Solve it again."
        )
    return result.objective
