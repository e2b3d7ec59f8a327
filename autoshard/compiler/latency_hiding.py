"""What hides in the schedules that XLA:GPU's latency-hiding scheduler makes of a program: a reduced model of it.

That scheduler builds a program from its end (xla/service/latency_hiding_scheduler.cc). The end of a collective comes
right before what waits for it, if fewer than the limit are in flight by then; else before the begin of another.
Kernels are put before that until the time is over that the profile gives the collective, or until one comes that makes
what it sends: then it begins. So it is not the collective that is needed first that goes first, as in the best schedule
(`cost/exposure.py`), and none is interrupted: what kernels wait for at once stands in line behind long collectives.

A program is scheduled in several ways (`candidates.py`), and the fastest counts. In the plan's orders kernels come as
in the program. Where there is memory to spare, what was gathered for the forward pass serves the backward pass as well,
and without the plan's orders kernels that are needed late come where a collective would have nothing to hide behind.
"""

import bisect
import dataclasses
import enum
import functools
import heapq
import math
from collections.abc import Iterator, Sequence, Set

from autoshard.compiler.candidates import Candidate
from autoshard.cost.exposure import Exposure, Hideable, Piece, Wait

_OVER_S = 1e-12
"""A latency of which no more is left is over; sums of times are rounded."""


_ORDERED = (Candidate.PLAN_COSTS, Candidate.PLAN_COSTS_AT_ONCE)
_WITH_ROOM = (
    Candidate.GATHERED_FREELY,
    Candidate.GATHERED_AT_ONCE,
    Candidate.UNORDERED,
    Candidate.UNORDERED_AT_ONCE,
)
"""The ways that are told apart here."""

_LOOKED_AT = 16
"""How many kernels that are needed late are looked at, to put one where a collective has nothing to hide behind."""


class _Kind(enum.Enum):
    KERNEL = enum.auto()
    BEGIN = enum.auto()
    END = enum.auto()


_Step = tuple[_Kind, int]
"""A step of a schedule, and the number of its kernel or collective."""


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """What is scheduled.

    Attributes:
      kernels_s: The time of each kernel, in the order of the program, waiting apart.
      needed_by: For each kernel, the first that reads what it makes; the number of kernels if none does.
      collectives: What is sent; one whose `start` is its `stop` is waited for as soon as it is known.
      again: The collectives that gather what was gathered before.
    """

    kernels_s: Sequence[float]
    needed_by: Sequence[int]
    collectives: Sequence[Hideable]
    again: Set[int]


def latency_hidden(program: Program, has_room: bool) -> Exposure:
    """What kernels wait for collectives in the fastest of XLA:GPU's schedules.

    `has_room`: Whether there is memory for what would be gathered again.
    """
    numbers = [k for k, time_s in enumerate(program.kernels_s) if time_s]  # beside others nothing hides
    at = functools.partial(bisect.bisect_left, numbers)
    timed = Program(
        tuple([program.kernels_s[k] for k in numbers]),
        tuple([at(program.needed_by[k]) for k in numbers]),
        [dataclasses.replace(c, start=at(c.start), stop=at(c.stop)) for c in program.collectives],
        program.again,
    )
    ways = (*_ORDERED, *(_WITH_ROOM if has_room else ()))
    replays = [_replayed(timed, _Schedule(timed, way).steps()) for way in ways]
    found = min(replays, key=lambda replay: math.fsum(w.time_s for w in replay.waits))
    exposed_s = [0.0] * len(program.collectives)
    for collective, _, time_s in found.waits:
        exposed_s[collective] += time_s
    numbers.append(len(program.kernels_s))
    pieces = [p._replace(kernel=numbers[p.kernel]) for p in _pieces(timed.kernels_s, found)]
    return Exposure.of(exposed_s, pieces, [w._replace(kernel=numbers[w.kernel]) for w in found.waits])


