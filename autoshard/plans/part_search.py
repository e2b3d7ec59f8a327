"""Local search over the parts of known plans, by the exact time of the step.

The programs of `master_program.py` know few of the stretches in which kernels can wait, so that what they round waits
elsewhere. Here the schedule itself (`cost/exposure.py`) is run for every move: one part follows another plan. A move
that makes the step longer is accepted the less likely, the longer and the later (simulated annealing; Kirkpatrick,
Gelatt and Vecchi, Optimization by simulated annealing, 1983). A schedule is cut short as soon as it tells that its move
is refused. What exceeds the memory at the instants that count is paid for.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from autoshard.planner.step_times import StepTimes
from autoshard.plans.known_plan import KnownPlan, Sparse
from autoshard.plans.master_program import composed, parts_and_slots
from autoshard.solver.primal.schedule_intervals import Intervals, intervals_of
from autoshard.solver.primal.schedule_search import anneal

_COLDEST = 1e-5
"""By which share of the step a move may make it longer, at last, to be accepted with probability 1 / e."""

PENALTY = 2.0
"""What exceeding the budget costs at first: the share of it, in steps."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cooling:
    """A search: how many moves are tried, and by which share of the step one may make it longer, at first, to be
    accepted with probability 1 / e."""

    moves: int
    hottest: float

    def of_moves(self, factor: int) -> "Cooling":
        """The same with `factor` times as many moves."""
        return dataclasses.replace(self, moves=factor * self.moves)


FROM_A_PLAN, FROM_A_ROUNDED, SHORT = Cooling(5_000, 2e-5), Cooling(50_000, 4e-4), Cooling(6_000, 4e-4)
"""From a plan whose parts were chosen together, which more heat only disturbs (GPT-3 with 96 layers: 6.717 s, and with
4e-4 6.747; four times as many moves gain less than 0.1 %); from one whose parts were rounded each by itself (the same
in Linen: 4.114 s with 2e-5, and with 2e-4 4.090); and to choose from which."""


