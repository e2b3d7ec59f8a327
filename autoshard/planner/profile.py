"""What a step does and holds at every time: kernels, collectives and memory on one axis, with the user's lines.

Kernels run one after another in program order, the repetitions of a loop at once, each kernel for all of them. Before
each stands what it waits for: collectives that cannot hide, and what is left of those that can, as the compiler
schedules them (`planner/compiled_timeline.py`); a gather that it leaves out is nowhere. The step ends with what the end
waits for, so that it is as long as `Estimate.step_s` says.

Many layers do and hold the same; what is equal is told once and referred to by its position.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from autoshard.compiler.buffer_uses import BufferKind, BufferUse
from autoshard.graph.graph import Graph, Operation, OperationKind
from autoshard.graph.layout import SpecEntries
from autoshard.planner.decode import Evaluation
from autoshard.planner.peak import memory_items
from autoshard.planner.timeline import Sending, Timeline


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """What is held in memory: its name, class and global shape as in `MemoryItem`, and the line that makes it.

    `source`: Of an argument, the line that reads it first.
    """

    name: str
    memory_class: str
    shape: tuple[int, ...]
    source: str


class Held(NamedTuple):
    """A tensor in memory while `start <= instant < stop`: its position in `StepProfile.tensors`, and on one device."""

    tensor: int
    start: int
    stop: int
    size_bytes: int


class Run(NamedTuple):
    """A kernel or collective at work, by its position in `Estimate.compute` or `Estimate.communication`."""

    item: int
    start_s: float
    stop_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Cause:
    """Why a collective runs.

    Attributes:
      made_by: What makes the tensor, or its path if it is an argument.
      before: Its layout; None of partial results, which are summed.
      after: The layout that it gets.
    """

    made_by: str
    before: SpecEntries | None
    after: SpecEntries


@dataclasses.dataclass(frozen=True, slots=True)
class StepProfile:
    """A step over time, on one device.

    Attributes:
      instants_s: When what is in memory changes; it stays so until the next instant, and the last until the end.
      tensors: What is ever in memory. held: When, and how much of it.
      kernels: What runs one after another.
      waited: Collectives that kernels wait for. hidden: Those that run beside kernels.
      causes: Why collectives run. cause_of: For each of `Estimate.communication`, its cause.
      parameter_of: For each of them, the argument that it gathers or whose new value it makes; -1 for activations.
      work_for: For each of `Estimate.compute`, the argument that it reads or makes the new value of; -1 for none.
      sources: For each argument, the line that reads it first.
    """

    instants_s: tuple[float, ...]
    tensors: tuple[Tensor, ...]
    held: tuple[Held, ...]
    kernels: tuple[Run, ...]
    waited: tuple[Run, ...]
    hidden: tuple[Run, ...]
    causes: tuple[Cause, ...]
    cause_of: tuple[int, ...]
    parameter_of: tuple[int, ...]
    work_for: tuple[int, ...]
    sources: tuple[str, ...]


def step_profile(e: Evaluation) -> StepProfile:
    """The profile of a solution; positions are those of `Evaluation.estimate`."""
    times, graph = e.compiled_times, e.reader.graph
    kernels, waited, hidden, starts_s = _laid_out(times, len(graph.operations))
    arguments = _Arguments(graph)
    tensors, held = _held(e, arguments.sources)
    causes: dict[Cause, int] = {}
    cause_of = [causes.setdefault(_cause(e, about), len(causes)) for about in times.sendings]
    work_for = [arguments.of_operations(e.reader.f.program.groups[g].operations) for g, _ in times.kernels]
    parameter_of = [arguments.of_value(about.value) for about in times.sendings]
    by_time, by_exposure = e.compute_order, e.communication_order
    position = {n: k for k, n in enumerate(by_time)}
    sent = {n: k for k, n in enumerate(by_exposure)}
    return StepProfile(
        tuple([_short(starts_s[o]) for o in e.held.instants.tolist()]),
        tensors,
        held,
        _runs(kernels, position),
        _runs(waited, sent),
        _runs(hidden, sent),
        tuple(causes),
        tuple([cause_of[n] for n in by_exposure]),
        tuple([parameter_of[n] for n in by_exposure]),
        tuple([work_for[n] for n in by_time]),
        arguments.sources,
    )


def _runs(runs: Iterable[Run], position: dict[int, int]) -> tuple[Run, ...]:
    return tuple([Run(position[r.item], _short(r.start_s), _short(r.stop_s)) for r in runs])


def _short(time_s: float) -> float:
    """Eight digits: a picosecond of a step of 10 ms."""
    return float(f"{time_s:.8g}")


def _laid_out(times: Timeline, num_operations: int) -> tuple[list[Run], list[Run], list[Run], list[float]]:
    """Kernels, waited collectives, hidden collectives; and when each operation starts, the last entry being the end."""
    kernels: list[list[int]] = [[] for _ in range(num_operations)]
    for item, (_, operation) in enumerate(times.kernels):
        kernels[operation].append(item)
    before: list[list[tuple[int, float]]] = [[] for _ in range(num_operations + 1)]
    item_of = [0] * len(times.hideable)
    for item, (c, about) in enumerate(zip(times.communication, times.sendings, strict=True)):
        hiding = {times.hideable[part].stop for part in about.hideable}
        for part in about.hideable:
            item_of[part] = item
        for operation in about.waiting:
            if operation not in hiding:
                before[operation].append((item, c.time_s / len(about.waiting)))
    for part, operation, time_s in times.found.waits:
        before[operation].append((item_of[part], time_s))
    clock_s, starts_s = 0.0, []
    runs: list[Run] = []
    waited: list[Run] = []
    for operation in range(num_operations + 1):
        for item, time_s in before[operation]:
            if time_s > 0:
                waited.append(Run(item, clock_s, clock_s + time_s))
                clock_s += time_s
        starts_s.append(clock_s)
        for item in kernels[operation] if operation < num_operations else ():
            runs.append(Run(item, clock_s, clock_s + times.compute[item].compute_s))
            clock_s += times.compute[item].compute_s
    hidden: list[Run] = []
    for part, kernel, start, stop in times.found.pieces:
        first_s, length_s, item = starts_s[kernel], times.kernels_s[kernel], item_of[part]
        span = Run(item, first_s + start * length_s, first_s + stop * length_s)
        if hidden and hidden[-1].item == item and abs(hidden[-1].stop_s - span.start_s) <= 1e-9 * clock_s:
            span = hidden.pop()._replace(stop_s=span.stop_s)
        hidden.append(span)
    hidden.sort(key=lambda run: run.start_s)  # the compiler may run kernels in another order than they stand here
    return runs, waited, hidden, starts_s


def _held(e: Evaluation, sources: Sequence[str]) -> tuple[tuple[Tensor, ...], tuple[Held, ...]]:
    """What is in memory and when; what is equal and there at the same time, together."""
    f, held = e.reader.f, e.held
    graph = f.program.graph
    source_of = {a.value: s for a, s in zip(graph.arguments, sources, strict=True)}
    there = np.flatnonzero((held.sizes_bytes != 0) & (held.starts < held.stops)).tolist()
    tensors: dict[Tensor, int] = {}
    sums: dict[tuple[int, int, int], float] = {}
    for k, item in zip(there, memory_items(f, held, there), strict=True):
        source = _source(e, held.uses[k], source_of)
        place = tensors.setdefault(Tensor(item.name, item.memory_class, item.shape, source), len(tensors))
        key = place, int(held.starts[k]), int(held.stops[k])
        sums[key] = sums.get(key, 0.0) + item.size_bytes
    return tuple(tensors), tuple([Held(*key, round(size_bytes)) for key, size_bytes in sums.items()])


def _source(e: Evaluation, use: BufferUse, source_of: dict[int, str]) -> str:
    """The line that makes what a buffer holds; of an argument, the one that reads it first."""
    f = e.reader.f
    match use.kind:
        case BufferKind.VALUE | BufferKind.HOST_COPY | BufferKind.AROUND_HOST | BufferKind.OPERAND_COPY:
            value = f.flows[use.owner].value if use.value is None else use.value
            operation = f.program.analysis.chains.producer[value]
            return source_of.get(value, "") if operation is None else operation.source
        case _:
            return e.reader.graph.operations[f.program.groups[use.owner].operations[0]].source


def _cause(e: Evaluation, about: Sending) -> Cause:
    tensor, operation = e.reader.graph.values[about.value], e.reader.f.program.analysis.chains.producer[about.value]
    made_by = tensor.name if operation is None else operation.label
    before = None if about.before is None else e.reader.entries(about.value, about.before)
    return Cause(made_by, before, e.reader.entries(about.value, about.after))


class _Arguments:
    """Which argument a value is, is made of alone, or becomes the new value of.

    Followed through what is no kernel of its own and keeps the number of elements, through slices in loops and their
    stacking; a gradient is told by the parameter that is made of it last.
    """

    def __init__(self, graph: Graph):
        self._graph = graph
        self._origin = {a.value: i for i, a in enumerate(graph.arguments) if graph.values[a.value].shape}
        for operation in graph.operations:
            known = [self._origin[o] for o in operation.operands if o in self._origin]
            others = [
                o for o in operation.operands if o is not None and graph.values[o].shape and o not in self._origin
            ]
            if known and not others and len(set(known)) == 1 and self._passes_on(operation):
                self._origin.update(dict.fromkeys([r for r in operation.results if r is not None], known[0]))
        succeeded = {o.successor_of for o in graph.outputs if o.successor_of is not None}
        self._weights = succeeded or set(range(len(graph.arguments)))
        self._becomes = {
            o.value: o.successor_of for o in graph.outputs if o.successor_of is not None and o.value is not None
        }
        self._follow_back()
        self.sources = self._first_lines()

    def of_value(self, value: int) -> int:
        """The argument that a value stands for; -1 for none."""
        return self._origin.get(value, self._becomes.get(value, -1))

    def of_operations(self, operations: Sequence[int]) -> int:
        """The argument that operations work for: heavy ones count first; -1 for none."""
        ordered = sorted(operations, key=lambda o: not self._graph.operations[o].rule.is_heavy)
        for operation in (self._graph.operations[o] for o in ordered):
            for value in (*operation.results, *operation.operands):
                if value is not None and self.of_value(value) in self._weights:
                    return self.of_value(value)
        return -1

    def _passes_on(self, operation: Operation) -> bool:
        if operation.kind in (OperationKind.SCAN_SLICE, OperationKind.SCAN_STACK, OperationKind.LOOP_CARRY):
            return True
        sizes = [self._graph.values[v] for v in (*operation.operands, *operation.results) if v is not None]
        counts = {math.prod(v.shape) for v in sizes if v.shape}
        return not operation.rule.is_heavy and len(counts) == 1

    def _follow_back(self) -> None:
        """From successors back to gradients; where several are made of one value, the one that is made last counts."""
        values, made = self._graph.values, dict(self._becomes)
        for operation in reversed(self._graph.operations):
            found = [self._becomes[r] for r in operation.results if r in self._becomes]
            if not found or operation.rule.is_heavy:
                continue
            results = [r for r in operation.results if r in self._becomes]
            is_stacked = operation.kind in (OperationKind.SCAN_STACK, OperationKind.LOOP_CARRY)
            for o in operation.operands:
                if o is None or o in self._origin or not values[o].shape:
                    continue
                if not is_stacked and all(math.prod(values[o].shape) != math.prod(values[r].shape) for r in results):
                    continue
                if o not in self._becomes or o in made:
                    self._becomes[o] = found[-1]
                    made.pop(o, None)

    def _first_lines(self) -> tuple[str, ...]:
        """For each argument, the line of the first kernel that reads it; of the first operation where none does."""
        any_line: dict[int, str] = {}
        heavy_line: dict[int, str] = {}
        for operation in self._graph.operations:
            if operation.source:
                for o in operation.operands:
                    argument = -1 if o is None else self._origin.get(o, -1)
                    if argument >= 0:
                        any_line.setdefault(argument, operation.source)
                        if operation.rule.is_heavy:
                            heavy_line.setdefault(argument, operation.source)
        numbers = range(len(self._graph.arguments))
        return tuple([heavy_line.get(n, any_line.get(n, "")) for n in numbers])
