"""The restricted master problem as a linear and as an integer program, over what `master_problem.py` knows.

    minimise    sum_pk least_pk z_pk + sum_t y_t                  `MasterProgram._matrices`: cost_s
    subject to  sum_k z_pk = 1                                    each part p follows the plans k: equal
                sum_{I in C} sum_{t in I} y_t >= sum_{I in C} sum_pk waited_pk(I) z_pk
                                                                  for all known copies C of a stretch I: rows
                sum_pk usage_pk(t) z_pk <= budget                 at every instant t that counts: rows
                y, z >= 0

y_t is what kernels wait between two ends of stretches. Over stretches, which are intervals, the least sum of y is the
most that disjoint ones give, so with each stretch by itself the objective is the time of the step (`cost/exposure.py`).
Copies together (`planner/stretch_copies.py`) ask for less, and of a mixture that treats layers that are alike alike for
the same. As a linear program (`relaxed`) this is the *mixture* of plans that takes least, and the multipliers of
stretches and instants are the prices of the next round (Dantzig and Wolfe, Decomposition principle for linear programs,
1960). With z integral (`integral`) it is a plan (the restricted master heuristic of column generation; Sadykov and
others, Primal heuristics for branch and price, 2019).

Small integer programs are solved. Large ones, in which every layer has parts of its own, take a branch and bound
minutes: there plans are rounded from the solution over the reals, which is then sought again with the surest half of
what was rounded settled, and so on (diving; Achterberg, Constraint integer programming, 2007, section 9.2).
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components

from autoshard.planner.step_times import OwnTimes
from autoshard.plans.known_plan import KnownPlan, Sparse
from autoshard.solver.exact.integer_program import least_integral
from autoshard.solver.exact.linear_program import LinearProgram, least_linear
from autoshard.solver.tabulated import Tabulated, Taken

_SHARED = 0.02
"""Plans with less of a mixture do not count in it."""

_MARGIN = 2e-6
"""Share of the budget that is left free in the programs, whose own tolerance is half of that."""

_SENT = 1e-3
"""What sending costs of its time although it hides, so that no plan sends for nothing."""

_DIGITS = 9
"""To how many digits of the largest amount in a row those of parts are compared, mixed at random."""

_NODES, _LIMIT_S = 500, 10.0
"""Most nodes of the search for an integer program, and most time: hardly any takes a fifth of it, so that what is found
does not go by the clock on a busy machine either."""

_MOST_OPTIONS = 300
"""Integer programs of more options are not solved but dived into. At 8,000 options, of GPT-3, branch and bound had
nothing in 2 s and 7.13 s a step in 20, where four dives found 6.82 in 3.7."""

_DIVES = 4
"""How often a part of what was rounded is settled."""

_REPAIRS = 3
"""How often the last one is rounded again with less memory."""

_EXACT = 1e-6
"""Numbers of parts that are so close to an integer are one."""


class Group:
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

    def __init__(
        self, tabulated: Tabulated, columns: Sequence[KnownPlan], each: Sequence[Callable[[KnownPlan], Sparse]]
    ):
        """Takes plans, and what gives the amounts of owners in each row."""
        self._columns = columns
        self.plans = np.stack([column.choices for column in columns])
        self.parts, self._slot = parts_and_slots(tabulated, self.plans)
        num_parts, slot = len(self.parts), self._slot
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
        return composed(self.plans, self.parts, self.plan_of_parts(taken))

    def plan_of_parts(self, taken: np.ndarray) -> np.ndarray:
        """The plan that each part follows, if so many of their kind take each option; int64 [parts]."""
        found, numbers = np.zeros(len(self.parts), np.int64), np.round(taken).astype(np.int64)
        for parts, options in zip(self.kinds, self._options(), strict=True):
            counts = numbers[options]
            # spread over the parts, so that neighbours differ
            places = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
            spread = np.repeat(options, counts)[np.argsort(places, kind="stable")]
            for n, (part, option) in enumerate(zip(parts, spread.tolist(), strict=True)):
                found[part] = self.followed[option][n]
        return found

    def _options(self) -> list[np.ndarray]:
        """The options of each kind, which stand one after another."""
        ends = np.searchsorted(self.kind, np.arange(len(self.kinds) + 1))
        return [np.arange(*own) for own in itertools.pairwise(ends.tolist())]

    def options_of(self, part: int) -> Mapping[int, int]:
        """The options of a part that is alone of its kind, and the plan that it follows with each; none of another."""
        kind = next(kind for kind, parts in enumerate(self.kinds) if part in parts)
        return {int(o): self.followed[o][0] for o in self._options()[kind]} if len(self.kinds[kind]) == 1 else {}

    def rounded(self, taken: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A mixture in integers, and how sure it is of that: the parts of a kind that need not be rounded go first, to
        the options with the largest remainders the others.

        Args:
          taken: float64 [options]; how many parts take each option.

        Returns:
          float64 [options]; the same in integers.
          float64 [kinds]; the share of each kind's parts that take the option that most of them take; 1 where nothing
          had to be rounded.
        """
        whole = np.floor(taken + _EXACT)
        rest = np.clip(taken - whole, 0.0, None)
        counts = np.array([len(parts) for parts in self.kinds])
        left = counts - np.bincount(self.kind, whole, len(counts)).astype(np.int64)
        order = np.lexsort((-rest, self.kind))
        first = np.searchsorted(self.kind[order], np.arange(len(counts)))
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order)) - first[self.kind[order]]
        most = np.zeros(len(counts))
        np.maximum.at(most, self.kind, taken / counts[self.kind])
        return whole + (rank < left[self.kind]), np.where(left > 0, np.minimum(most, 1 - 2 * _EXACT), 1.0)

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
        is_taken = taken >= _SHARED * whole
        for parts, own_options in zip(self.kinds, self._options(), strict=True):
            options = own_options[is_taken[own_options]].tolist()
            for n, part in enumerate(parts if len(options) > 1 else ()):
                own = self.parts[part]
                plans = self.plans[[self.followed[option][n] for option in options]][:, own]
                found[own] = (plans != plans[0]).any(axis=0)
        return found


