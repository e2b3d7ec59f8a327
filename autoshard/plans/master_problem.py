"""The restricted master problem: which known plan each part of a program does best to follow.

Rounds of pricing (`pricing.py`) make plans, each best at other prices. Where they differ, decisions fall into parts
that no edge joins: layers, and pieces of layers. Each part can follow another plan, and what it adds to the time of the
step and to memory does not depend on the other parts (`master_program.py`).

Stretches, each with its copies in other layers, and instants are added as plans that are found need more of them. Some
decisions tie nearly all others, such as the layout of activations between layers: plans that differ there make one huge
part. Integral solutions are therefore sought among plans that agree on those, and among plans that are crossed within
that part (`crossed_plans.py`).

Plans are made by programs while prices are sought (`fastest`), and by a search that runs the schedule itself at the
end, or where there is less memory (`improved`, `part_search.py`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import numpy as np

from autoshard.cost.exposure import Stretch
from autoshard.garbage import collection_paused
from autoshard.planner.overlap import StretchWeights
from autoshard.planner.step_times import InLine, OwnTimes, StepTimes
from autoshard.plans.crossed_plans import crossed_plans, shared_most
from autoshard.plans.known_plan import KnownPlan, Made, Sparse, sparse
from autoshard.plans.master_program import Group, MasterProgram, Relaxed, parts_of
from autoshard.plans.part_search import (
    FROM_A_PLAN,
    FROM_A_ROUNDED,
    PENALTY,
    SHORT,
    Cooling,
    annealed,
    part_options,
)
from autoshard.side_by_side import side_by_side
from autoshard.solver.evaluate import CAPACITY_TOLERANCE
from autoshard.solver.reduce.columns import worst_instants
from autoshard.solver.tabulated import Tabulated, Taken

_TIED = 0.02
"""A decision ties the others if this share of all edges, or more, hang on it."""

_MOST = 0.5
"""Plans that differ in a decision that ties others are kept apart if it ties more than this share of what differs."""

_IDLE = 2
"""After how many mixtures in a row that it does not bind a stretch no longer counts."""

_SLIGHT = 1e-4
"""What a mixture lacks makes it longer by no more than this share, if the stretches and instants found last did not."""

Copies = tuple[Stretch, ...]
"""All stretches over the same operations, in one layer each."""

_Solved = tuple[MasterProgram, Relaxed | None]
"""A master problem, and its solution over the reals; None if there is none."""

_LOOKS = 4
"""How often a plan is sought at most, each time with the stretches and instants that the one before lacked."""

_SEARCHES, _DEARER = 3, 10.0
"""Likewise of searches part by part, where memory is exceeded at instants that did not count; where they did, exceeding
it costs so many times more in the next."""

_FAR = 0.01
"""Plans are crossed only where their mixture takes less than the best by more than this share."""

_NOT_HIDDEN, _LITTLE_NOT_HIDDEN, _ALIKE = 0.3, 0.1, 1e-3
"""Which share of what is sent a compiler's schedule does not hide, supposedly: by this, known plans come in the order
in which GPT-3 175B (24 layers, 1,024 H100, three meshes) is the fastest as scheduled; and a share for where less of it
is left. What takes least with the one and with the other is made of known plans: with 24 layers a step of 1.94 instead
of 1.98 s on data=512, tensor=2, and of 2.10 instead of 2.12 on data=128, tensor=8; with six layers and data=256,
tensor=4 512 ms, where the best known plan takes 549 (a script that is not kept). Two whose steps and what
they send differ by no more than the last share of the step are alike."""

_IN_LINE, _ROUNDS_IN_LINE = 0.6, 2
"""Which share of what kernels wait in line for (`InLine`) counts, and how often a plan is sought that waits less. Of
GPT-3 175B on data=128, tensor=8 of 1,024 H100, plans with 24 and with 96 layers that are as the solver has them wait
for 0.59 and 0.68 of it longer, as scheduled, than in the best schedule (a script that is not kept)."""

_LARGE, _LARGE_LEAST = 0.02, 100
"""A part is large that has more than this share of all decisions, and than so many: those of a layer or more."""

_IMPROVEMENTS, _IMPROVES = 4, 5e-4
"""How often a plan is improved at most, each time from the one found before, which is crossed anew, by other moves and
twice as many; as long as that makes it faster by this share."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mixture:
    """The mixture of known plans that takes least time.

    Attributes:
      step_s: What it takes; no plan that is made of the known ones takes less.
      weights: Of stretches, at which none takes less.
      prices: Of instants that bind, in seconds per byte.
      undecided: The decisions that it takes differently in some of its parts' plans.
    """

    step_s: float
    weights: StretchWeights
    prices: Mapping[int, float]
    undecided: tuple[int, ...]


