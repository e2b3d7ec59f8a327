"""What kernels wait for collectives that could run beside them: a schedule on two streams.

Kernels run one after another. A collective is known from some kernel on and needed by another; in between it may run
beside kernels, one collective at a time, and takes up to a share `rho` of their time. Of those that are known, the one
that is needed first goes first; what is left of it when it is needed, the kernels wait for. No order lets them wait
less (Jackson, Scheduling a production line to minimize maximum tardiness, 1955, for single machines; earliest due date
with release times and preemption), and what they wait is

    max over disjoint stretches I of kernels of   sum_I (time of the collectives that lie within I - rho kernels_I),

where a collective lies within I if it is neither known before I nor needed after it. Each choice of stretches bounds
the waiting of every other plan from below, linearly in the plan's times: `planner/overlap.py` prices plans so.
"""

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

Stretch = tuple[int, int]
"""The kernels `start <= k < stop`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hideable:
    """A collective that can run beside the kernels `start <= k < stop`; kernel `stop` waits for it.

    `time_s`: Of all its repetitions in a step.
    """

    start: int
    stop: int
    time_s: float


class Piece(NamedTuple):
    """A part of a collective that runs beside a kernel.

    Attributes:
      collective, kernel: Their numbers.
      start_share, stop_share: When, as shares of the kernel's time.
    """

    collective: int
    kernel: int
    start_share: float
    stop_share: float


class Wait(NamedTuple):
    """A part of a collective that a kernel waits for; `kernel`: the number of kernels for the end."""

    collective: int
    kernel: int
    time_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Exposure:
    """What kernels wait.

    Attributes:
      exposed_s: For each collective, the part of its time that kernels wait for.
      stretches: Where more is to be sent than hides: the stretches of the formula, ascending.
      pieces: What runs beside kernels, in order of time.
      waits: What does not.
    """

    exposed_s: tuple[float, ...]
    stretches: tuple[Stretch, ...]
    pieces: tuple[Piece, ...] = ()
    waits: tuple[Wait, ...] = ()

    @property
    def total_s(self) -> float:
        """The exposed time of all collectives."""
        return math.fsum(self.exposed_s)


def exposure(kernels_s: Sequence[float], collectives: Sequence[Hideable], share: float) -> Exposure:
    """Runs `collectives` beside kernels.

    Args:
      kernels_s: The time of each kernel, in the order in which they run, waiting apart.
      collectives: What can run beside them; `stop` is at most the number of kernels.
      share: The share of a kernel's time that collectives beside it make use of (`rho`), 0 to 1.
    """
    exposed_s = [0.0] * len(collectives)
    left_s = [c.time_s for c in collectives]
    by_start = sorted(range(len(collectives)), key=lambda c: collectives[c].start)
    sent_until: list[float] = []  # of each kernel, the latest `stop` of what runs beside it; +inf if the link is idle
    stretches: list[Stretch] = []
    pieces: list[Piece] = []
    waits_for: list[Wait] = []
    known: list[tuple[int, int]] = []  # a heap of (stop, collective)
    following = 0
    for k in range(len(kernels_s) + 1):
        while following < len(by_start) and collectives[by_start[following]].start <= k:
            c = by_start[following]
            heapq.heappush(known, (collectives[c].stop, c))
            following += 1
        waits = False
        while known and known[0][0] <= k:
            _, c = heapq.heappop(known)
            if left_s[c] > 0:
                waits = True
                waits_for.append(Wait(c, k, left_s[c]))
            exposed_s[c] = left_s[c]
        if waits:
            start = k
            while True:
                if stretches and stretches[-1][1] == start:  # what is sent in there is needed before k, too
                    start = stretches.pop()[0]
                elif start > 0 and sent_until[start - 1] <= k:
                    start -= 1
                else:
                    break
            stretches.append((start, k))
        if k == len(kernels_s):
            break
        whole_s = room_s = share * kernels_s[k]
        latest = 0.0
        while room_s > 0 and known:
            stop, c = known[0]
            sent_s = min(room_s, left_s[c])
            pieces.append(Piece(c, k, 1 - room_s / whole_s, 1 - (room_s - sent_s) / whole_s))
            room_s -= sent_s
            left_s[c] -= sent_s
            latest = stop
            if left_s[c] <= 0:
                heapq.heappop(known)
        sent_until.append(math.inf if room_s > 0 else latest)
    return Exposure(tuple(exposed_s), tuple(stretches), tuple(pieces), tuple(waits_for))
