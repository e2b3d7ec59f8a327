"""What runs in a step and when: kernels one after another, and collectives that kernels wait for, or that hide."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from autoshard.cluster import CollectiveKind
from autoshard.compiler.emitted_collectives import EmittedCollectives, requested
from autoshard.compiler.solved import SolvedProgram
from autoshard.cost.collectives import Collective
from autoshard.cost.exposure import Exposure, Hideable, Stretch, exposure, exposure_of
from autoshard.cost.host_copies import host_copy_s
from autoshard.graph.graph import Operation
from autoshard.graph.groups import Group
from autoshard.graph.layout import Layout, is_gather, shard_bytes
from autoshard.planner.build import Formulation
from autoshard.planner.choices import ChoiceTable
from autoshard.planner.estimate import HOST_COPIES, RESIDUAL_COPIES, CommunicationItem, ComputeItem
from autoshard.planner.group_shapes import RegionCollective
from autoshard.planner.overlap import Window, counted_of_group, is_sent_within
from autoshard.planner.solution_reader import SolutionReader


@dataclasses.dataclass(frozen=True, slots=True)
class Sending:
    """What a collective is about.

    Attributes:
      value: The value that it sums or moves, or that its region makes.
      before: Its layout, None of a sum of partial results.
      after: What it gets; the same as before where a region moves something inside.
      waiting: The operations that wait for it, each for an equal part; the number of operations where the end does.
      hideable: Its parts among those that can run beside kernels.
    """

    value: int
    before: Layout | None
    after: Layout
    waiting: tuple[int, ...]
    hideable: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The times of a step.

    Attributes:
      compute: The kernels of each group. communication: The collectives, each with what hides of it.
      kernels: For each of `compute`, its group and the operation in whose place it runs.
      sendings: What each of `communication` is about.
      kernels_s: The time of the kernels in the place of each operation, less what transfers of their own pieces run
        beside. share: What of it collectives make use of.
      hideable: The collectives that can run beside kernels.
      stretches: Of operations, in which there is more to send than hides (`cost/exposure.py`).
      found: What of `hideable` runs beside which kernels.
      beside_s: Time of transfers beside the pieces of their own products.
    """

    compute: tuple[ComputeItem, ...]
    communication: tuple[CommunicationItem, ...]
    kernels_s: tuple[float, ...]
    share: float
    hideable: tuple[Hideable, ...]
    stretches: tuple[Stretch, ...]
    kernels: tuple[tuple[int, int], ...]
    sendings: tuple[Sending, ...]
    found: Exposure
    beside_s: float = 0.0

    @functools.cached_property
    def compute_s(self) -> float:
        """Time of all kernels."""
        return sum(c.compute_s for c in self.compute)

    @functools.cached_property
    def comm_s(self) -> float:
        """Time of all collectives."""
        return sum(c.time_s for c in self.communication)

    @property
    def hidden_s(self) -> float:
        """Time of collectives beside kernels."""
        return sum(c.hidden_s for c in self.communication)

    @property
    def step_s(self) -> float:
        """Time of the step."""
        return self.compute_s + self.comm_s - self.hidden_s

    def step_with(self, comm_s: Sequence[float]) -> float:
        """Time of the step if its collectives took other times.

        Args:
          comm_s: Of each of `communication`. What hides beside the pieces of its own product hides as much as now.
        """
        start, stop, part_s = self._hideable_columns
        now_s, hidden_s, hides, sending = self._sent_columns
        times_s = np.array(comm_s, np.float64)
        longer = np.divide(times_s, now_s, out=np.ones(len(now_s)), where=now_s != 0)
        part_s = part_s * longer[sending]
        left_s = np.where(hides, times_s, np.maximum(times_s - hidden_s, 0.0)).sum() - part_s.sum()
        kernels_s = np.array(self.kernels_s, np.float64)
        return self.compute_s + float(left_s) + exposure_of(kernels_s, start, stop, part_s, self.share).total_s

    @functools.cached_property
    def least_s(self) -> float:
        """Time of the step if all hides that can."""
        return self.compute_s + self.comm_s - self.beside_s - sum(c.time_s for c in self.hideable)

    def waited_s(self, stretches: Sequence[Stretch]) -> np.ndarray:
        """What kernels wait for within each stretch at least, added up in disjoint ones; negative where all hides."""
        start, stop, time_s = self._hideable_columns
        within_s = [time_s[(first <= start) & (stop <= last)].sum() for first, last in stretches]
        beside_s = [self._until_s[last] - self._until_s[first] for first, last in stretches]
        return np.array(within_s, np.float64) - self.share * np.array(beside_s, np.float64)

    @functools.cached_property
    def _hideable_columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The start, stop and time of what can hide."""
        start, stop = (np.array([getattr(c, end) for c in self.hideable], np.int64) for end in ("start", "stop"))
        return start, stop, np.array([c.time_s for c in self.hideable], np.float64)

    @functools.cached_property
    def _sent_columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of each collective its time, what hides of it, and whether any can; of which each that can hide is a part."""
        time_s, hidden_s = (np.array([getattr(c, of) for c in self.communication]) for of in ("time_s", "hidden_s"))
        parts = np.array([len(about.hideable) for about in self.sendings], np.int64)
        sending = np.empty(len(self.hideable), np.int64)
        sending[[part for about in self.sendings for part in about.hideable]] = np.repeat(np.arange(len(parts)), parts)
        return time_s, hidden_s, parts > 0, sending

    @functools.cached_property
    def _until_s(self) -> np.ndarray:
        """The time of all kernels before each."""
        return np.concatenate([[0.0], np.cumsum(self.kernels_s)])


