"""Runs MathOpt on one program after another in a process of its own, which its owner may kill at any moment.

Started by `mathopt_runner.py` as a script, so that it imports OR-Tools and NumPy but hardly anything of autoshard, and
never the owner's main module. `run` serves within the owner's process too.
"""

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from autoshard.child_process import serve


def run(
    model: bytes, solver_type: str, parameters: mathopt.SolveParameters, hint: tuple[np.ndarray, np.ndarray] | None
) -> tuple[str, float, float, np.ndarray, np.ndarray, int, int]:
    """Solves a serialised `ModelProto`.

    Args:
      solver_type: A name of `mathopt.SolverType`. hint: Ids and values of variables to start from.

    Returns:
      (name of the termination reason, primal and dual bound of the objective, ids and values of the best solution's
      non-zero variables (empty without one), branch-and-bound nodes, simplex iterations).
    """
    program = mathopt.Model.from_model_proto(model_pb2.ModelProto.FromString(model))
    extra = mathopt.ModelSolveParameters()
    if hint is not None:
        values = {program.get_variable(int(i)): float(v) for i, v in zip(*hint, strict=True)}
        extra.solution_hints = [mathopt.SolutionHint(variable_values=values)]
    result = mathopt.solve(program, mathopt.SolverType[solver_type], params=parameters, model_params=extra)
    ids, values = np.zeros(0, np.int64), np.zeros(0)
    if result.solutions and result.solutions[0].primal_solution is not None:
        found = result.solutions[0].primal_solution.variable_values
        ids, values = np.array([v.id for v in found], np.int64), np.array(list(found.values()), np.float64)
    bounds, stats = result.termination.objective_bounds, result.solve_stats
    return (
        result.termination.reason.name, bounds.primal_bound, bounds.dual_bound, ids, values, stats.node_count,
        stats.simplex_iterations,
    )  # fmt: skip


if __name__ == "__main__":
    serve(lambda request: run(*request))
