"""Mixed integer programs given as matrices, solved with SCIP through MathOpt, in this process.

For small programs that others of autoshard pose. Not with HiGHS: version 1.12 prints the name of one of its functions
where it repairs a solution of one of its heuristics, whatever it is told of output (ERGO-Code/HiGHS, issue 2783).
"""

import datetime

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt
from scipy.sparse import vstack

from autoshard.solver.exact import mathopt_process
from autoshard.solver.exact.linear_program import LinearProgram


def least_integral(
    of: LinearProgram, is_integer: np.ndarray, *, relative_gap: float, node_limit: int, time_limit_s: float
) -> np.ndarray | None:
    """The solution of a program with `x >= 0`, some of it integral; float64 [variables].

    Args:
      of: The program.
      is_integer: bool [variables]; which have to be integral.
      relative_gap: How far from the least it may be.
      node_limit, time_limit_s: How many nodes of branch and bound are searched at most, and how long.

    Returns:
      The best that was found; None if none was.
    """
    cost, limits, sums = of.cost, of.limits, of.sums
    proto = model_pb2.ModelProto()
    variables, constraints, matrix = proto.variables, proto.linear_constraints, proto.linear_constraint_matrix
    variables.ids.extend(range(len(cost)))
    variables.lower_bounds.extend(np.zeros(len(cost)))
    variables.upper_bounds.extend(np.full(len(cost), np.inf))
    variables.integers.extend(is_integer.tolist())
    constraints.ids.extend(range(len(limits) + len(sums)))
    constraints.lower_bounds.extend(np.concatenate([np.full(len(limits), -np.inf), sums]))
    constraints.upper_bounds.extend(np.concatenate([limits, sums]))
    entries = vstack([of.rows, of.equal]).tocsr()
    entries.sum_duplicates()
    entries = entries.tocoo()
    some = entries.data != 0
    matrix.row_ids.extend(entries.row[some])
    matrix.column_ids.extend(entries.col[some])
    matrix.coefficients.extend(entries.data[some])
    used = np.flatnonzero(cost)
    proto.objective.linear_coefficients.ids.extend(used)
    proto.objective.linear_coefficients.values.extend(cost[used])
    parameters = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=time_limit_s),
        node_limit=node_limit,
        relative_gap_tolerance=relative_gap,
        random_seed=0,
        threads=1,
    )
    _, _, _, ids, values, _, _ = mathopt_process.run(proto.SerializeToString(), "GSCIP", parameters, None)
    if not len(ids):
        return None
    found = np.zeros(len(cost))
    found[ids] = values
    return found
