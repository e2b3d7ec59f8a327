"""The restricted master problem: which known plan each part of a program does best to follow.

Rounds of pricing (`pricing.py`) make plans, each best at other prices. Where they differ, decisions fall into parts
that no edge joins: layers, and pieces of layers. Each part can follow another plan, and what it adds to the time of the
step and to memory does not depend on the other parts:

    minimise    sum_pk least_pk z_pk + sum_t y_t
    subject to  sum_k z_pk = 1                               each part p follows the plans k, in all by 1
                sum_{t in I} y_t >= sum_pk waited_pk(I) z_pk      for every known stretch I of operations
                sum_pk usage_pk(t) z_pk <= budget                 at every instant t that counts
                y, z >= 0

y_t is what kernels wait between two ends of stretches. Over stretches, which are intervals, the least sum of y is the
most that disjoint ones give, so the objective is the time of the step (`cost/exposure.py`). As a linear program this is
the *mixture* of plans that takes least, and the multipliers of stretches and instants are the prices of the next round
(Dantzig and Wolfe, Decomposition principle for linear programs, 1960). With z integral it is a plan (the restricted
master heuristic of column generation; Sadykov and others, Primal heuristics for branch and price, 2019).

Stretches and instants are added as plans that are found need more of them. Some decisions tie nearly all others, such
as the layout of activations between layers: plans that differ there make one huge part. Integral solutions are
therefore sought among plans that agree on those.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from scipy.optimize import LinearConstraint, linprog, milp
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components

from autoshard.cost.exposure import Stretch
from autoshard.planner.overlap import StretchWeights
from autoshard.planner.step_times import OwnTimes, StepTimes
from autoshard.solver.evaluate import CAPACITY_TOLERANCE
from autoshard.solver.reduce.columns import worst_instants
from autoshard.solver.tabulated import Tabulated, Taken

_TIED = 0.02
"""A decision ties the others if this share of all edges, or more, hang on it."""

_MOST = 0.5
"""Plans that differ in a decision that ties others are kept apart if it ties more than this share of what differs."""

_SHARED = 0.02
"""Plans with less of a mixture do not count in it."""

_LOOKS = 4
"""How often a plan is sought at most, each time with the stretches and instants that the one before lacked."""

_MARGIN = 2e-6
"""Share of the budget that is left free in the programs, whose own tolerance is half of that."""

_SENT = 1e-3
"""What sending costs of its time although it hides, so that no plan sends for nothing."""

_DIGITS = 10
"""To how many digits of the largest amount in a row those of parts are compared."""

_NODES, _LIMIT_S = 500, 2.0
"""Most nodes of the search for an integer program, and most time, which hardly any takes."""

_Sparse = tuple[np.ndarray, np.ndarray]
"""Owners, int64, and the amount of each, float64; none of the others."""


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


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A plan that fits the budget, and the time of its step."""

    choices: tuple[int, ...]
    step_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Column:
    """A known plan.

    Attributes:
      choices: int64 [decisions]. key: They as bytes, by which plans are told apart.
      times: What each decision and edge adds to the step. taken: What each usage takes.
      least_s, sent_s: Of `times`, the time without what is waited for, and that of what can hide.
      step_s: Its step. stretches: Where more is to be sent than hides. exceeded: Instants that exceed the budget.
    """

    choices: np.ndarray
    key: bytes
    times: OwnTimes
    taken: Taken
    least_s: _Sparse
    sent_s: _Sparse
    step_s: float
    stretches: tuple[Stretch, ...]
    exceeded: tuple[int, ...]

    @property
    def made(self) -> Made | None:
        """The plan if it fits."""
        return None if self.exceeded else Made(tuple(self.choices.tolist()), self.step_s)


