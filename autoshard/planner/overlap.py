"""Which collectives can run beside kernels, when, and how the problem prices them.

Weights are known before the layer that needs them runs, and a gradient is not needed until the update. Both transfers
are joined with others of their kind by the compiler (`cost/collectives.py`, `joined`), and can run beside the kernels
of other layers. Everything between activations is waited for, and counts in full. Under the latency-hiding schedule

    step(x) = sum of kernels + sum of waited collectives + exposed time of the others     (`cost/exposure.py`)

whose last term is the most that any disjoint stretches of kernels give, each linear in the choices x. Weights >= 0 of
some stretches, together at most 1 at any kernel, are those of an average over sets of disjoint ones (intervals make
perfect graphs; Lovasz, Normal hypergraphs and the perfect graph conjecture, 1972), and therefore bound the step of
every plan from below:

    step(x) >= sum_t (1 - rho w_t) kernel_t(x) + sum of waited collectives + sum_c w_c time_c(x)

with w_t the weight of the stretches that have kernel t, and w_c that of those within which collective c lies. That is
a problem of the same form; `plans/pricing.py` solves it, and asks which stretches bind in what it finds (Lagrangian
relaxation; Geoffrion, Lagrangean relaxation for integer programming, 1974).
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from autoshard.cluster import CollectiveKind
from autoshard.compiler.analysis import ProgramAnalysis
from autoshard.compiler.exchanged_sums import may_be_exchanged
from autoshard.compiler.hiding_spans import HidingSpans
from autoshard.compiler.options import MOST_REDUCED_BYTES, MOST_SCATTERED_BYTES
from autoshard.compiler.primitives import SUMS
from autoshard.cost.collectives import COMBINED_BYTES, Collective, Joining, changed, joined, with_fixed
from autoshard.cost.exposure import Stretch
from autoshard.graph.groups import Group


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """What counts of the time of a collective.

    Attributes:
      share: The share that counts.
      reductions: What the compiler joins of all-reduces that a gradient is done with; None if nothing.
      alike: The same of any other.
      hides_on: Axes over which a scattered sum hides, where all others count in full; None where `share` holds for all.
      latency_share: Of a sum that is joined with known others, the share of latencies and launch that it pays; None for
        anything else.
    """

    share: float = 1.0
    reductions: Joining | None = None
    alike: Joining | None = None
    hides_on: frozenset[tuple[str, ...]] | None = None
    latency_share: float | None = None

    @property
    def whole(self) -> "Terms":
        """The same, but all of the time counts."""
        return dataclasses.replace(self, share=1.0)

    def counted(
        self, steps: Sequence[Collective], planned: Sequence[Collective] | None = None
    ) -> tuple[Collective, ...]:
        """The collectives `steps` with the time that counts; `planned` are those of the plan, if the compiler changes
        them.
        """
        if self.latency_share is not None:
            share = self.latency_share
            return tuple([changed(c, lambda c: with_fixed(c, share * c.fixed_s)) for c in steps])
        is_reduced = all(c.kind is CollectiveKind.ALL_REDUCE for c in planned or steps)
        joining = self.reductions if is_reduced else self.alike
        if joining is None:
            return tuple(steps)
        parts = [joined(c, joining) for c in steps]
        shares = [self.share if self.hides(c) else 1.0 for c in steps]
        return tuple(
            [dataclasses.replace(c, time_s=s * c.time_s, slower=None) for c, s in zip(parts, shares, strict=True)]
        )

    def hides(self, step: Collective) -> bool:
        """Whether a collective can run beside kernels, if any of its group or flow can."""
        return self.hides_on is None or step.kind is CollectiveKind.REDUCE_SCATTER and step.axes in self.hides_on


def counted_of_group(
    terms: Terms, steps: Sequence[Collective], planned: Sequence[Collective] | None = None
) -> tuple[Collective, ...]:
    """`Terms.counted` of a group's collectives. Of what is sent within the group all counts: it is read at once."""
    if within := [c for c in steps if is_sent_within(c)]:
        own, of_plan = ([c for c in all_ or () if not is_sent_within(c)] for all_ in (steps, planned))
        return (*within, *terms.counted(own, of_plan)) if own else tuple(within)
    return terms.counted(steps, planned)


def is_sent_within(step: Collective) -> bool:
    """Whether a collective of a group exchanges ids or rows of a look-up, or sends pieces of a product; all others sum
    its result.
    """
    return step.kind is CollectiveKind.ALL_TO_ALL or step.beside_s is not None