def asked_for(f: Formulation, picks: Sequence[int]) -> Timeline:
    """The timeline of the solution `picks` with the collectives that it asks for, as the solver counts them."""
    return asked_for_by(SolutionReader(f, picks))


def asked_for_by(reader: SolutionReader) -> Timeline:
    """`asked_for` of a solution that is read already."""
    solved = reader.solved()
    return timeline(reader, solved, requested(solved), as_compiled=False)


def timeline(reader: SolutionReader, solved: SolvedProgram, emitted: EmittedCollectives, as_compiled: bool) -> Timeline:
    """The timeline of a solution.

    Args:
      reader: The solution. solved: Its program.
      emitted: The collectives that count.
      as_compiled: Whether copies that several groups read are made once; the solver, which sees each group by itself,
        counts them for each.
    """
    f, operations = reader.f, reader.graph.operations
    kernels_s, compute = [0.0] * len(operations), []
    communication: list[tuple[CommunicationItem, Sequence[Window]]] = []
    kernels, sendings, end = [], [], len(operations)
    moved: set[tuple[int, Layout, float, int]] = set()  # copies that are no larger are shared wherever they can be
    for group, table in zip(f.program.groups, f.tables, strict=True):
        row = reader.rows[reader.first + group.index]
        operation = operations[group.operations[0]]
        for item in _kernels_of(reader, group, table, row):
            compute.append(item)
            kernels.append((group.index, f.overlap.analysis.kernel_of[group.index]))
            kernels_s[kernels[-1][1]] += item.compute_s
        kernels_s[f.overlap.analysis.kernel_of[group.index]] -= group.trips * float(table.beside_s[row])
        if table.inside is not None:
            value = group.writes[0].value
            for own, step in table.inside.collectives:
                layout = reader.layout[value]  # at its border; inside, the program moves what it likes
                sendings.append(Sending(value, layout, layout, group.operations[:1]))
                communication.append((_item_inside(own, step, operation, group.trips), []))
        if steps := emitted.sums[group.index]:
            value, last = group.writes[0].value, group.writes[-1].value
            terms = f.overlap.of_group(group, reader.graph.values[last].shape)
            windows = f.overlap.windows_of_sum(group)
            label, trips = _label(reader, value, operation.name), emitted.trips[group.index]
            for step in counted_of_group(terms.whole, steps, solved.sums[group.index]):
                own = windows if not is_sent_within(step) and terms.hides(step) else []
                if own and terms.hides_on is not None:
                    step = dataclasses.replace(step, kind=CollectiveKind.ALL_TO_ALL)  # that is how it hides
                waiting = _waiting(f, own) or (group.operations[-1] + 1,)
                sendings.append(Sending(last, None, reader.layout[last], waiting))
                communication.append((_item(step, reader, label, value, operation, trips), own))
    for flow, move, own in zip(f.flows, solved.moves, emitted.moves, strict=True):
        value, target = flow.value, move.target
        if reader.layout[value] == target:
            continue
        operation = None
        if flow.read is not None:
            operation = operations[f.program.groups[flow.target - reader.first].operations[0]]
        label = _label(reader, value, f"input of {operation.name if operation else 'output'}")
        times, readers = flow.trips * len(flow.makings), flow.makings
        if not is_gather(reader.layout[value], target):
            fresh = {(value, target, flow.trips, place) for place in flow.places}
            times, readers = flow.trips * len(fresh - moved if as_compiled else fresh), flow.makings[:1]
            moved |= fresh
            if not times:
                continue
        terms = f.overlap.whole_of_flow(value, reader.graph.values[value].shape)
        windows = [f.overlap.window(value, o) for o in readers] if f.overlap.is_free(value) else []
        about = Sending(value, reader.layout[value], target, _waiting(f, windows) or tuple(readers) or (end,))
        for step in terms.counted(own):
            sendings.append(about)
            communication.append((_item(step, reader, label, value, operation, times), windows))
    for item, about in _state_copies(reader):
        sendings.append(about)
        communication.append((item, []))
    for item, about, windows in _residual_copies(reader):
        sendings.append(about)
        communication.append((item, windows))
    own = [
        (n, Hideable(*window, c.time_s / len(windows)))
        for n, (c, windows) in enumerate(communication)
        for window in windows
        if window[0] < window[1]
    ]
    items, hideable = [c for c, _ in communication], ()
    if f.overlap.weights is not None:
        hideable = tuple(c for _, c in own)
    found = exposure(kernels_s, hideable, f.overlap.share)
    if hideable:
        for (n, c), exposed_s in zip(own, found.exposed_s, strict=True):
            items[n] = dataclasses.replace(items[n], hidden_s=items[n].hidden_s + c.time_s - exposed_s)
        parts: dict[int, list[int]] = {}
        for part, (n, _) in enumerate(own):
            parts.setdefault(n, []).append(part)
        sendings = [
            dataclasses.replace(about, hideable=tuple(parts[n])) if n in parts else about
            for n, about in enumerate(sendings)
        ]
    return Timeline(
        tuple(compute),
        tuple(items),
        tuple(kernels_s),
        f.overlap.share,
        hideable,
        found.stretches,
        tuple(kernels),
        tuple(sendings),
        found,
        sum(c.hidden_s for c, _ in communication),
    )


