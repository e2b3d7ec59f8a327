"""The solver room: a choice problem with pairwise costs and a capacity, solved with a proof. Knows nothing of JAX."""

from autoshard.solver.driver import solve
from autoshard.solver.evaluate import evaluate
from autoshard.solver.least_capacity import LeastCapacity, least_capacity
from autoshard.solver.options import Evaluation, Progress, SolverOptions
from autoshard.solver.problem import CapacityPrice, Certificate, Edge, EdgeUsage, Node, Problem, Solution, Status, Usage

__all__ = [
    "CapacityPrice",
    "Certificate",
    "Edge",
    "EdgeUsage",
    "Evaluation",
    "LeastCapacity",
    "Node",
    "Problem",
    "Progress",
    "Solution",
    "SolverOptions",
    "Status",
    "Usage",
    "evaluate",
    "least_capacity",
    "solve",
]