Window = tuple[int, int]
"""A collective can run beside the operations `start <= o < stop`, and operation `stop` waits for it."""


@dataclasses.dataclass(frozen=True)
class StretchWeights:
    """Weights of stretches of operations: >= 0, and together at most 1 at any operation."""

    stretches: tuple[tuple[float, Stretch], ...]

    def of_operation(self, operation: int) -> float:
        """The weight of the stretches that have an operation."""
        ends, weights = self._between_ends
        return weights[bisect.bisect_right(ends, operation)]

    def of_collective(self, window: Window) -> float:
        """The weight of the stretches within which a collective lies; 1 if it can run beside nothing."""
        if window[0] >= window[1]:
            return 1.0
        weights, starts, stops = self._columns
        return float(weights[(starts <= window[0]) & (window[1] <= stops)].sum())

    def of_operations(self, operations: np.ndarray) -> np.ndarray:
        """`of_operation` of each of some; float64, for int64."""
        ends, own = self._between_ends
        return np.array(own)[np.searchsorted(np.array(ends, np.int64), operations, side="right")]

    def of_collectives(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """`of_collective` of those with each of some windows, none empty; float64, for int64."""
        windows, of_window = np.unique(np.stack([start, stop], axis=1), axis=0, return_inverse=True)
        weights, starts, stops = self._columns
        found = np.zeros(len(windows))
        for weight, first, last in zip(weights, starts, stops, strict=True):
            found[(first <= windows[:, 0]) & (windows[:, 1] <= last)] += weight
        return found[of_window.reshape(-1)]

    @functools.cached_property
    def _columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The weights, the starts and the stops."""
        ends = np.array([stretch for _, stretch in self.stretches], np.int64).reshape(-1, 2)
        return np.array([w for w, _ in self.stretches], np.float64), ends[:, 0], ends[:, 1]

    @functools.cached_property
    def _between_ends(self) -> tuple[list[int], list[float]]:
        """All ends of stretches, rising; and the weight before the first, and from each on until the next."""
        weights, starts, stops = self._columns
        ends = np.unique([starts, stops])
        within = (starts <= ends[:, None]) & (ends[:, None] < stops)
        return ends.tolist(), [0.0, *(within @ weights).tolist()]


_WORTH_A_BYTE = 0.05
"""The weight of the whole step to begin with: so much counts of what hides, so that a plan does not send for nothing.
A choice of the search, no bound depends on it."""


def first_weights(num_operations: int) -> StretchWeights:
    """The weights to begin a search with: nearly all that can hide does."""
    return StretchWeights(((_WORTH_A_BYTE, (0, num_operations)),))


@dataclasses.dataclass(frozen=True, slots=True)
class Overlap:
    """What can hide in a program, when, and what counts of it.

    Attributes:
      analysis: The program.
      share: The share of a kernel's time that collectives beside it make use of (`rho`).
      weights: Of stretches of operations; None if the schedule hides nothing, and all times add up.
      hides_sums: Whether sums hide, and not only what is moved (`Compiler.hides_sums`).
      exchanged_on: Axes over which scattered sums hide where others do not (`Compiler.hides_exchanged_sums`).
      least_bytes: Values smaller than this are neither hidden nor joined where they are moved
        (`Compiler.least_hidden_bytes`).
      spans: Behind which products the compiler has them run; None if the schedule hides nothing.
    """

    analysis: ProgramAnalysis
    share: float
    weights: StretchWeights | None
    hides_sums: bool = True
    exchanged_on: frozenset[tuple[str, ...]] = frozenset()
    least_bytes: float = 0.0
    spans: HidingSpans | None = None

    @property
    def gradients(self) -> frozenset[int]:
        """The gradients that nobody waits for: where latency is hidden, also those that loops add up."""
        return self.analysis.gradients if self.weights is None else self.analysis.accumulated

    def whole_of_flow(self, value: int, shape: Sequence[int]) -> Terms:
        """What counts when `value`, of `shape`, is resharded, if all of the time does."""
        return self._free(math.prod(shape), ()) if self.is_free(value) else Terms()

    def share_of_flow(self, value: int, readers: Sequence[int]) -> float:
        """What counts of resharding `value` for the operations `readers`, for each anew, on average."""
        return self.share_of([self.window(value, reader) for reader in readers]) if self.is_free(value) else 1.0

    def of_group(self, group: Group, shape: Sequence[int]) -> Terms:
        """What counts when the results of `group` are reduced; `shape` is that of the last."""
        scalar_share = self.analysis.combined.scalar_shares.get(group.index)
        if scalar_share is not None:
            return Terms(latency_share=scalar_share)
        if not self.is_reduced_freely(group):
            return Terms(latency_share=self.analysis.combined.awaited_shares.get(group.index))
        windows = self.windows_of_sum(group)
        if group.index in self.analysis.combined.statistics:
            return Terms(self.share_of(windows), Joining(1), Joining(1))
        hides_on = None if self.hides_sums else self.exchanged_on
        return dataclasses.replace(self._free(math.prod(shape), windows), hides_on=hides_on)

    def of_kernels(self, group: Group) -> float:
        """What counts of the time of a group's kernels."""
        if self.weights is None:
            return 1.0
        return 1 - self.share * self.weights.of_operation(self.analysis.kernel_of[group.index])

    def is_free(self, value: int) -> bool:
        """Whether nobody waits for a value to be resharded. Where sums do not hide, copies of gradients do not either:
        by then there are few products left, and XLA:TPU gathers beside nothing else."""
        is_large = self.analysis.graph.values[value].size_bytes >= self.least_bytes
        return is_large and (value in self.analysis.weights or self.hides_sums and value in self.gradients)

    def is_reduced_freely(self, group: Group) -> bool:
        """Whether nobody waits for the results of a group to be reduced."""
        return all(a.value in self.gradients for a in group.writes)

    def windows_of_sum(self, group: Group) -> list[Window]:
        """When the results of a group can be reduced beside kernels; none where they wait for that."""
        is_hidden = self.is_reduced_freely(group) and (self.hides_sums or self._may_be_exchanged(group))
        return [self.window(group.writes[-1].value, None)] if is_hidden else []

    def _may_be_exchanged(self, group: Group) -> bool:
        """Whether each sum of a group may be made by an exchange."""
        graph = self.analysis.graph
        made = [o for o in map(graph.operations.__getitem__, group.operations) if o.name not in SUMS]
        sizes = [(o.name, graph.values[o.results[0]].size_bytes) for o in made if o.results[0] is not None]
        return bool(self.exchanged_on and sizes) and all(may_be_exchanged(*of, self.least_bytes) for of in sizes)

    def window(self, value: int, reader: int | None) -> Window:
        """When a weight can be gathered for `reader`, or a gradient be moved: within the innermost loop around it, and
        within what the orders of the schedule leave it.

        No gradient is updated with before all are there where the update waits for their norm.
        """
        chains, graph = self.analysis.chains, self.analysis.graph
        if value in self.gradients or reader is None:
            made = chains.producer[value]
            start = 0 if made is None else made.index + 1
            loops = () if made is None else chains.loop_nest[made.index]
            until = self.analysis.gradients_until
            whole = until if start <= until else len(graph.operations)
            stop = graph.loops[loops[-1]].stop if loops else whole
            if self.spans is not None:
                stop = min(stop, self.spans.hidden_until(start, graph.values[value].size_bytes))
            return min(start, stop), stop
        loops = chains.loop_nest[reader] if reader < len(chains.loop_nest) else ()  # what is returned unchanged
        start = graph.loops[loops[-1]].start if loops else 0
        if self.spans is not None:
            start = max(start, min(self.spans.hidden_from(reader, graph.values[value].size_bytes), reader))
        return start, reader

    def _free(self, num_elements: int, windows: Sequence[Window]) -> Terms:
        combined = self.analysis.combined
        hides_alone = self.weights is not None and self.hides_sums  # each has products of its own to hide behind
        reduced_bytes = MOST_REDUCED_BYTES if hides_alone else COMBINED_BYTES
        alike_bytes = MOST_SCATTERED_BYTES if hides_alone else COMBINED_BYTES
        return Terms(
            self.share_of(windows),
            Joining(combined.num_reductions, reduced_bytes),
            Joining(combined.num_alike.get(num_elements, 1), alike_bytes),
        )

    def share_of(self, windows: Sequence[Window]) -> float:
        """What counts of collectives or copies with these windows, on average."""
        if self.weights is None or not windows:
            return 1.0
        return sum(map(self.weights.of_collective, windows)) / len(windows)
