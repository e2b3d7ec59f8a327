"""What each choice adds to the time of a step, so that any plan of a problem is timed without being read.

With x a plan, the kernels of a step take sum_i kernel_i(x_i), the collectives that they wait for waited_o(x), and those
that can run beside kernels hideable_o(x), each within its window; the owners o are decisions and edges. All three are
read off prices (`overlap.py`), which are linear in them: without weights a problem costs kernels and waited
collectives, and with all weight on the whole step `(1 - rho)` kernels and all collectives. `timeline.py` gives the same
times of one plan, with what they are about.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.cost.exposure import Stretch, exposure_of
from autoshard.planner.build import Formulation, left_to_branch, repriced
from autoshard.planner.overlap import StretchWeights
from autoshard.planner.stretch_copies import StretchCopies, operation_kinds
from autoshard.solver.problem import Edge, Node
from autoshard.solver.reduce.columns import columns_of
from autoshard.solver.tabulated import CostTables, Tables, Tabulated, cost_tables


@dataclasses.dataclass(frozen=True, slots=True)
class OwnTimes:
    """What each owner adds to a step under a plan, in seconds; float64 [owners], edges behind decisions.

    Attributes:
      kernels_s: Kernels, less what transfers of their own pieces run beside.
      least_s: Kernels and the collectives that they wait for. hideable_s: What can hide.
    """

    kernels_s: np.ndarray
    least_s: np.ndarray
    hideable_s: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class InLine:
    """What kernels wait in line for, behind collectives that could hide, near some plan.

    A link runs collectives whole, one after another. Of what kernels need at once, N collectives come upon it while one
    that could hide is on its way. One of t seconds is so for a share t / T of a step of T seconds, and half of it is
    left then on average (the residual life of renewal theory; Kleinrock, Queueing Systems, volume 1, 1975, 5.2). So
    kernels wait for about

        in_line = share N S / (2 T)     with S the sum of t^2 over what can hide,

    a product of two sums that are linear in the choices. Near a plan with N' and S' it is linear itself:

        in_line(x)  ~  share / (2 T) (S' N(x) + N' S(x) - N' S').

    Attributes:
      at_once_s: What one more collective that is needed at once adds, in seconds: share S' / (2 T).
      per_square_s: What one second squared of what can hide adds, in 1 / seconds: share N' / (2 T).
    """

    at_once_s: float
    per_square_s: float

    def of(self, waited_s: np.ndarray, hideable_s: np.ndarray, num_parts: np.ndarray | int) -> np.ndarray:
        """What is added by owners, or choices, of which kernels wait so long at once, and so much can hide, in so many
        parts."""
        return self.at_once_s * (waited_s > _AT_ONCE_S) + self.per_square_s * hideable_s**2 / num_parts


NOT_IN_LINE = InLine(0.0, 0.0)
"""Nothing is counted."""

_AT_ONCE_S = 1e-7
"""What is waited for at once takes longer, if anything is: sums of times are rounded."""


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """The schedule of some plans: kernels between ends of windows, and windows, ascending by stop.

    Attributes:
      starts, stops: int64 [windows]; the numbers of the ends between which each lies. num_ends: How many there are.
      kernels, sent: The owners of kernels, and of parts of what is sent. part: Which share of the owner's each is.
      place: int64; after which end each of `kernels` runs, then in which window, counted behind ends, `sent` is sent.
    """

    starts: np.ndarray
    stops: np.ndarray
    num_ends: int
    kernels: np.ndarray
    sent: np.ndarray
    part: np.ndarray
    place: np.ndarray

    def entries(self, times: OwnTimes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What a plan adds: owners, places, amounts in seconds; none that are 0."""
        owner = np.concatenate([self.kernels, self.sent])
        amount = np.concatenate([times.kernels_s[self.kernels], self.part * times.hideable_s[self.sent]])
        some = amount != 0
        return owner[some], self.place[some], amount[some]


