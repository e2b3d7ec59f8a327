"""Times of the same work on eight ranks, one of which is slow for a while."""

import numpy as np

RANKS, SLOW, FROM, UNTIL = 8, 3, 6, 30


class Trace:
    """Rank `SLOW` needs four times as long in steps `FROM` to `UNTIL`; all times are noisy by 2 %."""

    def __init__(self):
        self.step = 0

    def after_step(self, step_s: float) -> tuple[np.ndarray, float]:
        """See `autoshard.train.device_times.Times`."""
        self.step += 1
        times = np.exp(0.02 * np.random.default_rng(self.step).standard_normal(RANKS))
        times[SLOW] *= 4.0 if FROM <= self.step <= UNTIL else 1.0
        return times, 0.1 * float(max(times))
