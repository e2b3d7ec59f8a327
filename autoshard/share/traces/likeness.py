"""Jobs in the likeness of public traces, for where these are not at hand. None of them was run by anybody.

What is like the traces, with its source; everything else is drawn independently:

- Philly-like: the categories of Pollux (Qiao et al., OSDI 2021, section 5.1), which sorts the jobs of Microsoft's
  Philly trace by device time: 0 to 1 GPU hours 72 %, 1 to 10 20 %, 10 to 100 6 %, 100 to 1,000 2 %. Log-uniform within;
  the largest are cut at `most_device_hours`.
- Helios-like: log-normal durations with the median of 206 s and the mean of 6,652 s of the GPU jobs of SenseTime's
  clusters (Hu et al., SC 2021, section 2.3 and table 2), cut at its longest, 50 days.
- Both: arrivals at random (a Poisson process), and numbers of devices that are powers of two, more than half of them 1
  (Hu et al., SC 2021, figure 5: over half of all jobs have one GPU). The shares are assumptions.
"""

import math
import random

from autoshard.share.traces.record import TraceJob, from_first

_CATEGORIES = ((0.72, 0.02, 1.0), (0.20, 1.0, 10.0), (0.06, 10.0, 100.0), (0.02, 100.0, 1000.0))
"""Share, and device hours from and to; below 72 device seconds nothing is scheduled."""
_SIZES = (
    (1.0, (1,), (1.0,)),
    (10.0, (1, 2, 4), (0.5, 0.3, 0.2)),
    (100.0, (2, 4, 8), (0.3, 0.4, 0.3)),
    (math.inf, (8, 16), (0.6, 0.4)),
)
"""Up to so many device hours: numbers of devices with their shares (assumptions)."""
_HELIOS_MEDIAN_S, _HELIOS_MEAN_S, _HELIOS_LONGEST_S = 206.0, 6652.0, 50 * 86400.0
_HELIOS_SIZES = ((1, 2, 4, 8, 16), (0.55, 0.12, 0.13, 0.17, 0.03))


def philly_like(num_jobs: int, span_s: float, seed: int, most_device_hours: float = 1000.0) -> tuple[TraceJob, ...]:
    """Jobs in the likeness of Philly's, as Pollux sorts them.

    Args:
        num_jobs: how many.
        span_s: time in which they come.
        seed: of all that is drawn.
        most_device_hours: of the largest job.
    """
    draw, jobs = random.Random(seed), []
    for number in range(num_jobs):
        _, low, high = draw.choices(_CATEGORIES, [share for share, _, _ in _CATEGORIES])[0]
        hours = min(math.exp(draw.uniform(math.log(low), math.log(high))), most_device_hours)
        _, sizes, shares = next(one for one in _SIZES if hours <= one[0])
        devices = draw.choices(sizes, shares)[0]
        jobs.append(TraceJob(f"job{number:04}", draw.uniform(0, span_s), devices, hours * 3600 / devices))
    return from_first(jobs)


def helios_like(num_jobs: int, span_s: float, seed: int) -> tuple[TraceJob, ...]:
    """Jobs in the likeness of Helios'; arguments as for `philly_like`."""
    draw, jobs = random.Random(seed), []
    sigma = math.sqrt(2 * math.log(_HELIOS_MEAN_S / _HELIOS_MEDIAN_S))
    for number in range(num_jobs):
        duration_s = min(_HELIOS_MEDIAN_S * math.exp(draw.gauss(0, sigma)), _HELIOS_LONGEST_S)
        devices = draw.choices(*_HELIOS_SIZES)[0]
        jobs.append(TraceJob(f"job{number:04}", draw.uniform(0, span_s), devices, duration_s))
    return from_first(jobs)
