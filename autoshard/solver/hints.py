"""Choices of the original problem as labels of what presolve left of it."""

from collections.abc import Sequence

import numpy as np

from autoshard.solver.flat import Flat
from autoshard.solver.network import Network
from autoshard.solver.primal import local_costs


def labels_near(
    choices: Sequence[int], network: Network, nodes: np.ndarray, flat: Flat, scratch: np.ndarray
) -> tuple[np.ndarray, bool]:
    """Local labels int64 [n] that follow `choices` (one per original node), and whether they follow all of them.

    A node whose choice was removed (as dominated, or as part of no better solution) takes the label that is cheapest
    beside the others. Scratch: float64 [>= most labels].
    """
    labels, missing = np.zeros(len(nodes), np.int64), []
    for index, node in enumerate(nodes):
        own, choice = network.labels[node], choices[node]
        position = int(np.searchsorted(own, choice))
        if position < len(own) and own[position] == choice:
            labels[index] = position
        else:
            missing.append(index)
    for _ in range(2 if missing else 0):
        for index in missing:
            local_costs(flat, labels, index, scratch)
            count = flat.label_start[index + 1] - flat.label_start[index]
            labels[index] = int(np.argmin(scratch[:count]))
    return labels, not missing
