"""Choices of the original problem as labels of what presolve left of it."""

from collections.abc import Sequence

import numpy as np

from autoshard.solver.factor_graph import FactorGraph
from autoshard.solver.primal.local_search import assign_greedily
from autoshard.solver.reduce.network import Network


def labels_of_hint(
    choices: Sequence[int], network: Network, nodes: np.ndarray, graph: FactorGraph, scratch: np.ndarray
) -> tuple[np.ndarray, bool]:
    """Local labels int64 [n] that follow `choices` (one per original node), and whether they follow all of them.

    A node whose choice was removed (as dominated, or as part of no better solution) takes the label that is cheapest
    beside the others. Scratch: float64 [>= most labels].
    """
    starts = graph.label_start[:-1]
    own = np.concatenate([network.labels[node] for node in nodes])
    wanted = np.asarray(choices, np.int64)[nodes]
    node = np.repeat(np.arange(len(nodes)), np.diff(graph.label_start))
    found = np.flatnonzero(own == wanted[node])
    labels = np.full(len(nodes), -1, np.int64)
    labels[node[found]] = found - starts[node[found]]
    missing = np.flatnonzero(labels < 0)
    labels[missing] = 0
    for _ in range(2):
        assign_greedily(graph, labels, missing, scratch)
    return labels, not len(missing)
