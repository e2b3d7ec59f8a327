"""The solver room: a choice problem with pairwise costs and a capacity, solved with a proof. Knows nothing of JAX."""

from autoshard.solver.evaluate import evaluate
from autoshard.solver.options import Evaluation, Progress, SolverOptions
from autoshard.solver.problem import Certificate, Edge, EdgeUsage, Node, Problem, Solution, Status, Usage
from autoshard.solver.driver import solve

__all__ = [
    "Certificate",
    "Edge",
    "EdgeUsage",
    "Evaluation",
    "Node",
    "Problem",
    "Progress",
    "Solution",
    "SolverOptions",
    "Status",
    "Usage",
    "evaluate",
    "solve",
]
