"""Times of the same work on eight ranks, one of which is slow for a while."""

from collections.abc import Sequence

import numpy as np

from autoshard.train.device_times import Measured

RANKS, SLOW, FROM, UNTIL = 8, 3, 6, 30


class Trace:
    """Rank `SLOW` needs four times as long in steps `FROM` to `UNTIL`; all times are noisy by 2 %."""

    def __init__(self):
        self.step = 0

    def after_step(self, step_s: float) -> Sequence[Measured]:
        """See `autoshard.train.device_times.Times`."""
        self.step += 1
        times = np.exp(0.02 * np.random.default_rng(self.step).standard_normal(RANKS))
        times[SLOW] *= 4.0 if FROM <= self.step <= UNTIL else 1.0
        return [Measured(times, 0.1 * float(max(times)))]


class TwoAtOnce(Trace):
    """The same, told after every second step."""

    def __init__(self):
        super().__init__()
        self._kept: list[Measured] = []

    def after_step(self, step_s: float) -> Sequence[Measured]:
        """See `autoshard.train.device_times.Times`."""
        self._kept += super().after_step(step_s)
        if self.step % 2:
            return ()
        told, self._kept = self._kept, []
        return told
