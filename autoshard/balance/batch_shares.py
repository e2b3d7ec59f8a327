r"""Shares of a batch: how many of its equal parts each replica runs.

Replica d needs $w_d (f + n_d)$ for $n_d$ parts, in units of the time of a part on a usual device: $w_d$ is its
slowness, f what it does besides. All meet at the sum of gradients, so that

$$\min_n \max_d w_d (f + n_d), \qquad \sum_d n_d = N.$$

Parts are equal, so that giving them out one by one, each to the replica that would end soonest with it, is optimal: an
exchange of any other solution's parts for these never makes the last one later.
"""

import heapq
from collections.abc import Sequence


def batch_shares(num_parts: int, slowness: Sequence[float], fixed: float = 0.0) -> tuple[int, ...]:
    """Numbers of parts of a batch for each replica; of equally slow ones, earlier ones get what is left over.

    Args:
      num_parts: Of the batch. slowness: How many times slower than usual each replica is.
      fixed: What each replica does besides, such as its part of the update, in times of a part.
    """
    counts = [0] * len(slowness)
    ends = [(w * (fixed + 1), d) for d, w in enumerate(slowness)]
    heapq.heapify(ends)
    for _ in range(num_parts):
        _, d = ends[0]
        counts[d] += 1
        heapq.heapreplace(ends, (slowness[d] * (fixed + counts[d] + 1), d))
    return tuple(counts)


def moved_parts(before: Sequence[int], after: Sequence[int]) -> int:
    """How many parts another replica runs after a change of shares."""
    return sum(max(0, new - old) for old, new in zip(before, after, strict=True))
