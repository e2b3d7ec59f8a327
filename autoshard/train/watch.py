"""What the steps of a run tell of its devices: who is slow, whether that is new, and what a change of shares gained.

Both kinds of shares, of units and of batches, are set by what is known here. All processes see the same times, so that
all know the same.
"""

import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np

from autoshard.balance.detect import Detector
from autoshard.train.device_times import Times

_LOOKED_AT = 10
"""Steps after which a slowdown that goes on is looked at again, and a change of shares is judged."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gain:
    """What a change of shares did.

    Attributes:
        since: the step after which shares changed.
        before_s, after_s: seconds of a step before it and since then.
        slowness: of the ranks, for which shares were changed.
    """

    since: int
    before_s: float
    after_s: float
    slowness: tuple[float, ...]


class Watch:
    """Watches the ranks of a mesh axis.

    Args:
        times: measures devices. rank_of: the rank of each device, in the mesh's order.
        threshold: the slowdown that is named.

    Attributes:
        is_new: whether other ranks are slow after the last step than before it.
    """

    def __init__(self, times: Times, rank_of: Sequence[int] | np.ndarray, threshold: float):
        self._times, self._rank_of = times, np.asarray(rank_of)
        self._ways = int(self._rank_of.max()) + 1
        self._detector = Detector(threshold)
        self._recent: list[float] = []
        self._known_until, self._looked_at = 0, 0
        self._changed: Gain | None = None
        self.is_new = False

    def after_step(self, number: int, step_s: float) -> int:
        """Looks at a step that was taken; all processes call this after each.

        Args:
            number: of the step, counted from 1. step_s: its seconds here.

        Returns:
            For how many steps there is news; 0 where none is known yet.
        """
        self.is_new = False
        measured = self._times.after_step(step_s)
        if not measured:
            return 0
        named = self._detector.named or (False,) * self._ways
        for one in measured:
            ranks = [max(one.times_s[self._rank_of == rank]) for rank in range(self._ways)]
            self._detector = self._detector.then(ranks)
            self._recent = [*self._recent[1 - _LOOKED_AT :], one.step_s]
        self.is_new = self._detector.named != named
        steps, self._known_until = number - self._known_until, number
        return steps

    @property
    def slowness(self) -> tuple[float, ...]:
        """How many times slower than usual each rank is; 1 for those that are not slow."""
        return self._detector.slowness

    @property
    def slow(self) -> tuple[tuple[int, float], ...]:
        """The slow ranks, and how many times slower each is."""
        return tuple((rank, w) for rank, w in enumerate(self.slowness) if w > 1)

    @property
    def step_s(self) -> float:
        """What a step takes: the median of the last three."""
        return statistics.median(self._recent[-3:])

    def is_due(self, goes_on: bool) -> bool:
        """Whether shares are to be looked at now, which is then noted: other ranks are slow, or time has passed.

        Args:
            goes_on: whether there is something to look at again.
        """
        has_passed = self._known_until - self._looked_at >= _LOOKED_AT
        if not self.is_new and not (has_passed and goes_on):
            return False
        self._looked_at = self._known_until
        return True

    def changed(self) -> None:
        """Notes that shares have changed now, to tell later what that gained."""
        self._changed = Gain(self._known_until, self.step_s, self.step_s, self.slowness)
        self._recent = []

    def gain(self) -> Gain | None:
        """What the last change gained, once it can be told; told once."""
        change = self._changed
        if change is None or self._known_until - change.since < _LOOKED_AT:
            return None
        self._changed = None
        after_s = statistics.median(self._recent[1:] or self._recent)  # the first one moved the state
        return dataclasses.replace(change, after_s=after_s)
