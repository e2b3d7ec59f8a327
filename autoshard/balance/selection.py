"""Which units a device leaves out when it computes only some: the last ones in its order, which changes with time."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from autoshard.balance.places import Placing

Priority = Literal["random", "change", "gradient"]
"""What stays: any; what changed most lately (Wang et al. 2024, arXiv:2401.11469); what has the largest gradients."""


def ordered(
    placing: Placing,
    priority: Priority,
    scores: Sequence[float] | np.ndarray | None,
    waited: Sequence[int] | np.ndarray,
    seed: int,
    longest_wait: int = 8,
) -> Placing:
    """A placing in which each device that leaves units out computes those that matter.

    Units that were left out `longest_wait` times one after another come first, the longest first, so that every one is
    visited; then those with the highest scores, or any.

    Args:
      placing: Where units are, and how many each device computes.
      priority: What `scores` are; with "random" they are not read.
      scores: One for each unit. waited: How often each was left out since it was computed last.
      seed: Of the random order.
    """
    rng = np.random.default_rng(seed)
    chosen = []
    for units, active in zip(placing.units, placing.active, strict=True):
        if active >= len(units):
            chosen.append(units)
            continue
        value = rng.random(len(units)) if priority == "random" or scores is None else np.asarray(scores)[list(units)]
        overdue = np.array([waited[u] if waited[u] >= longest_wait else 0 for u in units])
        order = np.lexsort((-value, -overdue))
        chosen.append(tuple(units[i] for i in order))
    return Placing(tuple(chosen), placing.active)
