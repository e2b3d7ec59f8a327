"""How much every solution with a given label costs above the bound, at least: what reduced-cost fixing goes by."""

import numpy as np

from autoshard.solver.factor_graph import FactorGraph
from autoshard.solver.kernels import kernel


@kernel()
def label_slack(graph: FactorGraph, tables: np.ndarray, messages: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """How much more than the bound every solution with a given label costs, at least; float64 [L].

    Counts the label's own reduced cost and, for each neighbour, the least over its classes of factor cost plus the
    neighbour's reduced cost (for parallel factors to one neighbour, the latter once). All reduced costs are >= 0 once
    node and factor minima are taken out, so the sum over this star bounds the sum over everything.
    """
    nodes = len(graph.label_start) - 1
    low = np.empty(nodes)
    for i in range(nodes):
        low[i] = np.inf
        for k in range(graph.label_start[i], graph.label_start[i + 1]):
            low[i] = min(low[i], theta[k])
    slack = np.empty(len(theta))
    for i in range(nodes):
        for k in range(graph.label_start[i], graph.label_start[i + 1]):
            slack[k] = theta[k] - low[i]
    most = 1
    for f in range(len(graph.source)):
        most = max(most, graph.rows[f], graph.columns[f])
    row_best, column_best = np.empty(most), np.empty(most)
    row_least, column_least = np.empty(most), np.empty(most)
    before = -1, -1
    for f in range(len(graph.source)):
        i, j = graph.source[f], graph.target[f]
        rows, columns, place = graph.rows[f], graph.columns[f], graph.table[f]
        source, target = graph.source_message[f], graph.target_message[f]
        first = before[0] != i or before[1] != j
        before = i, j
        row_best[:] = np.inf
        column_best[:] = np.inf
        row_least[:] = 0.0 if not first else np.inf
        column_least[:] = 0.0 if not first else np.inf
        if first:
            for k in range(graph.label_start[i + 1] - graph.label_start[i]):
                c = graph.classes[graph.source_map[f] + k]
                row_least[c] = min(row_least[c], theta[graph.label_start[i] + k] - low[i])
            for k in range(graph.label_start[j + 1] - graph.label_start[j]):
                c = graph.classes[graph.target_map[f] + k]
                column_least[c] = min(column_least[c], theta[graph.label_start[j] + k] - low[j])
        minimum = np.inf
        for a in range(rows):
            for b in range(columns):
                value = tables[place + a * columns + b] - messages[source + a] - messages[target + b]
                minimum = min(minimum, value)
                row_best[a] = min(row_best[a], value + column_least[b])
                column_best[b] = min(column_best[b], value + row_least[a])
        for k in range(graph.label_start[i + 1] - graph.label_start[i]):
            slack[graph.label_start[i] + k] += row_best[graph.classes[graph.source_map[f] + k]] - minimum
        for k in range(graph.label_start[j + 1] - graph.label_start[j]):
            slack[graph.label_start[j] + k] += column_best[graph.classes[graph.target_map[f] + k]] - minimum
    return slack
