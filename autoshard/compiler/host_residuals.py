"""Residuals in host memory: which of what the backward pass reads may lie there meanwhile, and how that is ordered.

A residual is made in the forward pass and read again in the backward pass. In between, its device can do without it: it
is copied to the host behind the products that follow, and back behind those before its next reader (Rhu et al. 2016,
vDNN, arXiv:1602.08124). Left alone, XLA:GPU's scheduler, which works from the end, copies out as late as it can, so
that all residuals are on the device together. So an operand of a later product waits for the copy out, and the copy
back waits for an operand of an earlier one. Where kernels hide copies, both stand where the plan's own schedule ends
and begins them, and a product behind the copy back waits for it: the scheduler takes copies to run beside each other,
and would begin all that one layer reads just before it.

What reads a residual after the gap must read it alone: a value that the compiler computes inside its readers
(`fusion.py`), or another name of the same memory, would keep the buffer on the device. Layers under `jax.checkpoint`
read their residuals as they are.
"""

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from autoshard.compiler.analysis import ProgramAnalysis
from autoshard.compiler.host_state import LEAST_BYTES
from autoshard.graph.computations import Computation, Instruction, first_operation, last_operation
from autoshard.graph.equation_plan import EquationPlan, HostMove
from autoshard.graph.graph import OperationKind

BEHIND_PRODUCTS = 8
"""How many products a copy out has to itself, and a copy back: those of a layer of a transformer. More keep more on the
device, fewer hide less of a copy, which takes as long as a product or two of such a layer (53 GB/s on an H100)."""

LEAST_AWAY = 4
"""How many products a residual is away at least, beside those."""


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """An equation one of whose operands can wait: its number, the operand's slot, and its first operation."""

    equation: int
    operand: int
    operation: int


