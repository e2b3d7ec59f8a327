"""Local search over the parts of known plans, by the exact time of the step.

The programs of `master_program.py` know few of the stretches in which kernels can wait, so that what they round waits
elsewhere. Here the schedule itself (`cost/exposure.py`) is run for every move: one part follows another plan. A move
that makes the step longer is accepted the less likely, the longer and the later (simulated annealing; Kirkpatrick,
Gelatt and Vecchi, Optimization by simulated annealing, 1983). A schedule is cut short as soon as it tells that its move
is refused. What exceeds the memory at the instants that count is paid for.

Most moves would be in vain: nearly all parts have some option that the best mixture of the plans would never take, and
most options add nearly what others of their part add. So the former are tried the less often, the more they cost above
the cheapest of their part at the mixture's prices (their reduced cost, as in the pricing of columns; Dantzig and Wolfe,
Decomposition principle for linear programs, 1960), and the latter the less often, the less it matters.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
from scipy.sparse import csr_array

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


FROM_A_PLAN, FROM_A_ROUNDED, SHORT = Cooling(1_250, 2e-5), Cooling(10_000, 4e-4), Cooling(1_250, 4e-4)
"""From a plan whose parts were chosen together, which more heat only disturbs (GPT-3 with 96 layers: 6.726 s, with 4e-4
6.736; four times as many moves gain 0.02 %); from one whose parts were rounded each by itself (the same in Linen: 4.084
s, and 4.082 with 50,000 moves); and to choose from which."""

_MATTERS = 1e-4
"""What options differ by, in steps, from which on it does not count how much it is."""


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
      price_s: float64 [options]; what each costs at the prices of a mixture.
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
    price_s: np.ndarray

    @functools.cached_property
    def reduced_s(self) -> np.ndarray:
        """By how much each option costs more than the cheapest of its part, at the prices; float64 [options]."""
        least = np.full(len(self.parts), np.inf)
        np.minimum.at(least, self.part, self.price_s)
        return self.price_s - least[self.part]

    @functools.cached_property
    def differs_s(self) -> np.ndarray:
        """How much what is added differs between the first option of a part and any other, at most, for each option the
        same; float64 [options]. Using all of the budget counts as long as a step."""
        count, first = len(self.plan), np.full(len(self.parts), len(self.plan))
        np.minimum.at(first, self.part, np.arange(count))
        shape = (len(self.least_s), self.num_ends + len(self.starts))
        adds = csr_array((self.amount, self.place, self.entry), shape=shape)
        of_first = first[self.part]
        differs = np.abs(adds[:count] - adds[of_first]).sum(axis=1) + np.abs(self.least_s[:-1] - self.least_s[of_first])
        most_used = np.abs(self.used[:-1] - self.used[of_first]).max(axis=1, initial=0.0)
        of_parts = np.zeros(len(self.parts))
        np.maximum.at(of_parts, self.part, differs + most_used * self.unit_s)
        return of_parts[self.part]

    @property
    def unit_s(self) -> float:
        """The time of a step in which nothing is waited for, roughly."""
        return float(self.least_s[self.option[0]].sum() + self.least_s[-1])

    def odds(self, hottest: float) -> np.ndarray:
        """How likely each option is tried, in a search that begins so hot; float64 [options]."""
        weights = np.minimum(self.differs_s, _MATTERS * self.unit_s) * np.exp(-self.reduced_s / (hottest * self.unit_s))
        total = weights.sum()
        return weights / total if total > 0 else np.full(len(weights), 1 / max(len(weights), 1))

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

    def ready(self) -> "PartOptions":
        """The same, once all is worked out that searches share, which may run side by side."""
        _ = self.reduced_s, self.differs_s, self.reached
        return self

    def made(self, taken: np.ndarray) -> np.ndarray:
        """The plan whose parts take these options; int64 [decisions]."""
        return composed(self.plans, self.parts, self.plan[taken])


def part_options(
    times: StepTimes,
    columns: Sequence[KnownPlan],
    each: Sequence[Callable[[KnownPlan], Sparse]],
    price: Callable[[KnownPlan], Sparse],
    besides: Callable[[KnownPlan], Sparse] | None = None,
) -> PartOptions:
    """What the parts of some plans can do.

    Args:
      times: Of the problem. columns: The plans.
      each: What the owners of a plan use at an instant, in shares of the budget.
      price: What they cost at the prices of a mixture, in seconds.
      besides: What the owners of a plan cost beside the step, in seconds; None for nothing.
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
    least_s, used, price_s = np.zeros(len(slots)), np.zeros((len(slots), len(each))), np.zeros(len(slots))
    entries: list[tuple[np.ndarray, np.ndarray]] = [(slots[:0], least_s[:0])] * len(slots)
    for k, column in enumerate(columns):
        own = np.flatnonzero(followed == k)
        counted_s = 0.0 if besides is None else _of_slots(slot, besides(column), len(parts))
        least_s[own] = (_of_slots(slot, column.least_s, len(parts)) + counted_s)[slots[own]]
        price_s[own] = (_of_slots(slot, price(column), len(parts)) + counted_s)[slots[own]]
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
        price_s=price_s[:-1],
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
    option = generator.choice(len(options.plan), size=moves, p=options.odds(hottest))
    heat = hottest * (_COLDEST / hottest) ** (np.arange(moves) / moves)
    patience = -np.log1p(-generator.random(moves)) * heat
    cut = options.intervals
    adds = options.least_s, options.entry, options.place, options.amount, options.used, *options.reached
    windows = options.starts, options.stops, cut.by_start, cut.come, cut.first
    ends = options.num_ends, cut.every
    return anneal(*adds, *windows, *ends, share, penalty, start, options.part[option], option, patience)