class MasterProblem:
    """Plans of one problem that are known, and what can be made of them."""

    def __init__(self, times: StepTimes, budget_bytes: float | None) -> None:
        """No plan is known yet; `budget_bytes` is None where memory does not count."""
        self._times, self._budget = times, budget_bytes
        self._columns: dict[bytes, KnownPlan] = {}
        self._stretches: dict[Copies, int] = {self._whole: 0}  # mixtures in a row that they did not bind
        self._instants: dict[int, None] = {}
        self._amounts: dict[tuple[bytes, Copies | int], Sparse] = {}  # in seconds or bytes
        self._looks = _LOOKS  # at each mixture
        self._mixed: dict[tuple[bytes, ...], _Solved] = {}  # the latest mixture of plans that are all alike, by them
        self._mixture_s = -math.inf  # what the latest mixture takes, of these plans or with more memory
        self._prices: Mapping[Copies | int, float] = {}  # the multipliers of that mixture

    @property
    def _whole(self) -> Copies:
        """The whole step as a stretch."""
        return ((0, self._times.num_operations),)

    @property
    def budget_bytes(self) -> float | None:
        """What a plan may have alive at once; None where memory does not count."""
        return self._budget

    @property
    def tabulated(self) -> Tabulated:
        """The problem."""
        return self._times.tabulated

    @property
    def times(self) -> StepTimes:
        """What plans of the problem take."""
        return self._times

    def add(self, choices: Sequence[int]) -> bool:
        """Takes a plan, which may exceed the budget; whether it is new. One that is forbidden is left out."""
        own = np.asarray(choices, np.int64)
        if (known := self._columns.get(own.tobytes())) is not None:
            self._count(known.stretches, known.exceeded)
            return False
        column = self._column(own)
        if not math.isfinite(column.step_s):
            return False
        self._count(column.stretches, column.exceeded)
        self._columns[column.key] = column
        return True

    def within(self, decision: int, choices: Sequence[int]) -> "MasterProblem":
        """The same with the plans that take one of these choices."""
        part = MasterProblem(self._times, self._budget)
        part._take(self, [c for c in self._columns.values() if c.choices[decision] in choices])
        return part

    def with_budget(self, budget_bytes: float | None) -> "MasterProblem":
        """The same with another budget."""
        again = MasterProblem(self._times, budget_bytes)
        if self._budget is None or budget_bytes is not None and budget_bytes <= self._budget:
            again._mixture_s, again._prices = self._mixture_s, self._prices
        columns = [dataclasses.replace(c, exceeded=again._exceeded(c.taken)) for c in self._columns.values()]
        again._take(self, columns)
        for column in columns:
            again._count((), column.exceeded)
        return again

    def take(self, other: "MasterProblem") -> None:
        """Takes all plans of another part of the same problem."""
        self._take(other, other._columns.values())

    def _take(self, other: "MasterProblem", columns: Iterable[KnownPlan]) -> None:
        for column in columns:
            self._columns.setdefault(column.key, column)
        self._stretches.update(other._stretches)
        self._instants.update(other._instants)
        self._amounts.update(other._amounts)

    def step_s(self, choices: Sequence[int]) -> float:
        """The time of a plan's step."""
        times = self._times.of(np.asarray(choices, np.int64))
        return float(times.least_s.sum()) + self._times.exposed(times)[1]

    def peak_bytes(self, choices: Sequence[int]) -> float:
        """What a plan has alive at once, at most."""
        return float(self.tabulated.usage(self.tabulated.taken(np.asarray(choices, np.int64))).max(initial=0.0))

    def fastest_known(self) -> Made | None:
        """The fastest of the plans that were added and fit."""
        made = [column.made for column in self._columns.values()]
        return min((m for m in made if m is not None), key=lambda m: m.step_s, default=None)

    def promising(self, count: int, most_s: float, than: Sequence[int] | None = None) -> tuple[Made, ...]:
        """At most so many plans that fit, no two of them nearly alike, whose steps take `most_s` at most: of those that
        were added, and of two that are made of these. Those come first that are fastest, supposedly, by a compiler that
        does not find the best schedule: what is sent costs more. Only those that are faster so than the plan `than`.
        """
        supposed_s = lambda c, share=_NOT_HIDDEN: c.step_s + share * c.total_sent_s
        found: list[KnownPlan] = []
        fitting = [c for c in self._columns.values() if not c.exceeded and c.step_s <= most_s]
        for share in (_NOT_HIDDEN, _LITTLE_NOT_HIDDEN) if fitting else ():
            first = min(fitting, key=functools.partial(supposed_s, share=share))
            sent = lambda c, share=share: (c.sent_s[0], share * c.sent_s[1])
            made = self._improved(first.choices.tolist(), math.inf, besides=sent)
            column = None if made is None else self._column(np.asarray(made.choices, np.int64))
            if column is not None and column.step_s <= most_s:
                fitting.append(column)
        to_beat_s = math.inf if than is None else supposed_s(self._column(np.asarray(than, np.int64)))
        for column in sorted((c for c in fitting if supposed_s(c) < to_beat_s), key=supposed_s):
            far_s = _ALIKE * column.step_s
            if len(found) < count and all(
                abs(column.step_s - c.step_s) > far_s or abs(column.total_sent_s - c.total_sent_s) > far_s
                for c in found
            ):
                found.append(column)
        return tuple([made for c in found if (made := c.made) is not None])

    def in_line(self, choices: Sequence[int], share: float = _IN_LINE) -> InLine:
        """What kernels wait in line for near a plan, as a compiler schedules it; `share` of it counts."""
        column = self._column(np.asarray(choices, np.int64))
        return self._times.in_line(column.times, column.step_s, share)

    def less_in_line(self, choices: Sequence[int], most_s: float) -> tuple[Made, ...]:
        """Plans that are made of known ones, whose steps take `most_s` at most: what takes least with what kernels wait
        in line for near the plan `choices`, which may exceed the budget; and with that near the one found, and so on.
        """
        found: list[Made] = []
        for _ in range(_ROUNDS_IN_LINE):
            prices = self.in_line(choices)
            made = self._improved(choices, math.inf, besides=functools.partial(self._in_line, prices))
            if made is None or made.choices == tuple(choices):
                break
            found.append(made)
            choices = made.choices
        return tuple([made for made in found if made.step_s <= most_s])

    def _in_line(self, prices: InLine, column: KnownPlan) -> Sparse:
        return sparse(self._times.in_line_s(column.times, prices))

    @collection_paused()
    def mixture(self) -> Mixture | None:
        """The best mixture of all plans; None if even mixtures exceed the budget, or no plan is known."""
        if not self._columns:
            return None
        alike, found = _alike(self._times.tabulated, list(self._columns.values())), None
        for look in range(self._looks):
            program, before_s = self._program(alike), -math.inf if found is None else found.step_s
            relaxed = program.relaxed()
            if relaxed is None:
                return None
            self._mixed = {tuple(self._columns): (program, relaxed)} if len(alike) == 1 else {}
            found = self._mixture(program, relaxed)
            self._mixture_s, self._prices = found.step_s, self._multipliers(relaxed)
            binding = {self._times.copies_of(stretch) for _, stretch in found.weights.stretches}
            lacks = self._count(*self._bounds(*program.mixed(relaxed))[1:])
            if look and found.step_s <= before_s * (1 + _SLIGHT):  # then those that follow need no more than one
                self._looks = 1
            if not lacks or self._looks == 1:
                self._forget(binding)
                break
        return found

    def _forget(self, binding: Set[Copies]) -> None:
        """Leaves out the stretches that bind in no mixture any more; they are counted again once plans need them."""
        idle = {copies: 0 if copies in binding else count + 1 for copies, count in self._stretches.items()}
        self._stretches = {copies: count for copies, count in idle.items() if count < _IDLE or copies == self._whole}

    def _mixture(self, program: MasterProgram, relaxed: Relaxed) -> Mixture:
        """A mixture as others see it."""
        kinds, instants = list(self._stretches), list(self._instants)
        own = np.clip(relaxed.multipliers[: len(kinds)], 0.0, None)
        stretches = [stretch for copies in kinds for stretch in copies]
        weights = np.repeat(own, [len(copies) for copies in kinds])
        starts, stops = np.array(stretches, np.int64).T
        ends = np.unique(starts)  # where stretches overlap most, one begins
        weights /= max(1.0, float((((starts <= ends[:, None]) & (ends[:, None] < stops)) @ weights).max()))  # rounding
        pairs = zip(weights.tolist(), stretches, strict=True)
        prices = zip(instants, relaxed.multipliers[len(kinds) :].tolist(), strict=True)
        return Mixture(
            relaxed.value_s,
            StretchWeights(tuple((w, stretch) for w, stretch in pairs if w > 0)),
            {instant: price / (self._budget or math.inf) for instant, price in prices if price > 0},
            program.undecided(relaxed),
        )

    @collection_paused()
    def fastest(self, to_beat_s: float, relative_gap: float) -> Made | None:
        """A plan that is made of known ones; None if none is found that is faster than `to_beat_s`.

        Stretches that are alike are looked at together: a layer that waits is made up for by another that need not,
        which holds for mixtures and for no plan. `improved` looks at each.

        Args:
          relative_gap: How far from the fastest of them it may be.
        """
        best, known = None, list(self._columns.values())
        for columns in _alike(self._times.tabulated, known) if known else ():
            if len(columns) == 1:
                continue
            for look in range(_LOOKS):
                mixed = None if look else self._mixed.get(tuple([column.key for column in columns]))
                program, relaxed = mixed or self._relaxed(columns)
                if relaxed is None or relaxed.value_s >= to_beat_s * (1 - relative_gap):
                    break
                found = program.integral(relaxed, relative_gap, to_beat_s)
                found = [self._column(choices) for choices in {own.tobytes(): own for own in found}.values()]
                for column in found:
                    if column.made is not None and column.step_s < to_beat_s:
                        best, to_beat_s = column.made, column.step_s
                enough_s = relaxed.value_s * (1 + relative_gap)
                is_close = any(c.made is not None and c.step_s <= enough_s for c in found)
                lack = [self._count(c.stretches, c.exceeded) for c in found]
                is_enough = look > 0 or any(c.made is not None for c in found)
                if is_close or not any(lack) or len(found) > 1 and is_enough:
                    break  # several were dived for, which takes long
        return best

    @collection_paused()
    def improved(self, choices: Sequence[int], to_beat_s: float, enough_s: float = -math.inf) -> Made | None:
        """A plan that is made of known ones, sought from one of them by the exact time of the step; None if none is
        found that is faster than `to_beat_s`.

        Args:
          choices: Of the plan to begin with, which may exceed the budget.
          enough_s: A plan that is as fast is not improved any more.
        """
        best, best_s = None, to_beat_s
        for again in range(_IMPROVEMENTS):
            found = self._improved(choices, best_s, again)
            has_gained = found is not None and found.step_s <= best_s * (1 - _IMPROVES)
            if found is not None:
                best, best_s, choices = found, found.step_s, found.choices
            if best_s <= enough_s or again and not has_gained:  # after the first time what ties layers is left out
                break
        return best

    def _improved(
        self,
        choices: Sequence[int],
        to_beat_s: float,
        again: int = 0,
        besides: Callable[[KnownPlan], Sparse] | None = None,
    ) -> Made | None:
        """`improved`, once; `again` says how often it was before, and `besides` what the owners of a plan cost beside
        the step, where what takes least so is sought."""
        self.add(choices)
        key = np.asarray(choices, np.int64).tobytes()
        for columns in _alike(self._times.tabulated, list(self._columns.values())):
            own = [column.key for column in columns]
            if key in own and len(own) > 1:
                first = own.index(key)
                if again:
                    columns = self._untied(columns, first)
                return self._improved_from(columns, first, to_beat_s, again, besides)
        return None

    def _untied(self, columns: Sequence[KnownPlan], first: int) -> Sequence[KnownPlan]:
        """Plans as they are, but like the one with the number `first` in large parts in which they differ from it.

        One plan that ties layers is enough to make one part of what all others leave apart (GPT-3 with 96 layers in
        Linen: of 27 plans one, without which 4.040 s are found, and not 4.071).
        """
        own, found, many = columns[first].choices, [], max(_LARGE * self.tabulated.num_nodes, _LARGE_LEAST)
        for column in columns:
            part_of = parts_of(self.tabulated, np.stack([own, column.choices]))
            sizes = np.bincount(part_of + 1)  # at first of what does not differ
            is_large = (part_of >= 0) & (sizes[part_of + 1] > many)
            found.append(self._column(np.where(is_large, own, column.choices)) if is_large.any() else column)
        return columns if all(column.key == columns[first].key for column in found) else found

    def _improved_from(
        self,
        columns: Sequence[KnownPlan],
        first: int,
        to_beat_s: float,
        again: int,
        besides: Callable[[KnownPlan], Sparse] | None,
    ) -> Made | None:
        """`_improved` of plans that are alike, from one of them."""
        prices, begins, far_s = self._prices, [], columns[first].step_s * (1 - _FAR)
        if not prices or self._mixture_s < far_s:
            program, relaxed = self._relaxed(columns)
            if relaxed is not None:
                prices = self._multipliers(relaxed)
                if relaxed.value_s < far_s:
                    columns, begins = self._crossed(columns, program, relaxed)
        taken, cooling, penalty = None, FROM_A_PLAN.of_moves(2**again), PENALTY
        for _ in range(_SEARCHES):
            each = [functools.partial(self._row, instant) for instant in self._instants]
            options = part_options(self._times, columns, each, functools.partial(self._price, prices), besides)
            search = functools.partial(annealed, options.ready(), self._times.share, penalty=penalty, seed=again)
            if taken is None:
                starts = [options.option[followed, range(len(followed))] for followed in begins]
                taken, cooling = _begun(search, options.option[first], cooling, starts)
            else:
                taken, _ = search(taken, cooling)
            found = self._column(options.made(taken))
            if found.made is not None:
                return found.made if found.step_s < to_beat_s else None
            if not self._count((), found.exceeded):
                penalty *= _DEARER
        return None

    def _crossed(
        self, columns: Sequence[KnownPlan], program: MasterProgram, relaxed: Relaxed
    ) -> tuple[Sequence[KnownPlan], list[np.ndarray]]:
        """Plans that are alike, and where a search may begin but with the fastest: the plan that each part follows;
        int64 [parts] each.

        Where their mixture divides the largest part, as one in which all layers hang together, that part may follow any
        of the plans that it does in the mixture, or plans crossed of them, which are added; the other parts follow what
        is best in the mixture with each.
        """
        (group,) = program.groups
        most = max(range(len(group.parts)), key=lambda part: len(group.parts[part]))
        shares = {plan: float(relaxed.taken[0][1 + option]) for option, plan in group.options_of(most).items()}
        mixed = shared_most(shares)
        crossed = crossed_plans(self.tabulated, group.plans, group.parts[most], shares)
        made = [column for column in map(self._column, crossed) if math.isfinite(column.step_s)]
        for column in made:
            self._count((), column.exceeded)
        followed = [*mixed, *range(len(columns), len(columns) + len(made))]
        columns = [*columns, *made]
        return columns, (self._program([columns]) if made else program).plans_with(most, followed)

    def _column(self, choices: np.ndarray) -> KnownPlan:
        times, taken = self._times.of(choices), self._times.tabulated.taken(choices)
        step_s, stretches, exceeded = self._bounds(times, taken)
        return KnownPlan(
            choices=choices,
            key=choices.tobytes(),
            times=times,
            taken=taken,
            least_s=sparse(times.least_s),
            sent_s=sparse(times.hideable_s),
            step_s=step_s,
            stretches=stretches,
            exceeded=exceeded,
        )

    def _bounds(self, times: OwnTimes, taken: Taken) -> tuple[float, tuple[Stretch, ...], tuple[int, ...]]:
        """Of a plan or a mixture: the step, where more is to be sent than hides, and what exceeds the budget most."""
        stretches, exposed_s = self._times.exposed(times)
        return float(times.least_s.sum()) + exposed_s, stretches, self._exceeded(taken)

    def _exceeded(self, taken: Taken) -> tuple[int, ...]:
        """The instants that exceed the budget most."""
        if self._budget is None:
            return ()
        return tuple(worst_instants(self.tabulated.usage(taken), self._budget * (1 + CAPACITY_TOLERANCE)))

    def _count(self, stretches: Iterable[Stretch], exceeded: Iterable[int]) -> bool:
        """Lets stretches and instants count; whether some are new."""
        before = len(self._stretches) + len(self._instants)
        counted = dict.fromkeys(map(self._times.copies_of, stretches))
        self._stretches |= {copies: 0 for copies in counted if copies not in self._stretches}
        self._instants.update(dict.fromkeys(exceeded))
        return len(self._stretches) + len(self._instants) > before

    def _program(self, alike: Sequence[Sequence[KnownPlan]]) -> MasterProgram:
        """The master problem of plans, in groups that agree on what ties."""
        tabulated, kinds, instants = self._times.tabulated, list(self._stretches), list(self._instants)
        each = [functools.partial(self._row, of) for of in (*kinds, *instants)]
        ends = np.unique([end for copies in kinds for stretch in copies for end in stretch])
        covered = np.zeros((len(kinds) + len(instants), len(ends) - 1))
        for row, copies in zip(covered, kinds, strict=False):
            starts, stops = np.array(copies, np.int64).T
            row += ((starts[:, None] <= ends[:-1]) & (ends[:-1] < stops[:, None])).sum(axis=0)
        return MasterProgram(
            tabulated=tabulated,
            groups=tuple(Group(tabulated, columns, each) for columns in alike),
            covered=np.unique(covered, axis=1),  # what is waited for where the same is covered is as good anywhere
            limits=np.repeat([0.0, 1.0], [len(kinds), len(instants)]),
        )

    def _relaxed(self, columns: Sequence[KnownPlan]) -> "_Solved":
        """The master problem of plans that are alike, and its solution over the reals."""
        program = self._program([columns])
        return program, program.relaxed()

    def _multipliers(self, relaxed: Relaxed) -> dict[Copies | int, float]:
        """Of the stretches and instants that count."""
        return dict(zip((*self._stretches, *self._instants), relaxed.multipliers.tolist(), strict=True))

    def _price(self, prices: Mapping[Copies | int, float], column: KnownPlan) -> Sparse:
        """What a plan's owners cost at prices of what they wait within stretches and use at instants, in seconds."""
        total = column.times.least_s.copy()
        for of, price in prices.items():
            if price > 0:
                owners, amounts = self._row(of, column)
                total[owners] += price * amounts
        return sparse(total)

    def _row(self, of: Copies | int, column: KnownPlan) -> Sparse:
        """What a plan's owners wait within stretches, in seconds, or use at an instant, in shares of the budget."""
        key = column.key, of
        if key not in self._amounts:
            if isinstance(of, tuple):
                amounts = self._times.waited_s(column.times, of)
            else:
                amounts = self._times.tabulated.used_by(column.taken, of)
            self._amounts[key] = sparse(amounts)
        owners, amounts = self._amounts[key]
        return owners, amounts if isinstance(of, tuple) else amounts / (self._budget or math.inf)


