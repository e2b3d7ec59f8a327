r"""Tells a slow device from a noisy one, by the times of the same work on each.

The time of a device is divided by that of a usual one among the others, so that what slows all devices cancels; be
$x_t$ the logarithm of this ratio. A slowdown of s adds $\mu = \log s$ to it. Of the two hypotheses, 0 and μ, the
log-likelihood ratio of one step under noise of deviation σ is $(x_t - \mu / 2)\, \mu / \sigma^2$, and its sum, never
below 0, tells the earliest with a given rate of false alarms (Page 1954, "Continuous inspection schemes"). Two things
make it robust: σ comes from the median of differences of successive steps, which neither spikes nor slowdowns move; and
no step counts for more than a quarter of what names a device, or for more than half of it against that, so that a
spike names none and hides none, and four clear steps name it.

Several μ are tested side by side, from the threshold on. The end of a slowdown is told the same way, by the sum for 0
against the least μ.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

THRESHOLD = 1.3
"""The slowdown that is to be named."""
WINDOW = 5
"""Steps after which it is named, and over which it is estimated."""
CERTAINTY = 14.0
"""What names a device, in nats: by chance once in e^14 / devices steps or less often, were the noise known and normal
(Lorden 1971). What is not so, such as an estimate of the noise from some steps, makes it happen more often;
benchmarks/stragglers_detection.py tells how often."""
_OF_MEDIANS = 0.536
"""Deviation of the median of five normal numbers of deviation 1 (Teichroew 1956)."""
_SHIFTS = (math.log(2), math.log(4))
"""Larger slowdowns than the threshold that are tested, too: under much noise they are told sooner."""
_LEAST_SIGMA, _FIRST_SIGMA = 0.02, 0.08
_REMEMBERED = 100
"""Steps from which the noise is estimated."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Detector:
    """What is known after the steps so far.

    Attributes:
      threshold: The slowdown that is to be named.
      certainty: What names a device, or the end of its slowdown, in nats.
      ratios: Logarithms of the last ratios, a row for each step.
      sums: For each device, how much speaks for each slowdown that is tested, or for its end where it is named.
      named: Which devices are slow.
    """

    threshold: float = THRESHOLD
    certainty: float = CERTAINTY
    ratios: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0)))
    sums: tuple[tuple[float, ...], ...] = ()
    named: tuple[bool, ...] = ()

    def then(self, times_s: Sequence[float] | np.ndarray) -> "Detector":
        """What is known after one more step.

        Args:
          times_s: Seconds of the same work on each device; or any measure of them.
        """
        row = ratios(times_s)
        recent = np.concatenate([self.ratios.reshape(-1, len(row))[1 - _REMEMBERED :], row[None]])
        sums, named = list(self.sums or ((),) * len(row)), list(self.named or (False,) * len(row))
        least, sigma, most = math.log(self.threshold), noise(recent), self.certainty / (WINDOW - 1)
        shifts = [least, *(s for s in _SHIFTS if s > least)]
        for d, x in enumerate(row.tolist()):
            if len(sums[d]) != (1 if named[d] else len(shifts)):
                sums[d] = (0.0,) * (1 if named[d] else len(shifts))
            gains = (
                [(x - s / 2) * s / sigma**2 for s in shifts] if not named[d] else [(least / 2 - x) * least / sigma**2]
            )
            sums[d] = tuple(
                max(0.0, old + min(max(gain, -2 * most), most)) for old, gain in zip(sums[d], gains, strict=True)
            )
            if max(sums[d]) >= self.certainty * (1 - 1e-9):
                sums[d], named[d] = (), not named[d]
        return dataclasses.replace(self, ratios=recent, sums=tuple(sums), named=tuple(named))

    @property
    def slowness(self) -> tuple[float, ...]:
        """How many times slower than usual each device is; 1 for those that are not named."""
        typical = np.median(self.ratios[-WINDOW:], axis=0) if self.named else ()
        named = zip(typical, self.named, strict=True)
        return tuple(max(1.0, math.exp(x)) if is_slow else 1.0 for x, is_slow in named)


def ratios(times_s: Sequence[float] | np.ndarray) -> np.ndarray:
    """For each device, the logarithm of its time over the median of the others.

    The median of the others is that of a usual device for each slow one, as long as at most half of all are slow; a
    usual one may then seem to be fast, which names nothing.
    """
    logs = np.log(np.maximum(np.asarray(times_s, float), 1e-12))
    if len(logs) < 2:
        return np.zeros(len(logs))
    others = np.broadcast_to(logs, (len(logs), len(logs)))[~np.eye(len(logs), dtype=bool)]
    return logs - np.median(others.reshape(len(logs), -1), axis=1)


def noise(rows: np.ndarray) -> float:
    """The deviation of one ratio, as it counts in sums.

    From the differences of successive ratios, and from those of successive medians of `WINDOW` ratios, in which noise
    that stays for some steps shows, too.
    """
    if len(rows) < 3:
        return _FIRST_SIGMA
    found = _deviation(rows)
    if len(rows) >= 4 * WINDOW:
        blocks = np.median(rows[len(rows) % WINDOW :].reshape(-1, WINDOW, rows.shape[1]), axis=1)
        found = max(found, _deviation(blocks) / _OF_MEDIANS)
    before = _FIRST_SIGMA * max(0.0, 1 - len(rows) / (2 * WINDOW))  # what a few steps tell is not sure yet
    return max(_LEAST_SIGMA, found, before)


def _deviation(table: np.ndarray) -> float:
    """The deviation of independent entries of a column, from the median of what they differ by from one another."""
    return 1.4826 * float(np.median(np.abs(np.diff(table, axis=0)))) / math.sqrt(2)
