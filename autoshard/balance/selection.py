"""Which units a device leaves out when it computes only some: the last ones in its order, which changes with time."""

import types
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from autoshard.balance.places import Placing

Priority = Literal["random", "change", "gradient"]
"""What stays: any; what changed most lately (Wang et al. 2024, arXiv:2401.11469); what has the largest gradients."""

LONGEST_WAIT: Mapping[Priority, int] = types.MappingProxyType({"random": 8, "change": 2, "gradient": 2})
"""How often one after another a unit is left out before it comes first: at random that hardly happens, and by scores
2 was better than 8 (benchmarks/results/straggler-selection.md)."""


def ordered(
    placing: Placing,
    priority: Priority,
    scores: Sequence[float] | np.ndarray | None,
    waited: Sequence[int] | np.ndarray,
    seed: int,
    longest_wait: int | None = None,
) -> Placing:
    """A placing in which each device that leaves units out computes those that matter.

    Units that were left out `longest_wait` times one after another come first, the longest first, so that every one is
    visited; then those with the highest scores, or any. Scores hardly change from one choice to the next, so that
    without this the same units would stay away, and what others learn in their place is wrong when they are back.

    Args:
      placing: Where units are, and how many each device computes.
      priority: What `scores` are; with "random" they are not read.
      scores: One for each unit. waited: How often each was left out since it was computed last.
      seed: Of the random order.
      longest_wait: None for `LONGEST_WAIT`.
    """
    longest = LONGEST_WAIT[priority] if longest_wait is None else longest_wait
    rng = np.random.default_rng(seed)
    chosen = []
    for units, active in zip(placing.units, placing.active, strict=True):
        if active >= len(units):
            chosen.append(units)
            continue
        value = rng.random(len(units)) if priority == "random" or scores is None else np.asarray(scores)[list(units)]
        overdue = np.array([waited[u] if waited[u] >= longest else 0 for u in units])
        order = np.lexsort((-value, -overdue))
        chosen.append(tuple(units[i] for i in order))
    return Placing(tuple(chosen), placing.active)
