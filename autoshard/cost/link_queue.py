"""In which order collectives queue for a link beside a given order of kernels, so that these wait little.

A link runs its collectives one after another, whole, in the order in which they were put on it, which happens between
kernels: what is put on it before a long kernel is ahead of what that kernel makes. Before each kernel, as many are put
on the link as keep it busy beside that kernel; of those that are known, the one that is needed first (list scheduling
by earliest due date). Unlike those of `exposure.py`, collectives are not interrupted, so that this is a schedule that a
device can follow, but not always the best one: to find that is strongly NP-hard (Lenstra, Rinnooy Kan, Brucker,
Complexity of machine scheduling problems, 1977, for one machine with release times and due dates).
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Sequence

_LEFT_IDLE = 0.25
"""Which share of a kernel's time the link may be idle beside it: one collective more would be ahead of all that the
kernel makes. By such schedules kernels of a GPT on 64 H100 wait 6.6 ms with a quarter, 6.9 with nothing, 8.1 with a
half (a script that is not kept)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Queued:
    """A collective that is to be put on a link.

    Attributes:
      start: The first kernel before which it can be, as all that it sends is made. stop: The kernel that waits for it;
        the number of kernels for none.
      time_s: Its time on the link.
      after: The numbers of the collectives whose results it sends, all of them smaller than its own.
    """

    start: int
    stop: int
    time_s: float
    after: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class LinkQueue:
    """A schedule of a link.

    Attributes:
      begins: For each collective, the kernel before which it is put on the link.
      waited_s: What kernels wait in all, once the last collective is there, too.
    """

    begins: tuple[int, ...]
    waited_s: float


def link_queue(kernels_s: Sequence[float], collectives: Sequence[Queued]) -> LinkQueue:
    """Schedules a link.

    Args:
      kernels_s: The time of each kernel, in the order in which they run, waiting apart.
      collectives: What is to be sent, those first whose results others send.
    """
    return _Link(kernels_s, collectives).scheduled()


class _Link:
    """A link and the kernels beside it, as far as they are scheduled."""

    def __init__(self, kernels_s: Sequence[float], collectives: Sequence[Queued]):
        self._kernels_s, self._collectives = kernels_s, collectives
        self._now_s = self._free_s = self._waited_s = 0.0
        self._ends_s: dict[int, float] = {}
        self._begins = [0] * len(collectives)
        before_s = [0.0, *itertools.accumulate(kernels_s)]
        self._due_s = [before_s[c.stop] for c in collectives]
        for number in reversed(range(len(collectives))):  # what sends its result must be in time as well
            for earlier in collectives[number].after:
                in_time_s = self._due_s[number] - collectives[number].time_s
                self._due_s[earlier] = min(self._due_s[earlier], in_time_s)

    def scheduled(self) -> LinkQueue:
        """The schedule by which kernels wait little."""
        collectives = self._collectives
        by_start = sorted(range(len(collectives)), key=lambda c: collectives[c].start)
        by_stop = sorted(range(len(collectives)), key=lambda c: collectives[c].stop)
        known: list[tuple[float, int]] = []  # a heap of (due, collective)
        following = awaited = 0
        for k in range(len(self._kernels_s) + 1):
            while awaited < len(by_stop) and collectives[by_stop[awaited]].stop <= k:
                self._await(by_stop[awaited], k)
                awaited += 1
            if k == len(self._kernels_s):
                break
            while following < len(by_start) and collectives[by_start[following]].start <= k:
                heapq.heappush(known, (self._due_s[by_start[following]], by_start[following]))
                following += 1
            kernel_s = self._kernels_s[k]
            busy_until_s = self._now_s + (1 - _LEFT_IDLE) * kernel_s
            early: list[tuple[float, int]] = []  # known, but for the results of others
            while self._free_s < busy_until_s and known:
                first = heapq.heappop(known)
                if first[1] in self._ends_s:
                    continue
                if any(self._ends_s.get(c, math.inf) > self._now_s for c in collectives[first[1]].after):
                    early.append(first)
                else:
                    self._send(first[1], k)
            for one in early:
                heapq.heappush(known, one)
            self._now_s += kernel_s
        return LinkQueue(tuple(self._begins), self._waited_s)

    def _send(self, collective: int, kernel: int) -> None:
        """Puts a collective on the link before a kernel."""
        self._free_s = max(self._now_s, self._free_s) + self._collectives[collective].time_s
        self._ends_s[collective], self._begins[collective] = self._free_s, kernel

    def _await(self, collective: int, kernel: int) -> None:
        """Has a kernel wait for a collective, and for those whose results it sends."""
        if collective not in self._ends_s:
            for earlier in self._collectives[collective].after:
                self._await(earlier, kernel)
            self._send(collective, kernel)
        waits_s = max(self._ends_s[collective] - self._now_s, 0.0)
        self._waited_s += waits_s
        self._now_s += waits_s
