"""What each choice adds to the time of a step, so that any plan of a problem is timed without being read.

With x a plan, the kernels of a step take sum_i kernel_i(x_i), the collectives that they wait for waited_o(x), and those
that can run beside kernels hideable_o(x), each within its window; the owners o are decisions and edges. All three are
read off prices (`overlap.py`), which are linear in them: without weights a problem costs kernels and waited
collectives, and with all weight on the whole step `(1 - rho)` kernels and all collectives. `timeline.py` gives the same
times of one plan, with what they are about.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from autoshard.cost.exposure import Hideable, Stretch, exposure
from autoshard.planner.build import Formulation, repriced
from autoshard.planner.overlap import StretchWeights
from autoshard.solver.tabulated import Tables, Tabulated, cost_tables


@dataclasses.dataclass(frozen=True, slots=True)
class OwnTimes:
    """What each owner adds to a step under a plan, in seconds; float64 [owners], edges behind decisions.

    Attributes:
      kernels_s: Kernels. least_s: Kernels and the collectives that they wait for. hideable_s: What can hide.
    """

    kernels_s: np.ndarray
    least_s: np.ndarray
    hideable_s: np.ndarray


class StepTimes:
    """Times the plans of a problem whose collectives hide.

    Attributes:
      tabulated: The problem.
    """

    def __init__(self, f: Formulation) -> None:
        """Prices the problem twice."""
        self.num_operations, self.share = len(f.program.graph.operations), f.overlap.share
        self.tabulated = Tabulated(f.problem)
        least = repriced(f, StretchWeights(())).problem
        all_ = repriced(f, StretchWeights(((1.0, (0, self.num_operations)),))).problem
        self._least, self._all = cost_tables(least.nodes, least.edges), cost_tables(all_.nodes, all_.edges)
        first, self._kernels = len(f.program.graph.arguments), Tables(_kernels_of(f))
        self._place = np.array([0] * first + list(f.overlap.analysis.kernel_of), np.int64)
        windows = [(o, *window, 1 / len(own)) for o, own in enumerate(_windows_of(f)) for window in own]
        self._owner, self._start, self._stop = np.array([w[:3] for w in windows], np.int64).reshape(-1, 3).T
        self._part = np.array([w[3] for w in windows], np.float64)

    def of(self, choices: np.ndarray) -> OwnTimes:
        """What each owner adds under a plan; choices: int64 [decisions]."""
        kernels_s = np.zeros(self.tabulated.num_owners)
        kernels_s[: self.tabulated.num_nodes] = self._kernels.at(choices)
        least_s, all_s = (self.tabulated.costs(tables, choices) for tables in (self._least, self._all))
        return OwnTimes(kernels_s, least_s, np.maximum(all_s - least_s + self.share * kernels_s, 0.0))

    def waited_s(self, times: OwnTimes, stretch: Stretch) -> np.ndarray:
        """What each owner adds to what is waited for within a stretch at least; float64 [owners]."""
        within, inside = self._within(stretch)
        return within * times.hideable_s - self.share * inside * times.kernels_s

    def exposed(self, times: OwnTimes) -> tuple[tuple[Stretch, ...], float]:
        """The stretches in which more is to be sent than hides, and what kernels wait in all, in seconds."""
        beside_s = times.kernels_s[: self.tabulated.num_nodes]
        kernels_s = np.bincount(self._place, beside_s, self.num_operations)
        sent_s = self._part * times.hideable_s[self._owner]
        sent = np.flatnonzero(sent_s > 0)
        start, stop = self._start[sent], self._stop[sent]
        # only where kernels take time, or something begins or ends, does anything happen
        at = np.unique(np.concatenate([np.flatnonzero(kernels_s > 0), start, stop]))
        at = at[at < self.num_operations]
        places = (np.searchsorted(at, start).tolist(), np.searchsorted(at, stop).tolist(), sent_s[sent].tolist())
        found = exposure(kernels_s[at].tolist(), [Hideable(*c) for c in zip(*places, strict=True)], self.share)
        ends = [*at.tolist(), self.num_operations]
        return tuple((ends[first], ends[last]) for first, last in found.stretches), found.total_s

    @functools.lru_cache(maxsize=256)  # noqa: B019 - one for each search, which ends with it
    def _within(self, stretch: Stretch) -> tuple[np.ndarray, np.ndarray]:
        """Which part of an owner's collectives lies within a stretch, and whether its kernels do."""
        first, last = stretch
        lies = (first <= self._start) & (self._stop <= last)
        owners, inside = self.tabulated.num_owners, np.zeros(self.tabulated.num_owners)
        inside[: self.tabulated.num_nodes] = (first <= self._place) & (self._place < last)
        return np.bincount(self._owner[lies], self._part[lies], owners), inside


def _kernels_of(f: Formulation) -> list[np.ndarray]:
    """The time of each decision's kernels, by choice."""
    made: dict[tuple, np.ndarray] = {}
    own = [np.zeros(len(layouts)) for layouts in f.argument_layouts]
    for i in range(len(own)):
        own[i] = np.zeros(len(f.problem.nodes[i].costs))
    for group, table, decision in zip(f.program.groups, f.tables, f.decisions[len(own) :], strict=True):
        key = id(table), decision.rows, group.trips
        if key not in made:
            made[key] = group.trips * table.compute_s[list(decision.rows)]
        own.append(made[key])
    return own


def _windows_of(f: Formulation) -> list[Sequence[tuple[int, int]]]:
    """When the collectives of each owner can run, for as many equal parts of them; none where kernels wait for them."""
    overlap = f.overlap
    found: list[Sequence[tuple[int, int]]] = [()] * len(f.program.graph.arguments)
    for group in f.program.groups:
        hides = overlap.is_reduced_freely(group) and group.index not in overlap.analysis.combined.scalar_shares
        found.append((overlap.window(group.writes[-1].value, None),) if hides else ())
    for flow in f.flows:
        is_free = overlap.is_free(flow.value)
        found.append([overlap.window(flow.value, reader) for reader in flow.makings] if is_free else ())
    return [[(start, stop) for start, stop in own] for own in found]