@dataclasses.dataclass(frozen=True, slots=True)
class Residual:
    """A value that may lie in the memory of the host between the passes.

    Attributes:
      value: What is copied. buffer: The value in whose buffer it is; mostly itself.
      computation: The number of the computation that makes it, among `HostResiduals.waiting`. trips: How often it runs.
      equation, result: What makes it: an equation and its result slot.
      made, used: One past the operation that makes it, and the last that reads it in the forward pass.
      read: The operation that reads it in the backward pass.
      out: The last that may wait for the copy out. back: The first that the copy back may wait for.
    """

    value: int
    buffer: int
    computation: int
    trips: float
    equation: int
    result: int
    made: int
    used: int
    read: int
    out: Waiting
    back: Waiting

    @property
    def away(self) -> tuple[int, int]:
        """The operations during which it is not on the device."""
        return self.out.operation, self.back.operation

    @property
    def windows(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The operations beside which it can be copied out, and back (`Overlap`)."""
        return (self.made, self.out.operation), (self.back.operation, self.read)


@dataclasses.dataclass(frozen=True, slots=True)
class CopyTimes:
    """When a plan's own schedule copies a residual, by operations.

    Attributes:
      out_by: Before which one it is on the host.
      begun, back_by: Beside which one the copy back begins, and before which it ends.
    """

    out_by: int
    begun: int
    back_by: int


class HostResiduals:
    """The residuals of a program.

    Attributes:
      all: Those that may lie in the memory of the host, in the order in which they are made.
      waiting: What can wait for a copy, in order; of the whole program, and of the bodies of its scans, such as that
        over micro-batches.
    """

    def __init__(self, analysis: ProgramAnalysis):
        finders = [_Finder(analysis, n, own) for n, own in enumerate(_loop_bodies(analysis.entry))]
        found = itertools.chain.from_iterable(finder.found() for finder in finders)
        self.all = tuple(sorted(found, key=lambda r: (r.made, r.value)))
        self.waiting = tuple(finder.waiting for finder in finders)

    def ordered(
        self, equations: Mapping[int, EquationPlan], in_host: Mapping[int, CopyTimes | None]
    ) -> dict[int, EquationPlan]:
        """What a plan says of each equation, where the residuals with numbers `in_host` leave the devices.

        `in_host`: When each is copied; None for as late and as early as it may be.
        """
        found = dict(equations)

        def say(field: str, residual: Residual, by: Waiting) -> None:
            own = found.get(by.equation, EquationPlan())
            move = HostMove(by.equation - residual.equation, residual.result, by.operand)
            found[by.equation] = dataclasses.replace(own, **{field: (*getattr(own, field), move)})

        starts_of = [[w.operation for w in own] for own in self.waiting]
        for number, times in sorted(in_host.items()):
            residual = self.all[number]
            waiting, starts = self.waiting[residual.computation], starts_of[residual.computation]
            out, back, arrived = residual.out, residual.back, None
            if times is not None:
                first = bisect.bisect_left(starts, max(times.out_by, residual.used))
                out = min(waiting[first], out, key=lambda w: w.operation)
                begin = bisect.bisect_right(starts, times.begun) - 1
                back = max(waiting[begin], back, key=lambda w: w.operation)
                end = bisect.bisect_left(starts, max(times.back_by, back.operation + 1))
                if end < len(starts) and starts[end] < residual.read:
                    arrived = waiting[end]
            say("copies_out", residual, out)
            say("copies_back", residual, back)
            if arrived is not None:
                say("back_before", residual, arrived)
        return dict(sorted(found.items()))


class _Gap(NamedTuple):
    """What is needed last before a gap, and first behind it: positions of instructions."""

    before: int
    behind: int


class _Finder:
    """Finds the residuals of one computation; `HostResiduals` is its only user."""

    def __init__(self, analysis: ProgramAnalysis, number: int, computation: Computation):
        self._analysis, self._graph, live = analysis, analysis.graph, analysis.live
        self._number = number
        self._trips = next((i.operation.trips for i in computation if i.operation is not None), 1.0)
        self._entry = [i for i in computation if i.operation is not None or i.nested]
        self._made_at = {r: k for k, i in enumerate(self._entry) for r in i.results if r is not None}
        self._read_at: dict[int, list[int]] = collections.defaultdict(list)
        for k, instruction in enumerate(self._entry):
            for value in dict.fromkeys(o for o in instruction.operands if o is not None):
                self._read_at[value].append(k)
        # the number of products before each instruction, and when each is done
        count, self._before, self._done = 0, [], []
        for instruction in self._entry:
            self._before.append(count)
            count += _num_products(instruction)
            self._done.append(count)
        # by buffer, all that is another name of it or computed from it inside its readers
        self._names: dict[int, list[int]] = collections.defaultdict(list)
        for value, root in live.root.items():
            self._names[root].append(value)
        self._fused: dict[int, set[int]] = collections.defaultdict(set)
        for value, sources in live.made_of.items():
            for source in sources:
                self._fused[live.root.get(source, source)].add(value)
        self._waiting = {k: w for k in range(len(self._entry)) if (w := self._waiting_at(k)) is not None}
        self.waiting = tuple(self._waiting.values())

    def found(self) -> Iterator[Residual]:
        """All residuals, in no order."""
        analysis, live, values = self._analysis, self._analysis.live, self._graph.values
        ranges = collections.Counter(life.value for life in live.ranges)
        fixed = {*analysis.weights, *analysis.gradients, *analysis.chains.outputs}
        arguments = {a.value for a in self._graph.arguments}
        for life in live.ranges:
            names = [life.value, *self._names[life.value]]
            is_made = self._made_at.keys() & set(names) and not any(map(self._is_handed_on, names))
            is_own = ranges[life.value] == 1 and fixed.isdisjoint(names) and life.value not in arguments
            if is_made and is_own and values[life.value].size_bytes >= LEAST_BYTES and values[life.value].shape:
                if (own := self._of_buffer(life.value, names)) is not None:
                    yield own

    def _is_handed_on(self, value: int) -> bool:
        """Whether a loop or conditional around it hands a value on: to its next iteration, or out of it."""
        chains = self._analysis.chains
        made = chains.producer[value]
        return made is None or any(
            o.kind is not OperationKind.EQUATION and chains.loop_nest[o.index] == chains.loop_nest[made.index]
            for o, _ in chains.consumers[value]
        )

    def _of_buffer(self, buffer: int, names: Sequence[int]) -> Residual | None:
        """The residual in a buffer; None if there is none."""
        related = {*names, *self._fused[buffer]}
        points = {k for v in related for k in (self._made_at.get(v), *self._read_at[v]) if k is not None}
        gap = self._widest_gap(sorted(points))
        if gap is None:
            return None
        crossing = [v for v in related if self._made_at.get(v, gap.behind) <= gap.before and self._is_read(v, gap)]
        if len(crossing) != 1 or crossing[0] not in names:
            return None
        return self._placed(crossing[0], buffer, gap)

    def _is_read(self, value: int, gap: _Gap) -> bool:
        """Whether a value is read behind a gap."""
        return max(self._read_at[value], default=-1) > gap.before

    def _widest_gap(self, points: Sequence[int]) -> _Gap | None:
        """Where most products lie between two uses of a buffer; None if those are too few."""
        gaps = [_Gap(*pair) for pair in zip(points, points[1:], strict=False)]
        widest = max(gaps, key=lambda g: self._before[g.behind] - self._done[g.before], default=None)
        if widest is None or self._before[widest.behind] - self._done[widest.before] < LEAST_AWAY:
            return None
        return widest

    def _placed(self, value: int, buffer: int, gap: _Gap) -> Residual | None:
        """The residual with the equations that wait; None if it would hardly be away."""
        made = self._made_at[value]
        leaves = max(bisect.bisect_left(self._before, self._done[made] + BEHIND_PRODUCTS), gap.before + 1)
        comes = bisect.bisect_right(self._before, self._before[gap.behind] - BEHIND_PRODUCTS) - 1
        out = next((k for k in range(leaves, gap.behind) if k in self._waiting), None)
        back = next((k for k in range(comes, gap.before, -1) if k in self._waiting), None)
        if out is None or back is None or self._before[back] - self._before[out] < LEAST_AWAY:
            return None
        maker = self._entry[made]
        return Residual(
            value,
            buffer,
            self._number,
            self._trips,
            maker.equation,
            maker.results.index(value),
            last_operation(maker) + 1,
            last_operation(self._entry[gap.before]) + 1,
            first_operation(self._entry[gap.behind]),
            self._waiting[out],
            self._waiting[back],
        )

    def _waiting_at(self, at: int) -> Waiting | None:
        """A product, or what nests some, whose activation that is made last can wait; None for anything else."""
        instruction = self._entry[at]
        if instruction.operation is not None and not instruction.operation.rule.is_heavy:
            return None
        made = {
            slot: self._made_at[o]
            for slot, o in enumerate(instruction.operands)
            if o in self._made_at and o not in self._analysis.weights and self._graph.values[o].shape
        }
        if not made:
            return None
        return Waiting(instruction.equation, max(made, key=lambda slot: made[slot]), first_operation(instruction))


def _loop_bodies(entry: Computation) -> Iterator[Computation]:
    """A computation, and the bodies of its scans, and of theirs."""
    yield entry
    for instruction in entry:
        if instruction.name == "scan":
            for nested in instruction.nested:
                yield from _loop_bodies(nested)


def _num_products(instruction: Instruction) -> int:
    """How many heavy kernels an equation is or contains."""
    if instruction.operation is not None:
        return int(instruction.operation.rule.is_heavy)
    return sum(_num_products(inner) for nested in instruction.nested for inner in nested)