def _begun(
    search: Callable[[np.ndarray, Cooling], tuple[np.ndarray, float]],
    plan: np.ndarray,
    cooling: Cooling,
    starts: Sequence[np.ndarray],
) -> tuple[np.ndarray, Cooling]:
    """What a search finds, and how it would go on: from a plan as `cooling` says, or from where short searches, which
    begin elsewhere, find a better one."""
    searches = [(plan, cooling), *((start, SHORT) for start in starts)]
    (found, found_s), *others = side_by_side(lambda own: search(*own), searches)
    if others:
        best, best_s = min(others, key=lambda own: own[1])
        if best_s < found_s:
            return search(best, FROM_A_ROUNDED)[0], FROM_A_ROUNDED
    return found, cooling


def _alike(tabulated: Tabulated, columns: list[KnownPlan]) -> list[list[KnownPlan]]:
    """Plans that agree on decisions that tie most of the others in which they differ, in groups."""
    part_of = parts_of(tabulated, np.stack([column.choices for column in columns]))
    differs = part_of >= 0
    hub = tying_decision(tabulated, np.flatnonzero(differs))
    if hub is None or (part_of == part_of[hub]).sum() <= _MOST * differs.sum():
        return [columns]
    groups: dict[int, list[KnownPlan]] = {}
    for column in columns:
        groups.setdefault(int(column.choices[hub]), []).append(column)
    return [part for group in groups.values() for part in _alike(tabulated, group)]


def tying_decision(tabulated: Tabulated, undecided: Sequence[int] | np.ndarray) -> int | None:
    """Of some decisions the one on which most edges hang; None if no more than a few do."""
    source, target = tabulated.columns.source, tabulated.columns.target
    is_one = np.zeros(tabulated.num_nodes, bool)
    is_one[np.asarray(undecided, np.int64)] = True
    ends = np.concatenate([source, target])
    edges = np.bincount(ends[is_one[ends]], minlength=tabulated.num_nodes)
    most = int(np.argmax(edges))
    return most if edges[most] >= max(_TIED * len(source), 2) else None
