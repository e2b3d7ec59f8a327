"""Plans that follow one known plan in the first layers of a model and another in those behind them.

Parts of plans that no edge joins can follow any of them each (`master_program.py`). Where plans differ in the layout of
activations between layers, one part has all layers, and a plan follows a single known one there, while the mixture
divides it. But its layers are a chain: where it is cut across, few edges join what is before the cut and what is behind
it, and their tables say what it costs that both sides follow different plans. How far along the chain a decision is,
forward and backward pass alike, its distance from one end tells (the level structure of Gibbs, Poole and Stockmeyer, An
algorithm for reducing the bandwidth and profile of a sparse matrix, 1976).
"""

from collections.abc import Mapping

import numpy as np
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import breadth_first_order

from autoshard.solver.tabulated import Tabulated

_LEVELS = 16
"""A part with fewer levels is no chain of layers: something ties all of it."""

_WALKS = 6
"""How often an end is sought that is farther away."""

_LEAST, _MOST_PLANS = 0.05, 3
"""Only plans with so much of a mixture count, and so many at most."""


def crossed_plans(
    tabulated: Tabulated, plans: np.ndarray, part: np.ndarray, shares: Mapping[int, float]
) -> list[np.ndarray]:
    """Plans that follow two known ones in a part, each in as much of it as a mixture does; int64 [decisions] each.

    Args:
      tabulated: The problem. plans: int64 [plans, decisions]; the known ones. part: int64; its decisions.
      shares: Of the plans that the mixture follows in this part.
    """
    most = shared_most(shares)
    if len(most) < 2:
        return []
    level = levels(tabulated, part)
    if level.max() < _LEVELS:
        return []
    made: dict[bytes, np.ndarray] = {}
    for own in most:
        other = next(k for k in most if k != own)
        for first, second, share in ((own, other, shares[own]), (other, own, 1 - shares[own])):
            plan = plans[first].copy()
            behind = part[level > np.quantile(level, share)]
            plan[behind] = plans[second, behind]
            made[plan.tobytes()] = plan
    return list(made.values())


def shared_most(shares: Mapping[int, float]) -> list[int]:
    """The plans with the largest shares of a mixture, but for slight ones."""
    return sorted((k for k, share in shares.items() if share >= _LEAST), key=lambda k: -shares[k])[:_MOST_PLANS]


def levels(tabulated: Tabulated, part: np.ndarray) -> np.ndarray:
    """How many edges each decision of a part is away from one of its ends; int64, as `part`."""
    place = np.full(tabulated.num_nodes, -1, np.int64)
    place[part] = np.arange(len(part))
    source, target = place[tabulated.columns.source], place[tabulated.columns.target]
    inside = (source >= 0) & (target >= 0)
    ends = np.concatenate([source[inside], target[inside]]), np.concatenate([target[inside], source[inside]])
    joined = coo_array((np.ones(len(ends[0])), ends), shape=(len(part), len(part))).tocsr()
    found = _distances(joined, 0)
    for _ in range(_WALKS):
        farther = _distances(joined, int(found.argmax()))
        if farther.max() <= found.max():
            break
        found = farther
    return found


def _distances(joined: csr_array, first: int) -> np.ndarray:
    """How many edges all are away from the first."""
    order, before = breadth_first_order(joined, first, directed=False)
    found = np.zeros(len(before), np.int64)
    for own in order[1:].tolist():
        found[own] = found[before[own]] + 1
    return found