class _Schedule:
    """A schedule in the making, from its end."""

    def __init__(self, program: Program, way: Candidate) -> None:
        self._program, self._limit, self._queueing = program, 2 if way.is_two_at_once else 1, way.queueing
        again = program.again if way.keeps_gathers else frozenset()
        self._sent = [c for c in range(len(program.collectives)) if c not in again]
        self._steps: list[_Step] = []  # from the last one on
        self._awaited: list[tuple[int, int]] = []  # a heap of (-start, collective): what is known last ends last
        self._in_flight_s: dict[int, float] = {}  # what is left of the latency of each
        self._placed = [False] * len(program.kernels_s)
        self._late: list[int] = []  # the kernels that may come later than in the program
        self._sends: dict[int, list[int]] = {}  # for each kernel, what sends its result and has not begun
        if way.ordered_as is Candidate.UNORDERED:
            self._late = [k for k, needed in enumerate(program.needed_by) if needed > k + 1]
            for c in self._sent:
                self._sends.setdefault(program.collectives[c].start - 1, []).append(c)

    def steps(self) -> list[_Step]:
        """The schedule, in program order."""
        collectives = self._program.collectives
        by_stop = sorted(self._sent, key=lambda c: -collectives[c].stop)
        following = 0
        for k in range(len(self._program.kernels_s), -1, -1):
            while following < len(by_stop) and collectives[by_stop[following]].stop >= k:
                number = by_stop[following]
                heapq.heappush(self._awaited, (-collectives[number].start, number))
                following += 1
            while self._moves_on(k):
                pass
            if k and not self._placed[k - 1]:
                self._place(k - 1)
        return self._steps[::-1]

    def _moves_on(self, k: int) -> bool:
        """Ends and begins what is due before kernel `k` of the program; whether anything was."""
        collectives = self._program.collectives
        while self._awaited and len(self._in_flight_s) < self._limit:
            number = heapq.heappop(self._awaited)[1]
            self._steps.append((_Kind.END, number))
            self._in_flight_s[number] = self._queueing * collectives[number].time_s
        over = [c for c, left_s in self._in_flight_s.items() if left_s <= _OVER_S]
        if not over:
            cut = [c for c in self._in_flight_s if collectives[c].start >= k]
            if not cut and self._awaited and -self._awaited[0][0] >= k:  # it can wait no longer for one in flight
                cut = [min(self._in_flight_s, key=self._in_flight_s.__getitem__)]
            later = self._later(k) if cut else None
            if later is not None:
                self._place(later)
                return True
            over = cut
        for number in over:
            self._begin(number)
        return bool(over)

    def _later(self, k: int) -> int | None:
        """The last kernel before `k - 1` that may come before kernel `k` as well; None if there is none."""
        while self._late and (self._late[-1] >= k - 1 or self._placed[self._late[-1]]):
            self._late.pop()
        for kernel in self._late[: -_LOOKED_AT - 1 : -1]:
            is_needed = self._program.needed_by[kernel] < k or self._sends.get(kernel)
            if not self._placed[kernel] and not is_needed:
                return kernel
        return None

    def _place(self, kernel: int) -> None:
        """Puts a kernel before all that is there."""
        self._steps.append((_Kind.KERNEL, kernel))
        self._placed[kernel] = True
        for number in self._in_flight_s:
            self._in_flight_s[number] -= self._program.kernels_s[kernel]

    def _begin(self, collective: int) -> None:
        self._steps.append((_Kind.BEGIN, collective))
        del self._in_flight_s[collective]
        if self._late:
            self._sends[self._program.collectives[collective].start - 1].remove(collective)


@dataclasses.dataclass(frozen=True, slots=True)
class _Replay:
    """A schedule in time.

    Attributes:
      runs: When kernels begin, in order: (begin, kernel).
      sent: What is on the link, in order: (begin, end, collective).
      waits: What kernels wait for.
    """

    runs: Sequence[tuple[float, int]]
    sent: Sequence[tuple[float, float, int]]
    waits: Sequence[Wait]


def _replayed(program: Program, steps: Sequence[_Step]) -> _Replay:
    """A link takes collectives in the order in which they begin, one at a time, and kernels wait for their ends."""
    now_s = free_s = 0.0
    ends_s: dict[int, float] = {}
    runs: list[tuple[float, int]] = []
    sent: list[tuple[float, float, int]] = []
    waits: list[Wait] = []
    awaited = len(program.kernels_s)  # the kernel behind an end
    behind = [0] * len(steps)
    for at in reversed(range(len(steps))):
        if steps[at][0] is _Kind.KERNEL:
            awaited = steps[at][1]
        behind[at] = awaited
    for kernel, (kind, number) in zip(behind, steps, strict=True):
        match kind:
            case _Kind.KERNEL:
                runs.append((now_s, number))
                now_s += program.kernels_s[number]
            case _Kind.BEGIN:
                begin_s = max(now_s, free_s)
                free_s = ends_s[number] = begin_s + program.collectives[number].time_s
                sent.append((begin_s, free_s, number))
            case _Kind.END if ends_s[number] > now_s:
                for begin_s, end_s, other in _between(sent, now_s, ends_s[number]):
                    waits.append(Wait(other, kernel, end_s - begin_s))
                now_s = ends_s[number]
    return _Replay(runs, sent, waits)


def _between(sent: Sequence[tuple[float, float, int]], start_s: float, stop_s: float) -> list[tuple[float, float, int]]:
    """What is on the link between two times."""
    found = []
    for begin_s, end_s, number in reversed(sent):
        if end_s <= start_s:
            break
        if begin_s < stop_s:
            found.append((max(begin_s, start_s), min(end_s, stop_s), number))
    return found[::-1]


def _pieces(kernels_s: Sequence[float], replay: _Replay) -> Iterator[Piece]:
    """What is on the link beside kernels, in order of time."""
    runs, first = replay.runs, 0
    for begin_s, end_s, number in replay.sent:
        while first < len(runs) and runs[first][0] + kernels_s[runs[first][1]] <= begin_s:
            first += 1
        for k in range(first, len(runs)):
            run_s, kernel = runs[k]
            if run_s >= end_s:
                break
            own_s = kernels_s[kernel]
            if begin_s < run_s + own_s:
                yield Piece(number, kernel, max(begin_s - run_s, 0.0) / own_s, min((end_s - run_s) / own_s, 1.0))