class MasterProblem:
    """Plans of one problem that are known, and what can be made of them."""

    def __init__(self, times: StepTimes, budget_bytes: float | None) -> None:
        """No plan is known yet; `budget_bytes` is None where memory does not count."""
        self._times, self._budget = times, budget_bytes
        self._columns: dict[bytes, _Column] = {}
        self._stretches: dict[Stretch, None] = {(0, times.num_operations): None}
        self._instants: dict[int, None] = {}
        self._amounts: dict[tuple[bytes, Stretch | int], _Sparse] = {}

    @property
    def tabulated(self) -> Tabulated:
        """The problem."""
        return self._times.tabulated

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
        columns = [dataclasses.replace(c, exceeded=again._exceeded(c.taken)) for c in self._columns.values()]
        again._take(self, columns)
        for column in columns:
            again._count((), column.exceeded)
        return again

    def take(self, other: "MasterProblem") -> None:
        """Takes all plans of another part of the same problem."""
        self._take(other, other._columns.values())

    def _take(self, other: "MasterProblem", columns: Iterable[_Column]) -> None:
        for column in columns:
            self._columns.setdefault(column.key, column)
        self._stretches.update(other._stretches)
        self._instants.update(other._instants)

    def fastest_known(self) -> Made | None:
        """The fastest of the plans that were added and fit."""
        made = [column.made for column in self._columns.values()]
        return min((m for m in made if m is not None), key=lambda m: m.step_s, default=None)

    def mixture(self) -> Mixture | None:
        """The best mixture of all plans; None if even mixtures exceed the budget."""
        alike, found = _alike(self._times.tabulated, list(self._columns.values())), None
        for _ in range(_LOOKS):
            program = self._program(alike)
            relaxed = program.relaxed()
            if relaxed is None:
                return None
            found = self._mixture(program, relaxed)
            if not self._count(*self._bounds(*program.mixed(relaxed))[1:]):
                break
        return found

    def _mixture(self, program: "_Program", relaxed: "_Relaxed") -> Mixture:
        """A mixture as others see it."""
        stretches, instants = list(self._stretches), list(self._instants)
        weights = np.clip(relaxed.multipliers[: len(stretches)], 0.0, None)
        starts, stops = np.array(stretches, np.int64).T
        ends = np.unique(starts)  # where stretches overlap most, one begins
        weights /= max(1.0, float((((starts <= ends[:, None]) & (ends[:, None] < stops)) @ weights).max()))  # rounding
        pairs = zip(weights.tolist(), stretches, strict=True)
        prices = zip(instants, relaxed.multipliers[len(stretches) :].tolist(), strict=True)
        return Mixture(
            relaxed.value_s,
            StretchWeights(tuple((w, stretch) for w, stretch in pairs if w > 0)),
            {instant: price / (self._budget or math.inf) for instant, price in prices if price > 0},
            program.undecided(relaxed),
        )

    def fastest(self, to_beat_s: float, relative_gap: float) -> Made | None:
        """A plan that is made of known ones; None if none is found that is faster than `to_beat_s`.

        Args:
          relative_gap: How far from the fastest of them it may be.
        """
        best, known = None, list(self._columns.values())
        for columns in _alike(self._times.tabulated, known) if known else ():
            for _ in range(_LOOKS if len(columns) > 1 else 0):
                program = self._program([columns])
                relaxed = program.relaxed()
                if relaxed is None or relaxed.value_s >= to_beat_s * (1 - relative_gap):
                    break
                choices = program.integral(relative_gap)
                if choices is None:
                    break
                column = self._column(choices)
                if column.made is not None and column.step_s < to_beat_s:
                    best, to_beat_s = column.made, column.step_s
                is_close = column.made is not None and column.step_s <= relaxed.value_s * (1 + relative_gap)
                if is_close or not self._count(column.stretches, column.exceeded):
                    break
        return best

    def _column(self, choices: np.ndarray) -> _Column:
        times, taken = self._times.of(choices), self._times.tabulated.taken(choices)
        step_s, stretches, exceeded = self._bounds(times, taken)
        return _Column(
            choices=choices,
            key=choices.tobytes(),
            times=times,
            taken=taken,
            least_s=_sparse(times.least_s),
            sent_s=_sparse(times.hideable_s),
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
        self._stretches.update(dict.fromkeys(stretches))
        self._instants.update(dict.fromkeys(exceeded))
        return len(self._stretches) + len(self._instants) > before

    def _program(self, alike: Sequence[Sequence[_Column]]) -> "_Program":
        """The master problem of plans, in groups that agree on what ties."""
        tabulated, stretches, instants = self._times.tabulated, list(self._stretches), list(self._instants)
        each = [functools.partial(self._row, of) for of in (*stretches, *instants)]
        ends = np.unique(np.array(stretches, np.int64))
        starts, stops = np.array(stretches, np.int64).T
        covered = (starts[:, None] <= ends[:-1]) & (ends[:-1] < stops[:, None])
        return _Program(
            tabulated=tabulated,
            groups=tuple(_Group(tabulated, columns, each) for columns in alike),
            covered=np.concatenate([covered, np.zeros((len(instants), len(ends) - 1), bool)]),
            limits=np.repeat([0.0, 1.0], [len(stretches), len(instants)]),
        )

    def _row(self, of: Stretch | int, column: _Column) -> _Sparse:
        """What a plan's owners wait within a stretch, in seconds, or use at an instant, in shares of the budget."""
        key = column.key, of
        if key not in self._amounts:
            if isinstance(of, tuple):
                amounts = self._times.waited_s(column.times, of)
            else:
                amounts = self._times.tabulated.used_by(column.taken, of) / (self._budget or math.inf)
            self._amounts[key] = _sparse(amounts)
        return self._amounts[key]


def _sparse(amounts: np.ndarray) -> _Sparse:
    owners = np.flatnonzero(amounts)
    return owners, amounts[owners]


class _Group:
    """Plans that agree on what ties, in parts that can follow one of them each; parts that are alike count together.

    Layers that are copies of one another have parts to which each option adds the same in all rows: how many of them
    take an option is then all there is to choose.

    Attributes:
      plans: int64 [plans, decisions]; their choices. parts: The decisions of each part, which no two plans share.
      kinds: The parts of each kind. kind: int64 [options]; the kind of parts that an option is of.
      followed: For each option, the plan that each part of its kind follows with it.
      costs_s, sent_s: float64 [1 + options]; of what all plans share, then of each option: the time without what is
        waited for, and that of what can hide.
      rows: float64 [rows, 1 + options]; the same of what is waited for in stretches, and used at instants.
    """

    def __init__(self, tabulated: Tabulated, columns: Sequence[_Column], each: Sequence[Callable[[_Column], _Sparse]]):
        """Takes plans, and what gives the amounts of owners in each row."""
        self._columns = columns
        self.plans = np.stack([column.choices for column in columns])
        part_of = _parts(tabulated, self.plans)
        num_parts = int(part_of.max()) + 1
        order = np.argsort(part_of, kind="stable")
        ends = np.searchsorted(part_of[order], np.arange(num_parts + 1))
        self.parts = [order[start:stop] for start, stop in itertools.pairwise(ends.tolist())]
        source, target = tabulated.columns.source, tabulated.columns.target
        # if both ends of an edge are in a part, it is the same
        self._slot = slot = 1 + np.concatenate([part_of, np.maximum(part_of[source], part_of[target])])
        amounts = np.empty((2 + len(each), len(columns), 1 + num_parts))
        for k, column in enumerate(columns):
            for r, row in enumerate((lambda c: c.least_s, lambda c: c.sent_s, *each)):
                owners, own = row(column)
                amounts[r, k] = np.bincount(slot[owners], own, 1 + num_parts)
        self.kinds, self.kind, self.followed, of_options = _kinds(self.plans, self.parts, amounts[:, :, 1:])
        options = np.concatenate([amounts[:, :1, 0], of_options], axis=1)
        self.costs_s, self.sent_s, self.rows = options[0], options[1], options[2:]

    def made(self, taken: np.ndarray) -> np.ndarray:
        """The plan in which so many parts of their kind take each option; int64 [decisions]."""
        choices = self.plans[0].copy()
        for kind, parts in enumerate(self.kinds):
            options = np.flatnonzero(self.kind == kind)
            counts = np.round(taken[options]).astype(np.int64)
            # spread over the parts, so that neighbours differ
            places = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
            spread = np.repeat(options, counts)[np.argsort(places, kind="stable")]
            for n, (part, option) in enumerate(zip(parts, spread.tolist(), strict=True)):
                own = self.parts[part]
                choices[own] = self.plans[self.followed[option][n], own]
        return choices

    def mixed(self, taken: np.ndarray, tabulated: Tabulated) -> list[np.ndarray]:
        """What a mixture adds and takes: the arrays of `OwnTimes`, then of `Taken`.

        Args:
          taken: float64 [1 + options]; the group's share of the whole, then how many parts take each option.
        """
        shares = np.zeros((len(self._columns), 1 + len(self.parts)))
        shares[0, 0] = taken[0]
        for option, kind in enumerate(self.kind.tolist()):
            parts = self.kinds[kind]
            shares[self.followed[option], 1 + np.array(parts)] += taken[1 + option] / len(parts)
        columns = tabulated.columns
        of_owners = self._slot, self._slot, self._slot
        of_usages = self._slot[columns.usage_owner], self._slot[tabulated.num_nodes + columns.pair_owner]
        mixed = [np.zeros(len(slot)) for slot in (*of_owners, *of_usages)]
        for column, own in zip(self._columns, shares, strict=True):
            times, used = column.times, column.taken
            each = times.kernels_s, times.least_s, times.hideable_s, used.by_nodes, used.by_edges
            for total, amounts, slot in zip(mixed, each, (*of_owners, *of_usages), strict=True):
                total += own[slot] * amounts
        return mixed

    def undecided(self, taken: np.ndarray, whole: float) -> np.ndarray:
        """Whether parts of the kind of each decision take several options that differ in it; bool [decisions]."""
        found = np.zeros(self.plans.shape[1], bool)
        for kind, parts in enumerate(self.kinds):
            options = np.flatnonzero((self.kind == kind) & (taken >= _SHARED * whole)).tolist()
            for n, part in enumerate(parts if len(options) > 1 else ()):
                own = self.parts[part]
                plans = self.plans[[self.followed[option][n] for option in options]][:, own]
                found[own] = (plans != plans[0]).any(axis=0)
        return found


def _kinds(
    plans: np.ndarray, parts: Sequence[np.ndarray], amounts: np.ndarray
) -> tuple[list[list[int]], np.ndarray, list[list[int]], np.ndarray]:
    """The parts of each kind, and of each option: its kind, the plan that each part follows with it, its amounts.

    Args:
      plans: int64 [plans, decisions]. parts: The decisions of each part.
      amounts: float64 [rows, plans, parts].
    """
    scale = np.abs(amounts).max(axis=(1, 2), initial=0.0, keepdims=True)
    rounded = np.round(amounts / np.where(scale > 0, scale, 1.0), _DIGITS) + 0.0
    number: dict[bytes, int] = {}
    kinds: list[list[int]] = []
    orders: list[list[list[int]]] = []
    for part, own in enumerate(parts):
        first = {row.tobytes(): k for k, row in reversed(list(enumerate(plans[:, own])))}
        options = {rounded[:, k, part].tobytes(): k for k in sorted(first.values(), reverse=True)}
        order = [options[key] for key in sorted(options)]
        kind = number.setdefault(b"".join(sorted(options)), len(kinds))
        if kind == len(kinds):
            kinds.append([])
            orders.append([])
        kinds[kind].append(part)
        orders[kind].append(order)
    kind_of, followed, of_options = [], [], [np.zeros((len(amounts), 0))]
    for kind, (own, order) in enumerate(zip(kinds, orders, strict=True)):
        kind_of += [kind] * len(order[0])
        followed += [list(plan) for plan in zip(*order, strict=True)]
        of_options.append(amounts[:, order[0], own[0]])
    return kinds, np.array(kind_of, np.int64), followed, np.concatenate(of_options, axis=1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Relaxed:
    """The solution of the linear program.

    Attributes:
      value_s: The objective. multipliers: Of stretches, then of instants.
      taken: Of each group, its share of the whole, then how many parts take each option; float64 [1 + options].
    """

    value_s: float
    multipliers: np.ndarray
    taken: tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Program:
    """The master problem of groups of plans; a solution divides the whole among groups, and what each has among plans.

    (So its value is that of the best mixture of what each group can make; Balas, Disjunctive programming, 1979.)

    Attributes:
      tabulated: The problem. groups: See `_Group`.
      covered: bool [rows, intervals]; which intervals between ends of stretches lie in a stretch.
      limits: float64 [rows]; 0 for stretches, 1 for instants, whose usage is in shares of the budget.
    """

    tabulated: Tabulated
    groups: tuple[_Group, ...]
    covered: np.ndarray
    limits: np.ndarray

    def relaxed(self) -> _Relaxed | None:
        """The solution over the reals; None if there is none."""
        cost_s, rows, equal, sums = self._matrices(0.0)
        found = linprog(cost_s, A_ub=rows, b_ub=self.limits, A_eq=equal, b_eq=sums, bounds=(0, None), method="highs")
        if found.x is None:
            return None
        return _Relaxed(float(found.fun), -found.ineqlin.marginals, self._by_group(found.x))

    def integral(self, relative_gap: float) -> np.ndarray | None:
        """A plan, int64 [decisions], within a gap of the fastest that is made of these; None if none is found."""
        cost_s, rows, equal, sums = self._matrices(_SENT)
        intervals = self.covered.shape[1]
        found = milp(
            cost_s,
            constraints=[
                LinearConstraint(rows, -np.inf, self.limits * (1 - _MARGIN)),  # pyright: ignore[reportArgumentType]
                LinearConstraint(equal, sums, sums),  # pyright: ignore[reportArgumentType]
            ],
            integrality=np.concatenate([np.ones(len(cost_s) - intervals), np.zeros(intervals)]),
            options={"mip_rel_gap": relative_gap, "node_limit": _NODES, "time_limit": _LIMIT_S},
        )
        if found.x is None:
            return None
        group, taken = max(zip(self.groups, self._by_group(found.x), strict=True), key=lambda pair: pair[1][0])
        return group.made(taken[1:])

    def mixed(self, relaxed: _Relaxed) -> tuple[OwnTimes, Taken]:
        """What a mixture adds to a step, and what it takes."""
        each = [g.mixed(taken, self.tabulated) for g, taken in zip(self.groups, relaxed.taken, strict=True)]
        summed = [np.sum(arrays, axis=0) for arrays in zip(*each, strict=True)]
        return OwnTimes(*summed[:3]), Taken(*summed[3:])

    def undecided(self, relaxed: _Relaxed) -> tuple[int, ...]:
        """The decisions in which plans that have a share differ."""
        shared = [(g, taken) for g, taken in zip(self.groups, relaxed.taken, strict=True) if taken[0] >= _SHARED]
        plans = np.stack([group.plans[0] for group, _ in shared])
        found = (plans != plans[0]).any(axis=0)
        for group, taken in shared:
            found |= group.undecided(taken[1:], taken[0])
        return tuple(np.flatnonzero(found).tolist())

    def _by_group(self, values: np.ndarray) -> tuple[np.ndarray, ...]:
        """The values of each group's variables."""
        return tuple(np.split(values, np.cumsum([len(group.costs_s) for group in self.groups]))[:-1])

    def _matrices(self, sent: float) -> tuple[np.ndarray, csr_array, csr_array, np.ndarray]:
        """Costs, inequalities, equalities and what these are equal to; over groups, then intervals between ends.

        Args:
          sent: What sending costs of its time although it hides.
        """
        intervals = self.covered.shape[1]
        cost_s = np.concatenate([*(g.costs_s + sent * g.sent_s for g in self.groups), np.ones(intervals)])
        rows = csr_array(np.concatenate([*(g.rows for g in self.groups), -self.covered.astype(np.float64)], axis=1))
        entries = []
        row, column = 1, 0
        for group in self.groups:  # the whole goes to groups; what a group has goes to the options of each kind
            kinds, options = np.arange(len(group.kinds)), np.arange(len(group.kind))
            entries.append((np.zeros(1, np.int64), np.array([column]), np.ones(1)))
            entries.append((row + kinds, np.full(len(kinds), column), -np.array([len(k) for k in group.kinds], float)))
            entries.append((row + group.kind, column + 1 + options, np.ones(len(options))))
            row, column = row + len(kinds), column + 1 + len(options)
        at, of, values = (np.concatenate(each) for each in zip(*entries, strict=True))
        equal = csr_array((values, (at, of)), shape=(row, len(cost_s)))
        return cost_s, rows, equal, np.concatenate([np.ones(1), np.zeros(row - 1)])


def _parts(tabulated: Tabulated, plans: np.ndarray) -> np.ndarray:
    """The part of each decision, int64 [decisions]: joined by edges between decisions in which plans differ; or -1."""
    differs = (plans != plans[0]).any(axis=0)
    source, target = tabulated.columns.source, tabulated.columns.target
    joins = differs[source] & differs[target]
    ends, count = (source[joins], target[joins]), plans.shape[1]
    _, component = connected_components(coo_array((np.ones(joins.sum()), ends), shape=(count, count)), directed=False)
    part_of = np.full(count, -1, np.int64)
    part_of[differs] = np.unique(component[differs], return_inverse=True)[1]
    return part_of


def _alike(tabulated: Tabulated, columns: list[_Column]) -> list[list[_Column]]:
    """Plans that agree on decisions that tie most of the others in which they differ, in groups."""
    part_of = _parts(tabulated, np.stack([column.choices for column in columns]))
    differs = part_of >= 0
    hub = tying_decision(tabulated, np.flatnonzero(differs))
    if hub is None or (part_of == part_of[hub]).sum() <= _MOST * differs.sum():
        return [columns]
    groups: dict[int, list[_Column]] = {}
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
