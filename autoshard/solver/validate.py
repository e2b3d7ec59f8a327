"""Refuses a malformed problem before any work is done on it."""

import numpy as np

from autoshard.errors import SolverError
from autoshard.solver.problem import Edge, Problem


def check_problem(problem: Problem, are_costs_enough: bool = False) -> None:
    """Checks the shapes, ranges and signs that `problem.py` promises.

    Args:
      problem: The problem.
      are_costs_enough: Whether it differs in its costs alone from one that was checked, so that only these are.

    Raises:
      SolverError: naming the first node, edge or usage that breaks a rule.
    """
    costs: set[int] = set()  # equal arrays are often one object
    for node in problem.nodes:
        if node.costs.ndim != 1:
            raise SolverError(f"node {node.name!r}: costs must have one axis; received shape {node.costs.shape}")
        if id(node.costs) not in costs and _not_cost(node.costs):
            raise SolverError(f"node {node.name!r}: costs must be finite or +inf; received {node.costs.tolist()}")
        costs.add(id(node.costs))
    seen: set[tuple[int, ...]] = set()
    tables: set[int] = set()
    if are_costs_enough:
        for index, edge in enumerate(problem.edges):
            _check_table(index, edge, tables)
        return
    for index, edge in enumerate(problem.edges):
        _check_edge(problem, index, edge, seen, tables)
    amounts: set[int] = set()
    for usage in problem.usages:
        if not 0 <= usage.node < len(problem.nodes):
            raise SolverError(f"usage of node {usage.node}: there are {len(problem.nodes)} nodes")
        node = problem.nodes[usage.node]
        if usage.amounts.shape != node.costs.shape:
            raise SolverError(
                f"usage of node {node.name!r}: one amount per choice is needed ({node.costs.shape[0]}); "
                f"received shape {usage.amounts.shape}"
            )
        if id(usage.amounts) not in amounts and _not_amounts(usage.amounts):
            raise SolverError(f"usage of node {node.name!r}: amounts must be finite and non-negative")
        amounts.add(id(usage.amounts))
    for usage in problem.edge_usages:
        if not 0 <= usage.edge < len(problem.edges):
            raise SolverError(f"usage of edge {usage.edge}: there are {len(problem.edges)} edges")
        if usage.amounts.shape != problem.edges[usage.edge].costs.shape:
            raise SolverError(
                f"usage of edge {usage.edge}: amounts have shape {usage.amounts.shape}, "
                f"costs {problem.edges[usage.edge].costs.shape}; they must agree"
            )
        if id(usage.amounts) not in amounts and _not_amounts(usage.amounts):
            raise SolverError(f"usage of edge {usage.edge}: amounts must be finite and non-negative")
        amounts.add(id(usage.amounts))
    if problem.capacity is not None and not np.isfinite(problem.capacity):
        raise SolverError(f"capacity must be finite, or None where nothing limits usage; received {problem.capacity}")


def _not_cost(costs: np.ndarray) -> bool:
    return bool(np.isnan(costs).any() or (costs == -np.inf).any())


def _not_amounts(amounts: np.ndarray) -> bool:
    return not (np.isfinite(amounts).all() and (amounts >= 0).all())


def _check_edge(problem: Problem, index: int, edge: Edge, seen: set[tuple[int, ...]], tables: set[int]) -> None:
    count = len(problem.nodes)
    if not (0 <= edge.source < count and 0 <= edge.target < count) or edge.source == edge.target:
        raise SolverError(
            f"edge {index}: must join two different nodes of 0..{count - 1}; received {edge.source} and {edge.target}"
        )
    for end, node, classes, axis in (
        ("source", edge.source, edge.source_class, 0),
        ("target", edge.target, edge.target_class, 1),
    ):
        choices = len(problem.nodes[node].costs)
        if classes.shape != (choices,):
            raise SolverError(
                f"edge {index}: {end}_class must give a class to each of the {choices} choices of node "
                f"{problem.nodes[node].name!r}; received shape {classes.shape}"
            )
        if edge.costs.ndim != 2:
            raise SolverError(f"edge {index}: costs must have two axes; received shape {edge.costs.shape}")
        key = (id(classes), edge.costs.shape[axis])
        if key not in seen and choices:
            if classes.min() < 0 or classes.max() >= edge.costs.shape[axis]:
                raise SolverError(
                    f"edge {index}: {end}_class must lie in 0..{edge.costs.shape[axis] - 1}; "
                    f"received {classes.min()}..{classes.max()}"
                )
            seen.add(key)
    _check_table(index, edge, tables)


def _check_table(index: int, edge: Edge, tables: set[int]) -> None:
    if id(edge.costs) not in tables:
        if _not_cost(edge.costs):
            raise SolverError(f"edge {index}: costs must be finite or +inf")
        tables.add(id(edge.costs))
