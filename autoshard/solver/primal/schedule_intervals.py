"""A schedule cut into intervals, so that a change runs those only that it reaches: for `schedule_search.py`."""

import dataclasses

import numpy as np

_EVERY = 64
"""Ends in an interval. With 8, a search over 96 layers took 2.6 times as long, with 32 1.1 times."""


@dataclasses.dataclass(frozen=True, slots=True)
class Intervals:
    """Where windows lie in intervals of so many ends.

    Attributes:
      every: Ends in each interval, but for the last. by_start: int64 [windows]; by rising start.
      come: int64 [intervals + 1]; how many windows, by rising start, have come when each begins.
      first: int64 [intervals + 2]; where open windows of each begin, if those of all stand one after another: the ones
        that have come when it begins and are waited for later, but not those that only the end of the schedule waits
        for. At last, how many there are of all.
    """

    every: int
    by_start: np.ndarray
    come: np.ndarray
    first: np.ndarray

    def reached(self, places: np.ndarray, starts: np.ndarray, num_ends: int) -> np.ndarray:
        """The first interval that a change of each place reaches."""
        ends = np.where(places < num_ends, places, starts[np.maximum(places - num_ends, 0)] if len(starts) else places)
        return np.minimum(ends, num_ends - 1) // self.every


def intervals_of(starts: np.ndarray, stops: np.ndarray, num_ends: int, every: int = _EVERY) -> Intervals:
    """The intervals of a schedule.

    Args:
      starts, stops: int64 [windows]; the ends between which each lies, ascending by stop. num_ends: How many there are.
      every: Ends in an interval.
    """
    count = max(-(-num_ends // every), 1)
    begins = np.arange(count + 1) * every
    by_start = np.argsort(starts, kind="stable")
    inner = np.flatnonzero(stops < num_ends)
    earliest, latest = starts[inner] // every + 1, np.minimum(stops[inner] // every, count)
    is_open = earliest <= latest
    come = np.bincount(earliest[is_open], minlength=count + 1)
    gone = np.bincount(latest[is_open] + 1, minlength=count + 2)
    num_open = np.cumsum(come - gone[: count + 1])
    return Intervals(
        every=every,
        by_start=by_start,
        come=np.searchsorted(starts[by_start], begins),
        first=np.concatenate([[0], np.cumsum(num_open)]),
    )