def composed(plans: np.ndarray, parts: Sequence[np.ndarray], plan_of: np.ndarray) -> np.ndarray:
    """The plan each part of which follows one of some plans; int64 [decisions].

    Args:
      plans: int64 [plans, decisions]. parts: The decisions of each part. plan_of: int64 [parts]; which it follows.
    """
    choices = plans[0].copy()
    for own, plan in zip(parts, plan_of.tolist(), strict=True):
        choices[own] = plans[plan, own]
    return choices


def _kinds(
    plans: np.ndarray, parts: Sequence[np.ndarray], amounts: np.ndarray
) -> tuple[list[list[int]], np.ndarray, list[list[int]], np.ndarray]:
    """The parts of each kind, and of each option: its kind, the plan that each part follows with it, its amounts.

    Args:
      plans: int64 [plans, decisions]. parts: The decisions of each part.
      amounts: float64 [rows, plans, parts].
    """
    scale = np.abs(amounts).max(axis=(1, 2), initial=0.0)
    mixed = np.random.default_rng(0).random((2, len(amounts))) / np.where(scale > 0, scale, 1.0)
    rounded = np.round(np.tensordot(mixed, amounts, 1), _DIGITS) + 0.0  # as good as all rows
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
class Relaxed:
    """The solution of the linear program.

    Attributes:
      value_s: The objective. multipliers: Of stretches, then of instants.
      taken: Of each group, its share of the whole, then how many parts take each option; float64 [1 + options].
    """

    value_s: float
    multipliers: np.ndarray
    taken: tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class MasterProgram:
    """The master problem of groups of plans; a solution divides the whole among groups, and what each has among plans.

    (So its value is that of the best mixture of what each group can make; Balas, Disjunctive programming, 1979.)

    Attributes:
      tabulated: The problem. groups: See `Group`.
      covered: float64 [rows, intervals]; in how many of its stretches each interval between ends of stretches lies.
      limits: float64 [rows]; 0 for stretches, 1 for instants, whose usage is in shares of the budget.
    """

    tabulated: Tabulated
    groups: tuple[Group, ...]
    covered: np.ndarray
    limits: np.ndarray

    def relaxed(self) -> Relaxed | None:
        """The solution over the reals; None if there is none."""
        return self._solved(self._matrices(0.0))

    def plans_with(self, part: int, plans: Sequence[int]) -> list[np.ndarray]:
        """Plans of the only group, rounded from the best mixtures in which a part, alone of its kind, follows each of
        some plans: the plan that each part follows; int64 [parts] each. None where no mixture fits."""
        (group,), matrices, found = self.groups, self._matrices_of_plans(), []
        plan_of = group.options_of(part)
        for option in (option for option, plan in plan_of.items() if plan in plans):
            least, most = np.zeros(len(matrices.cost)), np.full(len(matrices.cost), np.inf)
            most[[1 + other for other in plan_of]] = 0.0
            least[1 + option] = most[1 + option] = 1.0
            if (relaxed := self._solved(matrices, least, most)) is not None:
                found.append(group.plan_of_parts(group.rounded(relaxed.taken[0][1:])[0]))
        return found

    def integral(self, relaxed: Relaxed, relative_gap: float, to_beat_s: float) -> list[np.ndarray]:
        """Plans of one group, int64 [decisions] each: the fastest that is made of the known ones, within a gap, or some
        good ones where that one takes long to find; none if none is found.

        Args:
          relaxed: The solution over the reals.
          to_beat_s: No plan is of use that takes as long.
        """
        (group,) = self.groups
        matrices = self._matrices_of_plans()
        if len(group.kind) > _MOST_OPTIONS:
            return list(self._dived(group, relaxed, matrices, to_beat_s))
        num_free = self.covered.shape[1]
        found = least_integral(
            matrices,
            np.arange(len(matrices.cost)) < len(matrices.cost) - num_free,
            relative_gap=relative_gap,
            node_limit=_NODES,
            time_limit_s=_LIMIT_S,
        )
        return [] if found is None else [group.made(self._by_group(found)[0][1:])]

    def _dived(self, group: Group, relaxed: Relaxed, matrices: LinearProgram, to_beat_s: float) -> Iterator[np.ndarray]:
        """Plans of a group, rounded with more and more of them settled. By how much the last one exceeds the memory, so
        much less is given to what is not settled, and that is rounded again."""
        least, most = np.zeros(len(matrices.cost)), np.full(len(matrices.cost), np.inf)
        options, is_instant = slice(1, 1 + len(group.kind)), self.limits > 0
        found: Relaxed | None = relaxed
        for dive in range(_DIVES + _REPAIRS + 1):
            if found is None or found.value_s >= to_beat_s:
                return
            taken = found.taken[0][1:]
            rounded, sureness = group.rounded(taken)
            yield group.made(rounded)
            is_exact = sureness >= 1 - _EXACT
            if dive < _DIVES and not is_exact.all():
                is_settled = is_exact | (sureness >= np.median(sureness[~is_exact]))
                own = is_settled[group.kind]
                least[options][own] = most[options][own] = rounded[own]
            else:
                used = group.rows[is_instant] @ np.concatenate([[1.0], rounded])
                exceeded = (used - self.limits[is_instant]).max(initial=0.0)
                if exceeded <= 0:
                    return
                matrices = dataclasses.replace(matrices, limits=matrices.limits - exceeded * is_instant)
            found = self._solved(matrices, least, most)

    def _solved(
        self, of: LinearProgram, least: np.ndarray | float = 0.0, most: np.ndarray | float = np.inf
    ) -> Relaxed | None:
        """The solution over the reals between limits of the variables; None if there is none."""
        least, most = (np.full(len(of.cost), limit) for limit in (least, most))
        found = least_linear(of, least, most)
        return None if found is None else Relaxed(found.value, found.multipliers, self._by_group(found.variables))

    def mixed(self, relaxed: Relaxed) -> tuple[OwnTimes, Taken]:
        """What a mixture adds to a step, and what it takes."""
        each = [g.mixed(taken, self.tabulated) for g, taken in zip(self.groups, relaxed.taken, strict=True)]
        summed = [np.sum(arrays, axis=0) for arrays in zip(*each, strict=True)]
        return OwnTimes(*summed[:3]), Taken(*summed[3:])

    def undecided(self, relaxed: Relaxed) -> tuple[int, ...]:
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

    def _matrices_of_plans(self) -> LinearProgram:
        """The program that plans are made by: with what sending costs, and a little less memory."""
        matrices = self._matrices(_SENT)
        return dataclasses.replace(matrices, limits=matrices.limits * (1 - _MARGIN))

    def _matrices(self, sent: float) -> LinearProgram:
        """The program over groups, then intervals between ends.

        Args:
          sent: What sending costs of its time although it hides.
        """
        intervals = self.covered.shape[1]
        cost_s = np.concatenate([*(g.costs_s + sent * g.sent_s for g in self.groups), np.ones(intervals)])
        rows = csr_array(np.concatenate([*(g.rows for g in self.groups), -self.covered], axis=1))
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
        return LinearProgram(cost_s, rows, self.limits, equal, np.concatenate([np.ones(1), np.zeros(row - 1)]))


