"""Linear programs given as matrices, solved with GLOP.

For programs that others of autoshard pose: thousands of variables that few dense rows tie together. GLOP's dual simplex
takes half the time of HiGHS' on them. Through the binding below `ortools.linear_solver.python.model_builder`, which
takes sparse matrices as they are; `model_builder` itself, and MathOpt, take them entry by entry. Its stubs give arrays
types that no array has, so that its objects are typed as `Any` here.
"""

import dataclasses
from typing import Any

import numpy as np
from ortools.linear_solver.python import model_builder_helper
from scipy.optimize import linprog
from scipy.sparse import csr_array, csr_matrix, vstack

_DUAL_SIMPLEX = "use_dual_simplex: true"


@dataclasses.dataclass(frozen=True, slots=True)
class LinearProgram:
    """The least `cost @ x` with `rows @ x <= limits` and `equal @ x == sums`.

    Attributes:
      cost: float64 [variables]. rows, limits, equal, sums: See above.
    """

    cost: np.ndarray
    rows: csr_array
    limits: np.ndarray
    equal: csr_array
    sums: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class LinearSolution:
    """The solution of a linear program.

    Attributes:
      value: The objective. variables: float64 [variables].
      multipliers: float64 [rows]; by how much the objective falls if the limit of a row rises by one, a little.
    """

    value: float
    variables: np.ndarray
    multipliers: np.ndarray


def least_linear(of: LinearProgram, least: np.ndarray, most: np.ndarray) -> LinearSolution | None:
    """The solution of a program with `least <= x <= most`, float64 [variables] each; None if there is none."""
    program: Any = model_builder_helper.ModelBuilderHelper()
    floors, limits = np.concatenate([np.full(len(of.limits), -np.inf), of.sums]), np.concatenate([of.limits, of.sums])
    entries = csr_matrix(vstack([of.rows, of.equal]))
    entries.sum_duplicates()
    program.fill_model_from_sparse_data(least, most, of.cost, floors, limits, entries)
    solver: Any = model_builder_helper.ModelSolverHelper("glop")
    solver.set_solver_specific_parameters(_DUAL_SIMPLEX)
    solver.solve(program)
    match solver.status():
        case model_builder_helper.SolveStatus.OPTIMAL:
            multipliers = -solver.dual_values()[: len(of.limits)]
            return LinearSolution(solver.objective_value(), solver.variable_values(), multipliers)
        case model_builder_helper.SolveStatus.INFEASIBLE:
            return None
    return _by_highs(of, least, most)


def _by_highs(of: LinearProgram, least: np.ndarray, most: np.ndarray) -> LinearSolution | None:
    """`least_linear` by another solver, for what rounding makes too hard for the first."""
    found = linprog(
        of.cost,
        A_ub=of.rows,
        b_ub=of.limits,
        A_eq=of.equal,
        b_eq=of.sums,
        bounds=np.stack([least, most], axis=1),
        method="highs-ds",
        options={"presolve": False},  # rows are few and dense, with nothing to presolve
    )
    return None if found.x is None else LinearSolution(float(found.fun), found.x, -found.ineqlin.marginals)
