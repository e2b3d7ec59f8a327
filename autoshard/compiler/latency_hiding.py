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

import dataclasses
import enum
import heapq
from collections.abc import Iterator, Sequence, Set

from autoshard.compiler.candidates import Candidate
from autoshard.cost.exposure import Exposure, Hideable, Piece, Wait

_OVER_S = 1e-12
"""A latency of which no more is left is over; sums of times are rounded."""


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
    found = []
    for way in (*_ORDERED, *(_WITH_ROOM if has_room else ())):
        steps = _Schedule(program, way).steps()
        found.append(_replayed(program, steps))
    return min(found, key=lambda exposure: exposure.total_s)


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
            self._late = [k for k, s in enumerate(program.kernels_s) if s and program.needed_by[k] > k + 1]
            for c in self._sent:
                self._sends.setdefault(self._made_by(c), []).append(c)

    def _made_by(self, collective: int) -> int:
        """The last kernel before a collective is known; -1 if there is none."""
        kernel = self._program.collectives[collective].start - 1
        while kernel >= 0 and not self._program.kernels_s[kernel]:
            kernel -= 1
        return kernel

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
            self._sends[self._made_by(collective)].remove(collective)


def _replayed(program: Program, steps: Sequence[_Step]) -> Exposure:
    """What is sent beside which kernels, if a link takes collectives in the order in which they begin, one at a time,
    and kernels wait for their ends."""
    kernels_s, collectives = program.kernels_s, program.collectives
    now_s = free_s = 0.0
    sent: list[tuple[float, float, int]] = []  # when collectives begin and end on the link
    exposed_s, waits = [0.0] * len(collectives), []
    ends_s: dict[int, float] = {}
    runs: list[tuple[float, int]] = []  # when kernels begin
    for at, (kind, number) in enumerate(steps):
        match kind:
            case _Kind.KERNEL:
                runs.append((now_s, number))
                now_s += kernels_s[number]
            case _Kind.BEGIN:
                begins_s = max(now_s, free_s)
                free_s = ends_s[number] = begins_s + collectives[number].time_s
                sent.append((begins_s, free_s, number))
            case _Kind.END if ends_s[number] > now_s:
                kernel = next((n for what, n in steps[at:] if what is _Kind.KERNEL), len(kernels_s))
                for begin_s, end_s, other in _between(sent, now_s, ends_s[number]):
                    exposed_s[other] += end_s - begin_s
                    waits.append(Wait(other, kernel, end_s - begin_s))
                now_s = ends_s[number]
    return Exposure.of(exposed_s, list(_pieces(kernels_s, runs, sent)), waits)


def _between(sent: Sequence[tuple[float, float, int]], start_s: float, stop_s: float) -> list[tuple[float, float, int]]:
    """What is on the link between two times."""
    found = []
    for begin_s, end_s, number in reversed(sent):
        if end_s <= start_s:
            break
        if begin_s < stop_s:
            found.append((max(begin_s, start_s), min(end_s, stop_s), number))
    return found[::-1]


def _pieces(
    kernels_s: Sequence[float], runs: Sequence[tuple[float, int]], sent: Sequence[tuple[float, float, int]]
) -> Iterator[Piece]:
    """What is on the link beside kernels, in order of time."""
    first = 0
    for begin_s, end_s, number in sent:
        while first < len(runs) and runs[first][0] + kernels_s[runs[first][1]] <= begin_s:
            first += 1
        for run_s, kernel in runs[first:]:
            own_s = kernels_s[kernel]
            if run_s >= end_s:
                break
            if own_s and begin_s < run_s + own_s:
                shares = max(begin_s - run_s, 0.0) / own_s, min((end_s - run_s) / own_s, 1.0)
                yield Piece(number, kernel, *shares)
