"""Tells a slow device from a noisy one, by the times of the same work on each.

Each row of times is divided by its lower median, so that what slows all devices cancels. A device is slow if the median
of its last ratios reaches the threshold, and nearly all of them stand out: a spike of one step moves no median, and
noise that doubles single steps seldom does so four times of five.
"""

from collections.abc import Sequence

import numpy as np

WINDOW = 5
"""Steps that are looked at."""
THRESHOLD = 1.3
"""The slowdown that is named."""
_STANDS_OUT, _LEAST = 1.15, 4


def slowness(times_s: Sequence[Sequence[float]], threshold: float = THRESHOLD) -> tuple[float, ...]:
    """How many times slower than usual each device is; 1 for those that are not slow.

    Args:
      times_s: For each of the last steps, seconds of the same work on each device. Fewer than `WINDOW` tell nothing;
        of more, the last ones are looked at.
      threshold: The slowdown from which on a device is slow.
    """
    times = np.asarray(times_s, float)
    if len(times) < WINDOW:
        return (1.0,) * (times.shape[1] if times.ndim == 2 else 0)
    recent = times[-WINDOW:]
    usual = np.sort(recent, axis=1)[:, (recent.shape[1] - 1) // 2]
    ratios = recent / np.maximum(usual, 1e-12)[:, None]
    typical = np.median(ratios, axis=0)
    is_slow = (typical >= threshold) & ((ratios >= _STANDS_OUT).sum(axis=0) >= _LEAST)
    return tuple(float(t) if slow else 1.0 for t, slow in zip(typical, is_slow, strict=True))
