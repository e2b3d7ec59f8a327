"""What a labelling of a factor graph costs and takes: compiled kernels."""

import numpy as np

from autoshard.solver.factor_graph import FactorGraph
from autoshard.solver.kernels import kernel


@kernel()
def labels_cost(graph: FactorGraph, labels: np.ndarray) -> float:
    """Cost of local labels int64 [n] (without the network's constant)."""
    total = 0.0
    for i in range(len(labels)):
        total += graph.unary[graph.label_start[i] + labels[i]]
    for f in range(len(graph.source)):
        a = graph.classes[graph.source_map[f] + labels[graph.source[f]]]
        b = graph.classes[graph.target_map[f] + labels[graph.target[f]]]
        total += graph.tables[graph.table[f] + a * graph.columns[f] + b]
    return float(total)


@kernel()
def labels_usage(graph: FactorGraph, labels: np.ndarray) -> np.ndarray:
    """Usage at each instant, float64 [T]."""
    steps = np.zeros(len(graph.capacity) + 1)
    for i in range(len(labels)):
        for r in range(graph.usage_start[i], graph.usage_start[i + 1]):
            amount = graph.amounts[graph.usage_amounts[r] + labels[i]]
            steps[graph.usage_first[r]] += amount
            steps[graph.usage_last[r]] -= amount
    for f in range(len(graph.source)):
        if graph.pair_start[f] == graph.pair_start[f + 1]:
            continue
        a = graph.classes[graph.source_map[f] + labels[graph.source[f]]]
        b = graph.classes[graph.target_map[f] + labels[graph.target[f]]]
        for r in range(graph.pair_start[f], graph.pair_start[f + 1]):
            amount = graph.amounts[graph.pair_amounts[r] + a * graph.columns[f] + b]
            steps[graph.pair_first[r]] += amount
            steps[graph.pair_last[r]] -= amount
    for t in range(len(graph.capacity)):
        steps[t + 1] += steps[t]
    return steps[: len(graph.capacity)].copy()


@kernel()
def fits(graph: FactorGraph, labels: np.ndarray) -> bool:
    """Whether the usage is within the capacity at every instant."""
    usage = labels_usage(graph, labels)
    for t in range(len(usage)):
        if usage[t] > graph.capacity[t]:
            return False
    return True
