"""Reads instances of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism (github.com/google/iopddl).

The format is JSON, plain or compressed by gzip (its first bytes tell):

    {"problem": {"name": ..., "usage_limit": ..., "nodes": {"intervals": [[start, stop], ...], "costs": [[...], ...],
     "usages": [[...], ...]}, "edges": {"nodes": [[source, target], ...], "costs": [[...], ...]}}}

with half-open intervals, one cost and usage per choice, and edge costs in row-major order. Costs of 1e17 and more mean
"forbidden".
"""

import gzip
import json
import pathlib
import zlib

import numpy as np

from autoshard.errors import FileFormatError
from autoshard.solver.problem import Edge, Node, Problem, Usage

FORBIDDEN_COST = 1e17
"""Costs from here on forbid a choice or a pair of choices."""
_GZIP = b"\x1f\x8b"


def read_iopddl(path: str | pathlib.Path) -> Problem:
    """Returns the instance in the file at `path`; every class is a choice.

    Raises:
      FileFormatError: if the file is missing or not in the contest's format.
    """
    path = pathlib.Path(path)
    try:
        content = path.read_bytes()
        data = json.loads(gzip.decompress(content) if content[:2] == _GZIP else content)
        return _problem(data["problem"])
    except (OSError, EOFError, zlib.error, LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise FileFormatError(
            f"{path.name} is not an instance of the ASPLOS 2025 contest: {type(error).__name__}: {error}; "
            "expected JSON with problem/nodes, problem/edges and problem/usage_limit"
        ) from error


def _problem(data: dict) -> Problem:
    costs = [_costs(values) for values in data["nodes"]["costs"]]
    nodes = tuple(Node(f"node {index}", own) for index, own in enumerate(costs))
    identity = {len(own): np.arange(len(own)) for own in costs}
    edges = []
    for (source, target), values in zip(data["edges"]["nodes"], data["edges"]["costs"], strict=True):
        rows, columns = len(costs[source]), len(costs[target])
        edges.append(Edge(source, target, identity[rows], identity[columns], _costs(values).reshape(rows, columns)))
    usages = tuple(
        Usage(index, start, stop, np.array(amounts, np.float64))
        for index, ((start, stop), amounts) in enumerate(
            zip(data["nodes"]["intervals"], data["nodes"]["usages"], strict=True)
        )
    )
    limit = data.get("usage_limit")
    return Problem(nodes, tuple(edges), usages, capacity=None if limit is None else float(limit))


def _costs(values: list) -> np.ndarray:
    result = np.array(values, np.float64)
    result[result >= FORBIDDEN_COST] = np.inf
    return result