def parts_and_slots(tabulated: Tabulated, plans: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """The decisions of each part of some plans, int64 [plans, decisions], and for each owner the number of its part,
    counted from 1; 0 where all plans agree; int64 [owners]."""
    part_of = parts_of(tabulated, plans)
    num_parts = int(part_of.max()) + 1
    order = np.argsort(part_of, kind="stable")
    ends = np.searchsorted(part_of[order], np.arange(num_parts + 1))
    source, target = tabulated.columns.source, tabulated.columns.target
    # if both ends of an edge are in a part, it is the same
    slot = 1 + np.concatenate([part_of, np.maximum(part_of[source], part_of[target])])
    return [order[start:stop] for start, stop in itertools.pairwise(ends.tolist())], slot


def parts_of(tabulated: Tabulated, plans: np.ndarray) -> np.ndarray:
    """The part of each decision, int64 [decisions]: joined by edges between decisions in which plans differ; or -1."""
    differs = (plans != plans[0]).any(axis=0)
    source, target = tabulated.columns.source, tabulated.columns.target
    joins = differs[source] & differs[target]
    ends, count = (source[joins], target[joins]), plans.shape[1]
    _, component = connected_components(coo_array((np.ones(joins.sum()), ends), shape=(count, count)), directed=False)
    part_of = np.full(count, -1, np.int64)
    part_of[differs] = np.unique(component[differs], return_inverse=True)[1]
    return part_of
