"""Compiles the solver's kernels before any clock runs.

Numba compiles a kernel when it is first called and keeps the result on disk; on a machine that never ran autoshard that
takes half a minute, which a caller's time limit is not meant to pay.
"""

import numpy as np

from autoshard.solver.messages import label_slack
from autoshard.solver.options import SolverOptions
from autoshard.solver.problem import Edge, EdgeUsage, Node, Problem, Usage

_NODES, _LABELS, _CLASSES = 24, 5, 3


def is_warm() -> bool:
    """Whether the kernels are compiled or loaded in this process."""
    return bool(label_slack.signatures)


def warm_up_problem() -> Problem:
    """A small problem that reaches every kernel: dense enough to survive presolve, with copies and a binding
    capacity.
    """
    random = np.random.default_rng(0)
    classes = np.arange(_LABELS) % _CLASSES
    costs = random.random((4, _LABELS))
    amounts = random.random((4, _LABELS))
    nodes = tuple(Node(str(i), costs[i % 4] if i < 8 else random.random(_LABELS))
                  for i in range(_NODES))  # fmt: skip
    edges = tuple(
        Edge(i, j, classes, classes, random.random((_CLASSES, _CLASSES)))
        for i in range(_NODES)
        for j in (i + 1, i + 3, i + 7)
        if j < _NODES
    )
    usages = tuple(Usage(i, i // 2, i // 2 + 6, amounts[i % 4]) for i in range(_NODES))
    edge_usages = tuple(EdgeUsage(e, e // 4, e // 4 + 2, random.random((_CLASSES, _CLASSES)))
                        for e in range(0, len(edges), 3))  # fmt: skip
    return Problem(nodes, edges, usages, edge_usages, 5.0)


def warm_up_options() -> SolverOptions:
    """Options under which the search takes the road of large problems."""
    return SolverOptions(time_limit_s=600.0, relative_gap=0.0, ilp_entries=10, dual_passes=50, neighbourhoods=4)
