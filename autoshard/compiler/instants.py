"""Which instants matter of all at which buffers are there."""

import numpy as np


def instants_that_matter(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """The fewest instants at which every maximal set of intervals `start <= t < stop` alive together is alive.

    An instant matters only if it is the last start before some interval stops. Returns rising int64.
    """
    if not len(starts):
        return np.zeros(0, np.int64)
    begins, ends = np.unique(starts), np.unique(stops)
    following = np.append(begins[1:], np.iinfo(np.int64).max)
    next_end = np.searchsorted(ends, begins, side="right")
    is_end = next_end < len(ends)
    return begins[is_end & (ends[np.minimum(next_end, len(ends) - 1)] <= following)]