class StepTimes:
    """Times the plans of a problem whose collectives hide. The problem is priced when the first plan is timed.

    Attributes:
      num_operations: Of the program. share: What collectives make use of, of a kernel's time.
    """

    def __init__(self, f: Formulation) -> None:
        """Of which problem."""
        self._f = f
        self.num_operations, self.share = len(f.program.graph.operations), f.overlap.share
        self._known: dict[tuple[Stretch, ...], tuple[np.ndarray, np.ndarray]] = {}

    @functools.cached_property
    def tabulated(self) -> Tabulated:
        """The problem."""
        return Tabulated(self._f.problem)

    @functools.cached_property
    def _costs(self) -> tuple[CostTables, CostTables]:
        """Of the problem without weights, and with all weight on the whole step."""
        return cost_tables(*self._unweighted), cost_tables(*self._weighted)

    @functools.cached_property
    def _unweighted(self) -> tuple[tuple[Node, ...], tuple[Edge, ...]]:
        """Nodes and edges without weights."""
        problem = repriced(self._f, StretchWeights(())).problem
        return problem.nodes, problem.edges

    @functools.cached_property
    def _weighted(self) -> tuple[tuple[Node, ...], tuple[Edge, ...]]:
        """Nodes and edges with all weight on the whole step."""
        problem = repriced(self._f, StretchWeights(((1.0, (0, self.num_operations)),))).problem
        return problem.nodes, problem.edges

    @functools.cached_property
    def _copies(self) -> StretchCopies:
        """Which stretches are copies."""
        operations, decision_of = self._f.program.graph.operations, np.full(self.num_operations, -1, np.int64)
        for group in self._f.program.groups:
            decision_of[list(group.operations)] = len(self._f.argument_layouts) + group.index
        numbers: dict[tuple[str, int], int] = {}
        own = [numbers.setdefault((o.name, id(o.rule)), len(numbers)) for o in operations]
        nodes, edges = self._unweighted
        problem = dataclasses.replace(self._f.problem, nodes=nodes, edges=edges)
        return StretchCopies(operation_kinds(columns_of(problem), decision_of, np.array(own, np.int64)))

    @functools.cached_property
    def _kernels(self) -> Tables:
        """The time of each decision's kernels."""
        return Tables(self._kernels_s)

    @functools.cached_property
    def _kernels_s(self) -> list[np.ndarray]:
        """Likewise, by choice."""
        return _kernels_of(self._f)

    @functools.cached_property
    def _place(self) -> np.ndarray:
        """The operation in whose place each decision's kernels run; int64 [decisions]."""
        arguments, residuals = [0] * len(self._f.program.graph.arguments), [0] * len(self._f.all_residuals)
        return np.array([*arguments, *self._f.overlap.analysis.kernel_of, *residuals], np.int64)

    @functools.cached_property
    def _windows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of each part of what can hide: its owner, its start and stop, int64, and which share of the owner's it is."""
        windows = [(o, *window, 1 / len(own)) for o, own in enumerate(_windows_of(self._f)) for window in own]
        owner, start, stop = np.array([w[:3] for w in windows], np.int64).reshape(-1, 3).T
        return owner, start, stop, np.array([w[3] for w in windows], np.float64)

    def of(self, choices: np.ndarray) -> OwnTimes:
        """What each owner adds under a plan; choices: int64 [decisions]."""
        kernels_s = np.zeros(self.tabulated.num_owners)
        kernels_s[: self.tabulated.num_nodes] = self._kernels.at(choices)
        least_s, all_s = (self.tabulated.costs(tables, choices) for tables in self._costs)
        return OwnTimes(kernels_s, least_s, np.maximum(_more(all_s, least_s) + self.share * kernels_s, 0.0))

    def copies_of(self, stretch: Stretch) -> tuple[Stretch, ...]:
        """The stretches over the same operations in other layers, and itself; one object for all of them."""
        return self._copies.of(stretch)

    def waited_s(self, times: OwnTimes, stretches: tuple[Stretch, ...]) -> np.ndarray:
        """What each owner adds to what is waited for within stretches at least, all together; float64 [owners]."""
        within, inside = self._within(stretches)
        return within * times.hideable_s - self.share * inside * times.kernels_s

    def in_line(self, times: OwnTimes, step_s: float, share: float) -> InLine:
        """What kernels wait in line for near a plan; `share` of it counts."""
        num_at_once, squares_s2 = (self.in_line_s(times, of).sum() for of in (InLine(1.0, 0.0), InLine(0.0, 1.0)))
        return InLine(share * float(squares_s2) / (2 * step_s), share * float(num_at_once) / (2 * step_s))

    def in_line_s(self, times: OwnTimes, prices: InLine) -> np.ndarray:
        """What each owner adds to that, but for what is the same for all plans; float64 [owners]."""
        return prices.of(times.least_s - times.kernels_s, times.hideable_s, self._num_parts)

    @functools.cached_property
    def _num_parts(self) -> np.ndarray:
        """In how many equal parts each owner sends what can hide, at least one; int64 [owners]."""
        return np.maximum(np.bincount(self._windows[0], minlength=self.tabulated.num_owners), 1)

    def priced(self, f: Formulation, weights: StretchWeights, in_line: InLine = NOT_IN_LINE) -> Formulation:
        """What `repriced` gives, by the linearity of prices, in a fraction of the time.

        Args:
          f: The problem, or a branch of it. weights: Of stretches.
          in_line: What waiting in line costs besides.
        """
        (nodes, edges), (all_nodes, all_edges) = self._unweighted, self._weighted
        of_kernels = weights.of_operations(self._place)
        of_owners, is_free, num_parts = self._shares(weights), in_line == NOT_IN_LINE, self._num_parts.tolist()
        made: dict[tuple[int, int, int, float | None, float, int], np.ndarray] = {}

        def costs(least_s: np.ndarray, all_s: np.ndarray, kernels_s: np.ndarray | None, owner: int) -> np.ndarray:
            share = of_owners.get(owner)
            weight = 0.0 if kernels_s is None else self.share * float(of_kernels[owner])
            if share is None and not weight and is_free:
                return least_s
            key = id(least_s), id(all_s), id(kernels_s), share, weight, num_parts[owner]
            if key not in made:
                own_s = np.zeros_like(least_s) if kernels_s is None else kernels_s
                total_s = least_s - weight * own_s
                if share is not None or not is_free:
                    hideable_s = np.maximum(_more(all_s, least_s) + self.share * own_s, 0.0)
                    total_s = total_s + (share or 0.0) * hideable_s
                    if not is_free:
                        total_s = total_s + in_line.of(least_s - own_s, hideable_s, num_parts[owner])
                made[key] = total_s
            return made[key]

        own = [
            Node(node.name, costs(node.costs, all_.costs, kernels_s, i))
            for i, (node, all_, kernels_s) in enumerate(zip(nodes, all_nodes, self._kernels_s, strict=True))
        ]
        moves = list(edges)
        for owner in of_owners if is_free else range(len(nodes), len(nodes) + len(edges)):
            if (e := owner - len(nodes)) >= 0:
                moves[e] = dataclasses.replace(edges[e], costs=costs(edges[e].costs, all_edges[e].costs, None, owner))
        problem = dataclasses.replace(f.problem, nodes=left_to_branch(own, f.branch), edges=tuple(moves))
        return dataclasses.replace(f, overlap=dataclasses.replace(f.overlap, weights=weights), problem=problem)

    def _shares(self, weights: StretchWeights) -> Mapping[int, float]:
        """What counts of what can hide, on average over its parts; by owner, of those that have any."""
        owner, start, stop, part = self._windows
        counts = np.bincount(owner, part * weights.of_collectives(start, stop), self.tabulated.num_owners)
        has = np.unique(owner)
        return dict(zip(has.tolist(), counts[has].tolist(), strict=True))

    def exposed(self, times: OwnTimes) -> tuple[tuple[Stretch, ...], float]:
        """The stretches in which more is to be sent than hides, and what kernels wait in all, in seconds."""
        beside_s = times.kernels_s[: self.tabulated.num_nodes]
        kernels_s = np.bincount(self._place, beside_s, self.num_operations)
        owner, start, stop, part = self._windows
        sent_s = part * times.hideable_s[owner]
        sent = np.flatnonzero(sent_s > 0)
        at, starts, stops, of = self._joined(start[sent], stop[sent])
        between_s = np.add.reduceat(kernels_s, at) if len(at) else kernels_s[:0]
        found = exposure_of(between_s, starts, stops, np.bincount(of, sent_s[sent], len(starts)), self.share)
        ends = [*at.tolist(), self.num_operations]
        return tuple((ends[first], ends[last]) for first, last in found.stretches), found.total_s

    def _joined(self, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What has the same window is as good as one, and kernels between two ends of windows are as good as one.

        Returns:
          The operations at which windows end or begin; the numbers of those between which each window lies, ascending
          by stop; and the window of each of what is sent.
        """
        windows, of = np.unique(stop * (self.num_operations + 1) + start, return_inverse=True)
        stops, starts = np.divmod(windows, self.num_operations + 1)
        at = np.unique(np.concatenate([starts, stops]))
        at = at[at < self.num_operations]
        return at, np.searchsorted(at, starts), np.searchsorted(at, stops), of

    def schedule(self, plans: Sequence[OwnTimes]) -> "Places":
        """Where what plans add to the schedule is; for all plans of which no other owners send than of these."""
        owner, start, stop, part = self._windows
        sends = np.any([times.hideable_s > 0 for times in plans], axis=0)
        sent = np.flatnonzero(sends[owner])
        at, starts, stops, of = self._joined(start[sent], stop[sent])
        after = np.searchsorted(at, self._place, side="right") - 1
        nodes = np.flatnonzero(after >= 0)
        return Places(
            starts=starts,
            stops=stops,
            num_ends=len(at),
            kernels=nodes,
            sent=owner[sent],
            place=np.concatenate([after[nodes], len(at) + of]),
            part=part[sent],
        )

    def _within(self, stretches: tuple[Stretch, ...]) -> tuple[np.ndarray, np.ndarray]:
        """How many of some stretches the parts of an owner's collectives lie within, and its kernels."""
        if stretches not in self._known:
            owner, start, stop, part = self._windows
            owners, nodes = self.tabulated.num_owners, self.tabulated.num_nodes
            within, inside = np.zeros(owners), np.zeros(owners)
            for first, last in stretches:
                lies = (first <= start) & (stop <= last)
                within += np.bincount(owner[lies], part[lies], owners)
                inside[:nodes] += (first <= self._place) & (self._place < last)
            self._known[stretches] = within, inside
        return self._known[stretches]


def _more(all_s: np.ndarray, least_s: np.ndarray) -> np.ndarray:
    """By how much the one is more than the other; 0 where both are infinite, as what is forbidden is."""
    return np.subtract(all_s, least_s, out=np.zeros_like(least_s), where=np.isfinite(least_s))


def _kernels_of(f: Formulation) -> list[np.ndarray]:
    """The time of each decision's kernels, by choice."""
    made: dict[tuple, np.ndarray] = {}
    own = [np.zeros(len(node.costs)) for node in f.problem.nodes[: len(f.program.graph.arguments)]]
    for group, table, decision in zip(f.program.groups, f.tables, f.decisions[len(own) :], strict=False):
        key = id(table), decision.rows, group.trips
        if key not in made:
            made[key] = group.trips * table.free_s[list(decision.rows)]
        own.append(made[key])
    return own + [np.zeros(2)] * len(f.all_residuals)


def _windows_of(f: Formulation) -> list[Sequence[tuple[int, int]]]:
    """When the collectives of each owner can run, for as many equal parts of them; none where kernels wait for them."""
    overlap = f.overlap
    found: list[Sequence[tuple[int, int]]] = [()] * len(f.program.graph.arguments)
    for group in f.program.groups:
        is_scalar = group.index in overlap.analysis.combined.scalar_shares
        found.append(() if is_scalar else overlap.windows_of_sum(group))
    found += [()] * len(f.all_residuals)
    for flow in f.flows:
        is_free = overlap.is_free(flow.value)
        found.append([overlap.window(flow.value, reader) for reader in flow.makings] if is_free else ())
    found += [residual.windows for residual in f.all_residuals]
    return [[(start, stop) for start, stop in own if start < stop] for own in found]
