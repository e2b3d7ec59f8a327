"""The exact cost and peak usage of a vector of choices, straight from the definition in `problem.py`.

Every objective that the solver reports comes from here, never from a transformed problem.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from autoshard.errors import SolverError
from autoshard.solver.options import Evaluation
from autoshard.solver.problem import Problem

CAPACITY_TOLERANCE = 1e-12
"""Overrun of the capacity, relative to it, that counts as rounding of sums in float64."""


def evaluate(problem: Problem, choices: Sequence[int]) -> Evaluation:
    """Returns the cost, the peak usage and the feasibility of `choices` (one choice index per node).

    Raises:
      SolverError: if there is not one valid choice index per node.
    """
    choices = [int(choice) for choice in choices]
    if len(choices) != len(problem.nodes):
        raise SolverError(f"one choice per node is needed: {len(problem.nodes)} nodes, {len(choices)} choices")
    terms = []
    for node, choice in zip(problem.nodes, choices, strict=True):
        if not 0 <= choice < len(node.costs):
            raise SolverError(f"node {node.name!r} has choices 0..{len(node.costs) - 1}; received {choice}")
        terms.append(float(node.costs[choice]))
    for edge in problem.edges:
        row = edge.source_class[choices[edge.source]]
        column = edge.target_class[choices[edge.target]]
        terms.append(float(edge.costs[row, column]))
    objective = math.inf if math.inf in terms else math.fsum(terms)
    peak_usage, peak_instant = _peak(problem, choices)
    limit = math.inf if problem.capacity is None else problem.capacity * (1 + CAPACITY_TOLERANCE)
    return Evaluation(objective, peak_usage, peak_instant, math.isfinite(objective) and peak_usage <= limit)


def _peak(problem: Problem, choices: list[int]) -> tuple[float, int | None]:
    """Largest usage and its earliest instant; intervals are turned into steps up and down."""
    starts, stops, amounts = [], [], []
    for usage in problem.usages:
        starts.append(usage.start)
        stops.append(usage.stop)
        amounts.append(float(usage.amounts[choices[usage.node]]))
    for usage in problem.edge_usages:
        edge = problem.edges[usage.edge]
        row = edge.source_class[choices[edge.source]]
        column = edge.target_class[choices[edge.target]]
        starts.append(usage.start)
        stops.append(usage.stop)
        amounts.append(float(usage.amounts[row, column]))
    if not starts:
        return 0.0, None
    start, stop, amount = np.array(starts), np.array(stops), np.array(amounts, np.float64)
    live = start < stop
    start, stop, amount = start[live], stop[live], amount[live]
    if not len(start):
        return 0.0, None
    instants, positions = np.unique(np.concatenate([start, stop]), return_inverse=True)
    steps = np.zeros(len(instants))
    np.add.at(steps, positions[: len(start)], amount)
    np.subtract.at(steps, positions[len(start) :], amount)
    usage = np.cumsum(steps)
    best = int(np.argmax(usage))
    return float(usage[best]), int(instants[best])


def peak_if(problem: Problem, amount: Callable[[np.ndarray], float]) -> tuple[float, int | None]:
    """The peak, and its instant, if every usage took `amount` of its amounts; 0 and None without usages."""
    usages = [usage for usage in (*problem.usages, *problem.edge_usages) if usage.start < usage.stop]
    if not usages:
        return 0.0, None
    start = np.array([usage.start for usage in usages])
    stop = np.array([usage.stop for usage in usages])
    instants, position = np.unique(np.concatenate([start, stop]), return_inverse=True)
    of_table = {id(usage.amounts): usage.amounts for usage in usages}  # equal arrays are often one object
    known = {key: float(amount(amounts)) for key, amounts in of_table.items()}
    amounts = np.array([known[id(usage.amounts)] for usage in usages])
    steps = np.zeros(len(instants))
    np.add.at(steps, position[: len(start)], amounts)
    np.subtract.at(steps, position[len(start) :], amounts)
    totals = np.cumsum(steps)
    peak = int(np.argmax(totals))
    return float(totals[peak]), int(instants[peak])
