"""In which order collectives queue for a link beside a given order of kernels, so that these wait little.

A link runs its collectives one after another, whole, in the order in which they were put on it, which happens between
kernels: what is put on it before a long kernel is ahead of what that kernel makes. Unlike those of `exposure.py`,
collectives are not interrupted, so that this is a schedule that a device can follow, but not always the best one: to
find that is strongly NP-hard (Lenstra, Rinnooy Kan, Brucker, Complexity of machine scheduling problems, 1977, for one
machine with release times and due dates). There are two ways:

- Busy: before each kernel, as many are put on the link as keep it busy beside that kernel; of those that are known, the
  one that is needed first (list scheduling by earliest due date). A busy link is in the way of what kernels need at
  once, as the exchanges of attention: these stand in line behind a long gather, although the kernels behind them would
  have hidden it.
- Reserved: those that fit but few places are given theirs first, the shortest window beside its time before others, and
  each the last free time in its window that has room for it whole, between those that are needed at once: a link that
  stands idle on purpose (inserted idle time; Kanet, Sridharan, Scheduling with inserted idle time, 2000). By it kernels
  of GPT-3 with 24 layers on data=128, tensor=8 wait 0.13 s a step, by the other 0.49 (a script that is not kept).
"""

import bisect
import dataclasses
import enum
import heapq
import itertools
import math
from collections.abc import Sequence

_LEFT_IDLE = 0.25
"""Which share of a kernel's time the link may be idle beside it: one collective more would be ahead of all that the
kernel makes. By such schedules kernels of a GPT on 64 H100 wait 6.6 ms with a quarter, 6.9 with nothing, 8.1 with a
half (a script that is not kept)."""


_LEAST_S = 1e-12
"""Times that are shorter are none."""


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


class Queueing(enum.Enum):
    """How a link is scheduled."""

    BUSY = enum.auto()
    RESERVED = enum.auto()


def link_queue(
    kernels_s: Sequence[float], collectives: Sequence[Queued], queueing: Queueing = Queueing.BUSY
) -> LinkQueue:
    """Schedules a link.

    Args:
      kernels_s: The time of each kernel, in the order in which they run, waiting apart.
      collectives: What is to be sent, those first whose results others send.
      queueing: How.
    """
    if queueing is Queueing.BUSY:
        return _Link(kernels_s, collectives).scheduled()
    return _reserved(kernels_s, collectives)


def _reserved(kernels_s: Sequence[float], collectives: Sequence[Queued]) -> LinkQueue:
    """The schedule that gives each collective a time of its own, in time without waiting."""
    before_s = [0.0, *itertools.accumulate(kernels_s)]
    known_s = [before_s[c.start] for c in collectives]
    due_s = [before_s[c.stop] for c in collectives]
    left = [0] * len(collectives)  # of what sends the result of each, what has no time yet
    for number, c in enumerate(collectives):
        for earlier in c.after:
            known_s[number] = max(known_s[number], known_s[earlier] + collectives[earlier].time_s)
            left[earlier] += 1
    free, begins_s = _FreeTimes(before_s[-1]), list(due_s)
    for c, due in zip(collectives, due_s, strict=True):
        if c.start >= c.stop:
            free.cut(due)
    shortest = lambda n: ((due_s[n] - known_s[n]) / max(collectives[n].time_s, _LEAST_S), n)
    ready = [shortest(n) for n in range(len(collectives)) if not left[n]]
    heapq.heapify(ready)
    while ready:
        number = heapq.heappop(ready)[1]
        if due_s[number] > known_s[number]:
            begins_s[number] = free.taken(known_s[number], due_s[number], collectives[number].time_s)
        else:
            begins_s[number] = due_s[number]
        for earlier in collectives[number].after:
            due_s[earlier] = min(due_s[earlier], begins_s[number])
            left[earlier] -= 1
            if not left[earlier]:
                heapq.heappush(ready, shortest(earlier))
    begins: list[int] = []
    for c, begin_s in zip(collectives, begins_s, strict=True):
        kernel = bisect.bisect_right(before_s, begin_s + _LEAST_S) - 1
        begins.append(max([min(max(kernel, c.start), c.stop), *(begins[earlier] for earlier in c.after)]))
    order = sorted(range(len(collectives)), key=lambda n: (begins[n], begins_s[n], n))
    return LinkQueue(tuple(begins), _waited_s(kernels_s, collectives, begins, order))


class _FreeTimes:
    """When a link is free, in time without waiting: stretches from `_starts_s` to `_ends_s`, in order."""

    def __init__(self, until_s: float) -> None:
        self._starts_s, self._ends_s = [0.0], [until_s]

    def cut(self, at_s: float) -> None:
        """Lets nothing run across a moment."""
        n = bisect.bisect_right(self._starts_s, at_s) - 1
        if n >= 0 and self._starts_s[n] < at_s < self._ends_s[n]:
            self._starts_s.insert(n + 1, at_s)
            self._ends_s.insert(n, at_s)

    def taken(self, known_s: float, due_s: float, time_s: float) -> float:
        """Takes the last stretch between two moments that is so long, or else the longest, and tells its begin."""
        longest, length_s = None, 0.0
        n = bisect.bisect_left(self._starts_s, due_s) - 1
        while n >= 0 and self._ends_s[n] > known_s:
            own_s = min(self._ends_s[n], due_s) - max(self._starts_s[n], known_s)
            if own_s > length_s + _LEAST_S:
                longest, length_s = n, own_s
            if own_s >= time_s:
                break
            n -= 1
        if longest is None:
            return known_s
        end_s = min(self._ends_s[longest], due_s)
        begin_s = end_s - min(time_s, length_s)
        kept = [(self._starts_s[longest], begin_s), (end_s, self._ends_s[longest])]
        kept = [(start_s, stop_s) for start_s, stop_s in kept if stop_s - start_s > _LEAST_S]
        self._starts_s[longest : longest + 1] = [start_s for start_s, _ in kept]
        self._ends_s[longest : longest + 1] = [stop_s for _, stop_s in kept]
        return begin_s


def _waited_s(
    kernels_s: Sequence[float], collectives: Sequence[Queued], begins: Sequence[int], order: Sequence[int]
) -> float:
    """What kernels wait if collectives are put on the link in an order, ascending by their begins. What sends the
    result of another begins when that is there, and kernels wait until then."""
    stops: list[list[int]] = [[] for _ in range(len(kernels_s) + 1)]
    for number, c in enumerate(collectives):
        stops[max(c.stop, begins[number])].append(number)
    now_s = free_s = waited_s = 0.0
    ends_s: dict[int, float] = {}
    following = 0
    for kernel in range(len(kernels_s) + 1):
        while following < len(order) and begins[order[following]] == kernel:
            number = order[following]
            wait_s = max((ends_s[earlier] - now_s for earlier in collectives[number].after), default=0.0)
            now_s, waited_s = now_s + max(wait_s, 0.0), waited_s + max(wait_s, 0.0)
            free_s = ends_s[number] = max(now_s, free_s) + collectives[number].time_s
            following += 1
        wait_s = max((ends_s[number] - now_s for number in stops[kernel]), default=0.0)
        now_s, waited_s = now_s + max(wait_s, 0.0), waited_s + max(wait_s, 0.0)
        now_s += kernels_s[kernel] if kernel < len(kernels_s) else 0.0
    return waited_s


class _Link:
    """A link that is kept busy, and the kernels beside it, as far as they are scheduled."""

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