@dataclasses.dataclass(frozen=True)
class PartOptions:
    """What the parts of some plans can do, and what that adds to the schedule and to memory.

    Attributes:
      plans: int64 [plans, decisions]; their choices. parts: The decisions of each part, which no two plans share.
      plan: int64 [options]; the plan that a part follows with each. part: int64 [options]; the part that it is of.
      option: int64 [plans, parts]; which option each plan takes.
      starts, stops: int64 [windows]; the ends between which each lies, ascending by stop. num_ends: How many ends.
      least_s: float64 [options + 1]; the time without what is waited for; at last of what all plans share.
      entry: int64 [options + 2]; where the entries of each begin. place, amount: int64 and float64 [entries]; what is
        added to the kernels after an end, or, behind these, to what is sent in a window.
      used: float64 [options + 1, instants]; in shares of the budget.
    """

    plans: np.ndarray
    parts: Sequence[np.ndarray]
    plan: np.ndarray
    part: np.ndarray
    option: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    num_ends: int
    least_s: np.ndarray
    entry: np.ndarray
    place: np.ndarray
    amount: np.ndarray
    used: np.ndarray

    @functools.cached_property
    def intervals(self) -> Intervals:
        """Of the schedule."""
        return intervals_of(self.starts, self.stops, self.num_ends)

    @functools.cached_property
    def reached(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the intervals that each option's entries reach begin, and these, ascending; int64 each."""
        count = len(self.intervals.come)
        keys = np.repeat(np.arange(len(self.least_s)), np.diff(self.entry)) * count
        keys = np.unique(keys + self.intervals.reached(self.place, self.starts, self.num_ends))
        return np.searchsorted(keys, np.arange(len(self.least_s) + 1) * count), keys % count

    def made(self, taken: np.ndarray) -> np.ndarray:
        """The plan whose parts take these options; int64 [decisions]."""
        return composed(self.plans, self.parts, self.plan[taken])


def part_options(
    times: StepTimes, columns: Sequence[KnownPlan], each: Sequence[Callable[[KnownPlan], Sparse]]
) -> PartOptions:
    """What the parts of some plans can do.

    Args:
      times: Of the problem. columns: The plans.
      each: What the owners of a plan use at an instant, in shares of the budget.
    """
    plans = np.stack([column.choices for column in columns])
    parts, slot = parts_and_slots(times.tabulated, plans)
    option = np.zeros((len(plans), len(parts)), np.int64)
    plan: list[int] = []
    part: list[int] = []
    for p, own in enumerate(parts):
        number: dict[bytes, int] = {}
        for k, row in enumerate(plans[:, own]):
            option[k, p] = number.setdefault(row.tobytes(), len(plan))
            if option[k, p] == len(plan):
                plan.append(k)
                part.append(p)
    followed, slots = np.array([*plan, 0], np.int64), np.array([*part, -1], np.int64) + 1
    schedule = times.schedule([column.times for column in columns])
    places = schedule.num_ends + len(schedule.starts)
    least_s, used = np.zeros(len(slots)), np.zeros((len(slots), len(each)))
    entries: list[tuple[np.ndarray, np.ndarray]] = [(slots[:0], least_s[:0])] * len(slots)
    for k, column in enumerate(columns):
        own = np.flatnonzero(followed == k)
        least_s[own] = _of_slots(slot, column.least_s, len(parts))[slots[own]]
        for i, row in enumerate(each):
            used[own, i] = _of_slots(slot, row(column), len(parts))[slots[own]]
        owner, place, amount = schedule.entries(column.times)
        keys, at = np.unique(slot[owner] * places + place, return_inverse=True)
        sums = np.bincount(at, amount, len(keys))
        ends = np.searchsorted(keys, np.arange(len(parts) + 2) * places)
        for o in own.tolist():
            within = slice(ends[slots[o]], ends[slots[o] + 1])
            entries[o] = keys[within] % places, sums[within]
    return PartOptions(
        plans=plans,
        parts=parts,
        plan=followed[:-1],
        part=slots[:-1] - 1,
        option=option,
        starts=schedule.starts,
        stops=schedule.stops,
        num_ends=schedule.num_ends,
        least_s=least_s,
        entry=np.cumsum([0, *(len(place) for place, _ in entries)]),
        place=np.concatenate([place for place, _ in entries]),
        amount=np.concatenate([amount for _, amount in entries]),
        used=used,
    )


def _of_slots(slot: np.ndarray, amounts: Sparse, num_parts: int) -> np.ndarray:
    """What is added by what all plans share, and by each part; float64 [1 + parts]."""
    owners, own = amounts
    return np.bincount(slot[owners], own, 1 + num_parts)


def annealed(
    options: PartOptions, share: float, start: np.ndarray, cooling: Cooling, penalty: float = PENALTY, seed: int = 0
) -> tuple[np.ndarray, float]:
    """The best that a search found; int64 [parts], the option of each part. What it costs: its step and, where it
    exceeds the budget at the instants that count, the penalty.

    Args:
      options: What parts can do. share: What collectives make use of, of a kernel's time.
      start: Where the search begins. cooling: How it is sought. penalty: As `PENALTY`. seed: Of the moves.
    """
    generator = np.random.default_rng(seed)
    moves, hottest = cooling.moves, cooling.hottest
    option = generator.integers(len(options.plan), size=moves)
    heat = hottest * (_COLDEST / hottest) ** (np.arange(moves) / moves)
    patience = -np.log1p(-generator.random(moves)) * heat
    cut = options.intervals
    adds = options.least_s, options.entry, options.place, options.amount, options.used, *options.reached
    windows = options.starts, options.stops, cut.by_start, cut.come, cut.first, cut.open_windows
    ends = options.num_ends, cut.every
    return anneal(*adds, *windows, *ends, share, penalty, start, options.part[option], option, patience)
