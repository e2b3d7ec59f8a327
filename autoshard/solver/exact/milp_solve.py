"""Solves a mixed integer program with HiGHS, through MathOpt, and reads labels from the answer."""

import dataclasses
import datetime

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from autoshard.solver.exact.mathopt_runner import MathOptRunner
from autoshard.solver.exact.milp import Milp
from autoshard.solver.factor_graph import FactorGraph

OBJECTIVE_SCALE = 1e4
"""The program's costs are scaled so that the incumbent, or the largest cost, is about this: far above tolerances."""

ROOT_VISITS, NODE_VISITS = 1_000, 100
"""Visits of all matrix entries that presolve and the root, and then each node, are reckoned to cost, beside one visit
for each simplex iteration."""


@dataclasses.dataclass(frozen=True, slots=True)
class MilpResult:
    """labels int64 [n] or None; bound: proven on the objective (1); infeasible: proven; work was cut off or not.

    work: Matrix entries visited, as `NODE_VISITS` and `ROOT_VISITS` reckon.
    """

    labels: np.ndarray | None
    bound: float
    infeasible: bool
    work: float = 0.0


def solve_milp(
    graph: FactorGraph,
    milp: Milp,
    runner: MathOptRunner,
    *,
    scale: float,
    absolute_gap: float,
    time_limit_s: float | None,
    node_limit: int | None,
    seed: int,
    hint: np.ndarray | None = None,
) -> MilpResult:
    """Runs HiGHS (one thread, fixed seed) on the program.

    Args:
      runner: Where to run it.
      scale: A cost of the size of the whole objective; costs are divided by it (but the largest coefficient is kept
        below 1e6 times `OBJECTIVE_SCALE`).
      absolute_gap: The search stops when bound and solution are this near, in the problem's own cost.
      time_limit_s, node_limit: Limits; None for none. hint: labels int64 [n] to start from.
    """
    factor = OBJECTIVE_SCALE / max(scale, 1e-6 * float(milp.column_cost.max(initial=0.0)), 1e-300)
    start = None
    if hint is not None:
        columns = milp.label_column[graph.label_start[:-1] + hint]
        if (columns >= 0).all():
            start = columns, np.ones(len(columns))
    limit = None if time_limit_s is None else datetime.timedelta(seconds=max(time_limit_s, 0.01))
    parameters = mathopt.SolveParameters(
        time_limit=limit,
        random_seed=seed,
        node_limit=node_limit,
        absolute_gap_tolerance=max(absolute_gap * factor, 1e-9),
        relative_gap_tolerance=0.0,
    )
    answer = runner.run(_proto(milp, factor), mathopt.SolverType.HIGHS, parameters, start)
    work = len(milp.entry_row) * (ROOT_VISITS + NODE_VISITS * answer.nodes + answer.iterations)
    if answer.reason in ("INFEASIBLE", "INFEASIBLE_OR_UNBOUNDED"):
        return MilpResult(None, np.inf, True, work)
    bound = answer.dual_bound / factor
    labels = None
    if len(answer.ids):
        values = np.zeros(len(milp.column_cost))
        values[answer.ids] = answer.values
        labels = _read_labels(graph, milp, values)
    return MilpResult(labels, bound if np.isfinite(bound) else -np.inf, False, work)


def _proto(milp: Milp, factor: float) -> model_pb2.ModelProto:
    proto = model_pb2.ModelProto()
    columns, rows = len(milp.column_cost), len(milp.row_bounds)
    variables = proto.variables
    variables.ids.extend(range(columns))
    variables.lower_bounds.extend(np.zeros(columns))
    variables.upper_bounds.extend(milp.column_upper)
    variables.integers.extend(milp.integer.tolist())
    constraints = proto.linear_constraints
    constraints.ids.extend(range(rows))
    constraints.lower_bounds.extend(milp.row_bounds)
    constraints.upper_bounds.extend(milp.row_bounds)
    order = np.lexsort((milp.entry_column, milp.entry_row))
    row, column, value = milp.entry_row[order], milp.entry_column[order], milp.entry_value[order]
    new = np.ones(len(row), bool)
    new[1:] = (row[1:] != row[:-1]) | (column[1:] != column[:-1])
    group = np.cumsum(new) - 1
    summed = np.bincount(group, weights=value) if len(value) else value
    matrix = proto.linear_constraint_matrix
    matrix.row_ids.extend(row[new])
    matrix.column_ids.extend(column[new])
    matrix.coefficients.extend(summed)
    used = np.flatnonzero(milp.column_cost)
    proto.objective.linear_coefficients.ids.extend(used)
    proto.objective.linear_coefficients.values.extend(milp.column_cost[used] * factor)
    return proto


def _read_labels(graph: FactorGraph, milp: Milp, values: np.ndarray) -> np.ndarray:
    """The label of largest value at each node."""
    weight = np.where(milp.label_column >= 0, values[milp.label_column], -1.0)
    labels = np.empty(len(graph.label_start) - 1, np.int64)
    for i in range(len(labels)):
        labels[i] = int(np.argmax(weight[graph.label_start[i] : graph.label_start[i + 1]]))
    return labels