def _waiting(f: Formulation, windows: Sequence[Window]) -> tuple[int, ...]:
    """The operations that wait for a collective with these windows, each for its part; none if nothing hides."""
    return () if f.overlap.weights is None else tuple([stop for _, stop in windows])


def _label(reader: SolutionReader, value: int, name: str) -> str:
    """The name of an argument; of any other value, `name`."""
    own = reader.graph.values[value].name
    return name if own[:1] == "%" else own


def _kernels_of(reader: SolutionReader, group: Group, table: ChoiceTable, row: int) -> list[ComputeItem]:
    """What a group computes: of a region, each kind of its kernels."""
    operation, trips = reader.graph.operations[group.operations[0]], group.trips
    if table.inside is not None:
        rows = [(k.name, k.source, compute_s, flops) for k, compute_s, flops in table.inside.kernels]
    else:
        rows = [(operation.name, operation.source, float(table.compute_s[row]), float(table.flops[row]))]
    return [
        ComputeItem(name, operation.equation, source, trips * flops, trips * compute_s)
        for name, source, compute_s, flops in rows
        if compute_s or flops
    ]


def _residual_copies(reader: SolutionReader) -> Iterator[tuple[CommunicationItem, Sending, Sequence[Window]]]:
    """The copies of residuals to the memory of the host and back, with the windows of both."""
    f, graph, link = reader.f, reader.graph, reader.f.mesh.host_link
    for residual in (f.all_residuals[k] for k in sorted(reader.away)):
        if link is None:
            continue
        value, made = graph.values[residual.value], f.program.analysis.chains.made_by(residual.value)
        layout = reader.layout[residual.buffer]
        size_bytes = shard_bytes(float(graph.values[residual.buffer].size_bytes), layout, f.mesh.shape)
        yield (
            CommunicationItem(
                RESIDUAL_COPIES,
                (),
                made.name,
                value.shape,
                made.source,
                2 * size_bytes * residual.trips,
                2 * host_copy_s(link, size_bytes) * residual.trips,
                residual.trips,
                made.equation,
            ),
            Sending(residual.value, layout, layout, tuple(stop for _, stop in residual.windows)),
            residual.windows,
        )


def _state_copies(reader: SolutionReader) -> Iterator[tuple[CommunicationItem, Sending]]:
    """The copies of what lies in the memory of the host; its update waits for them, in and out."""
    f, graph = reader.f, reader.graph
    link = f.mesh.host_link
    for update in f.updates:
        for read in update.reads:
            if read.argument not in reader.in_host or link is None:
                continue
            value = graph.values[graph.arguments[read.argument].value]
            layout, waiting = reader.layout[value.index], f.program.analysis.chains.consumers[value.index][0][0]
            size_bytes = shard_bytes(float(value.size_bytes), layout, f.mesh.shape)
            time_s = 2 * host_copy_s(link, size_bytes)
            yield (
                CommunicationItem(
                    HOST_COPIES, (), value.name, value.shape, waiting.source, 2 * size_bytes, time_s, 1.0, read.equation
                ),
                Sending(value.index, layout, layout, (update.stop - 1,)),
            )


def _item_inside(own: RegionCollective, step: Collective, operation: Operation, trips: float) -> CommunicationItem:
    """A collective of a region, which runs `trips` times."""
    times = trips * own.trips
    return CommunicationItem(
        step.kind.value,
        step.axes,
        f"{own.name} in {operation.name}",
        own.shape,
        own.source,
        step.wire_bytes * times,
        step.time_s * times,
        times,
        operation.equation,
    )


def _item(
    step: Collective, reader: SolutionReader, label: str, value: int, operation: Operation | None, trips: float
) -> CommunicationItem:
    """A collective, `trips` times."""
    beside_s = step.beside_s or 0.0
    return CommunicationItem(
        step.kind.value,
        step.axes,
        label,
        reader.graph.values[value].shape,
        operation.source if operation else "",
        step.wire_bytes * trips,
        (step.time_s + beside_s) * trips,
        step.count * trips,
        operation.equation if operation else None,
        beside_s * trips,
    )
