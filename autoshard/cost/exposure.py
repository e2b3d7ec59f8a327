"""What kernels wait for collectives that could run beside them: a schedule on two streams.

Kernels run one after another. A collective is known from some kernel on and needed by another; in between it may run
beside kernels, one collective at a time, and takes up to a share `rho` of their time. Of those that are known, the one
that is needed first goes first; what is left of it when it is needed, the kernels wait for. No order lets them wait
less (Jackson, Scheduling a production line to minimize maximum tardiness, 1955, for single machines; earliest due date
with release times and preemption), and what they wait is

    max over disjoint stretches I of kernels of   sum_I (time of the collectives that lie within I - rho kernels_I),

where a collective lies within I if it is neither known before I nor needed after it. Each choice of stretches bounds
the waiting of every other plan from below, linearly in the plan's times: `planner/overlap.py` prices plans so.

The loop is `solver/primal/schedule_run.py`.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autoshard.solver.primal.schedule_run import run_beside

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


@dataclasses.dataclass(frozen=True)
class Exposure:
    """What kernels wait.

    Attributes:
      exposed_s: For each collective, the part of its time that kernels wait for.
      stretches: Where more is to be sent than hides: the stretches of the formula, ascending.
      beside: int64 [pieces, 2]; the collective and the kernel of each piece, in order of time.
      shares: float64 [pieces, 2]; its begin and end, as shares of the kernel's time.
      waits: What kernels wait for.
    """

    exposed_s: tuple[float, ...]
    stretches: tuple[Stretch, ...]
    beside: np.ndarray = dataclasses.field(repr=False, compare=False)
    shares: np.ndarray = dataclasses.field(repr=False, compare=False)
    waits: tuple[Wait, ...] = dataclasses.field(default=(), repr=False)

    @classmethod
    def of(cls, exposed_s: Sequence[float], pieces: Sequence[Piece], waits: Sequence[Wait]) -> "Exposure":
        """What kernels wait in a schedule that is given piece by piece; no stretches are told."""
        beside = np.array([(p.collective, p.kernel) for p in pieces], np.int64).reshape(-1, 2)
        shares = np.array([(p.start_share, p.stop_share) for p in pieces], np.float64).reshape(-1, 2)
        return cls(tuple(exposed_s), (), beside, shares, tuple(waits))

    @property
    def total_s(self) -> float:
        """The exposed time of all collectives."""
        return math.fsum(self.exposed_s)

    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What runs beside kernels, in order of time."""
        return tuple(Piece(*own, *when) for own, when in zip(self.beside.tolist(), self.shares.tolist(), strict=True))


def exposure(kernels_s: Sequence[float], collectives: Sequence[Hideable], share: float) -> Exposure:
    """Runs `collectives` beside kernels.

    Args:
      kernels_s: The time of each kernel, in the order in which they run, waiting apart.
      collectives: What can run beside them; `stop` is at most the number of kernels.
      share: The share of a kernel's time that collectives beside it make use of (`rho`), 0 to 1.
    """
    starts, stops = (np.array([getattr(c, end) for c in collectives], np.int64) for end in ("start", "stop"))
    times_s = np.array([c.time_s for c in collectives], np.float64)
    return exposure_of(np.array(kernels_s, np.float64), starts, stops, times_s, share)


def exposure_of(
    kernels_s: np.ndarray, starts: np.ndarray, stops: np.ndarray, times_s: np.ndarray, share: float
) -> Exposure:
    """`exposure` of collectives in columns: `starts` and `stops` int64, `kernels_s` and `times_s` float64."""
    if not len(starts):
        return Exposure((), (), np.empty((0, 2), np.int64), np.empty((0, 2)))
    count, order = len(kernels_s), np.argsort(stops, kind="stable")
    needed, starts, stops, exposed_s = stops, starts[order], stops[order], np.zeros(len(order))
    stretches, beside = np.empty((count + 1, 2), np.int64), np.empty((count + len(order), 2), np.int64)
    shares, sent_until, by_start = np.empty(beside.shape), np.empty(count, np.int64), np.argsort(starts, kind="stable")
    num_stretches, num_pieces = run_beside(
        kernels_s, starts, stops, times_s[order], by_start, share, exposed_s, sent_until, stretches, beside, shares
    )
    own_s = np.empty(len(order))
    own_s[order] = exposed_s
    beside = beside[:num_pieces]
    beside[:, 0] = order[beside[:, 0]]
    found = tuple(map(tuple, stretches[:num_stretches].tolist()))
    waits = [Wait(c, int(needed[c]), float(own_s[c])) for c in np.flatnonzero(own_s).tolist()]
    return Exposure(tuple(own_s.tolist()), found, beside, shares[:num_pieces], tuple(waits))
