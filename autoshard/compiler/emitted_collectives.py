"""Which collectives of a solution the compiler spares, since it sees all groups together where the solver sees each by
itself: sums that are added, sliced or accumulated, and copies that are added.

Each law is a pass of OpenXLA; none makes more than the solver counted.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence, Set

from autoshard.compiler.primitives import SUMS
from autoshard.compiler.solved import SolvedProgram
from autoshard.cost.collectives import Collective, CollectiveKind, launched, reduce_scatter
from autoshard.graph.graph import Operation, OperationKind
from autoshard.graph.groups import Group
from autoshard.graph.layout import WHOLE, Layout

_SAME_ELEMENTS = frozenset({"reshape", "squeeze", "transpose"})
"""What changes the shape alone."""
_COMMUTATIVE = SUMS | {"mul", "max", "min", "and", "or", "xor"}


@dataclasses.dataclass(frozen=True, slots=True)
class EmittedCollectives:
    """The collectives of a compiled program.

    Attributes:
      sums: The collectives of each group. trips: How often each group's run.
      moves: The collectives of each move.
      added: For the groups whose sums are added before they are reduced together, the last operation that adds them.
    """

    sums: tuple[Sequence[Collective], ...]
    trips: tuple[float, ...]
    moves: tuple[Sequence[Collective], ...]
    added: Mapping[int, int]


def requested(c: SolvedProgram) -> EmittedCollectives:
    """The collectives as the solver counts them."""
    trips = tuple([g.trips for g in c.analysis.groups])
    return EmittedCollectives(c.sums, trips, tuple([move.collectives for move in c.moves]), {})


def emitted(c: SolvedProgram) -> EmittedCollectives:
    """The collectives as the compiler makes them."""
    uses, resharded = _uses(c), c.resharded()
    merged = _gathered_last(c, uses)
    added = _added_first(c, uses, merged.operations)
    slicing = collections.defaultdict(list)
    for move in c.moves:
        slicing[move.value].append(move.target)
    graph = c.analysis.graph
    alike = (o for o in graph.operations if o.name in _SAME_ELEMENTS and o.operands[0] not in resharded)
    reshaped = {o.operands[0]: o.results[0] for o in alike if uses[o.operands[0]] == 1}
    loops = _Loops(c, uses, resharded)
    steps, trips = [], []
    for group, own in zip(c.analysis.groups, c.sums, strict=True):
        own = () if group.index in added.served else own
        if own and (value := _sum_of(group)) is not None:
            own = _sliced_at_once(c, _last_of(c, added.total_of.get(value, value), reshaped), own, slicing)
        steps.append(own)
        trips.append(loops.trips(group, own))
    moves = [m.collectives[:-1] if n in merged.moves else m.collectives for n, m in enumerate(c.moves)]
    return EmittedCollectives(tuple(steps), tuple(trips), tuple(moves), added.by)


def _uses(c: SolvedProgram) -> collections.Counter[int | None]:
    """How often each value is read."""
    graph = c.analysis.graph
    uses = collections.Counter(o for operation in graph.operations for o in operation.operands)
    uses.update(o.value for o in graph.outputs)
    return uses


def _sum_of(group: Group) -> int | None:
    """The value that a group's collectives sum: its result, or the last of the terms that it adds; None if several."""
    return group.writes[-1].value if len({a.dims for a in group.writes}) == 1 else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Merged:
    """Gathers that happen behind what reads them: the moves that need none of their own, and the operations."""

    moves: Set[int]
    operations: Set[int]


def _gathered_last(c: SolvedProgram, uses: Mapping[int | None, int]) -> _Merged:
    """Where two operands of an operation are gathered alike and nothing else reads the copies, the operation runs on
    the pieces, and its result is gathered.

    (OpenXLA, `AllGatherOptimizer`, xla/service/gpu/transforms/all_gather_optimizer.cc.)
    """
    graph = c.analysis.graph
    copies = collections.Counter((move.value, move.target) for move in c.moves)
    gathered: dict[tuple[int, int | None], tuple[int, tuple]] = {}  # (operation, value) -> move, and how it is gathered
    for n, move in enumerate(c.moves):
        steps, value = move.collectives, graph.values[move.value]
        if not steps or steps[-1].kind is not CollectiveKind.ALL_GATHER:
            continue
        readers = c.readers(move)
        if len(readers) == 1 and copies[move.value, move.target] == 1 and move.itemsize_bytes == value.itemsize_bytes:
            how = value.shape, value.dtype, c.layouts[move.value], move.target, move.trips
            gathered[readers[0], move.value] = n, how
    spared: set[int] = set()
    merged: set[int] = set()
    behind: dict[int | None, tuple[int, tuple]] = {}  # results that are gathered by themselves
    for operation in graph.operations:
        if operation.name not in _COMMUTATIVE or len(set(operation.operands)) != 2:
            continue
        own = (gathered.get((operation.index, o)) for o in operation.operands)
        late = (behind.get(o) if uses[o] == 1 else None for o in operation.operands)
        first, second = (copy or other for copy, other in zip(own, late, strict=True))
        if first is None or second is None or first[1] != second[1]:
            continue
        spared.add(second[0])
        merged.add(operation.index)
        behind[operation.results[0]] = first
    return _Merged(spared, merged)


@dataclasses.dataclass(frozen=True, slots=True)
class _Added:
    """Sums of groups that are added before they are reduced together.

    Attributes:
      served: The groups whose sums are added to another's, whose collective serves both.
      total_of: For the sum of each group whose collective does, the total that is reduced.
      by: For all of these groups, the last operation that adds them.
    """

    served: Set[int]
    total_of: Mapping[int, int]
    by: Mapping[int, int]


def _added_first(c: SolvedProgram, uses: Mapping[int | None, int], gathered_last: Set[int]) -> _Added:
    """The sums that are added before they are reduced.

    `gathered_last`: The operations whose operands are gathered alike behind them.

    (OpenXLA, `AllReduceReassociate` and `ReduceScatterReassociate`, xla/service/all_reduce_reassociate.cc.)
    """
    graph = c.analysis.graph
    reduced: dict[int, tuple[int, int, tuple]] = {}  # value -> the group that reduces it, its sum, and how
    for group, steps in zip(c.analysis.groups, c.sums, strict=True):
        value = _sum_of(group)
        # else rows of a look-up are exchanged, or pieces of a product sent
        is_sum = all(s.kind is not CollectiveKind.ALL_TO_ALL and s.beside_s is None for s in steps)
        if steps and is_sum and value is not None and uses[value] == 1:
            reduced[value] = group.index, value, (group.trips, *((s.kind, s.axes, s.buffer_bytes) for s in steps))
    served: set[int] = set()
    total_of: dict[int, int] = {}
    by: dict[int, int] = {}
    for operation in graph.operations:
        is_addition = operation.name in SUMS
        if not is_addition and operation.name not in ("reshape", "squeeze", "reduce_sum"):
            continue
        operands = [o for o in operation.operands if o in reduced]
        if len(operands) < len(operation.operands):
            continue
        (result,) = operation.results
        if result is None or result not in c.layouts:
            continue
        (last, value, how), *others = (reduced[o] for o in operands)
        if not others:
            is_same = math.prod(graph.values[operands[0]].shape) == math.prod(graph.values[result].shape)
        else:
            is_late = operation.index in gathered_last
            layouts = {c.layouts[o] for o in (*operands, *(() if is_late else (result,)))}
            is_same = len(layouts) == 1 and all(other == how and group != last for group, _, other in others)
            if is_same:
                served.update(group for group, _, _ in others)
                by.update(dict.fromkeys((last, *(group for group, _, _ in others)), operation.index))
                if not is_late:
                    total_of[value] = result
            is_same = is_same and not is_late
        if is_same and uses[result] == 1:
            reduced.setdefault(result, (last, value, how))
    return _Added(served, total_of, by)


def _last_of(c: SolvedProgram, value: int, reshaped: Mapping[int | None, int | None]) -> int:
    """What `value` becomes by mere changes of shape; `reshaped` tells the results of those that alone read a value."""
    while (reshape := reshaped.get(value)) is not None and reshape in c.layouts:
        value = reshape
    return value


def _sliced_at_once(
    c: SolvedProgram, value: int, steps: Sequence[Collective], readers: Mapping[int, Sequence[Layout]]
) -> Sequence[Collective]:
    """`steps`, where the compiler makes a reduce-scatter of an all-reduce: all that read the sum slice it alike.

    A plan is free to choose reduce-scatters by itself; strategies that only all-reduce are served so.
    (OpenXLA, `ReduceScatterCreator`, xla/service/reduce_scatter_creator.cc.)
    """
    if not any(s.kind is CollectiveKind.ALL_REDUCE for s in steps):
        return steps
    held, targets = c.layouts[value], readers[value]
    if not targets or value in {o.value for o in c.analysis.graph.outputs}:
        return steps
    mesh = c.mesh
    found = []
    for step in steps:
        axes = [mesh.axis_names.index(name) for name in step.axes]
        places = {tuple(target[a] for a in axes) for target in targets}
        is_sliced = len(places) == 1 and WHOLE not in next(iter(places)) and all(held[a] == WHOLE for a in axes)
        if step.kind is CollectiveKind.ALL_REDUCE and is_sliced:
            scattered = reduce_scatter([mesh.axes[a] for a in axes], step.buffer_bytes)
            found.append(launched(scattered, mesh.device_type))
        else:
            found.append(step)
    return found


class _Loops:
    """How often collectives in loops run: an all-reduce whose sum is only added to what a loop carries round happens
    once, behind the loop, of the whole sum.

    (OpenXLA, `WhileLoopAllReduceCodeMotion`, xla/service/while_loop_all_reduce_code_motion.cc; of reduce-scatters it is
    off by default.)
    """

    def __init__(self, c: SolvedProgram, uses: Mapping[int | None, int], resharded: Set[int]):
        self.uses, self.resharded, self.graph = uses, resharded, c.analysis.graph
        self.reader: dict[int, Operation] = {}
        self.carry: dict[int | None, Operation] = {}  # by what the body hands on
        for operation in self.graph.operations:
            if operation.kind is OperationKind.LOOP_CARRY:
                self.carry[operation.operands[1]] = operation
            else:
                self.reader.update((o, operation) for o in operation.operands if o is not None)
        self.loops = sorted(self.graph.loops, key=lambda l: l.start - l.stop)

    def trips(self, group: Group, steps: Sequence[Collective]) -> float:
        """How often the collectives `steps` of `group` run."""
        is_all_reduce = bool(steps) and all(s.kind is CollectiveKind.ALL_REDUCE for s in steps)
        value = _sum_of(group)
        if group.trips == 1 or not is_all_reduce or value is None or not self._is_accumulated(value):
            return group.trips
        around = [l for l in self.loops if l.start <= group.operations[0] < l.stop]
        return group.trips / around[-1].trips

    def _is_accumulated(self, value: int) -> bool:
        """Whether `value` is added to what its loop carries, and serves nothing else."""
        while self.uses[value] == 1 and value not in self.resharded and value in self.reader:
            operation = self.reader[value]
            result = operation.results[0]
            if operation.name in SUMS:
                carry = self.carry.get(result)
                others = [o for o in operation.operands if o != value]
                return (
                    carry is not None
                    and self.uses[result] == 1
                    and result not in self.resharded
                    and others == [carry.results[0]]
                    and self.uses[carry.results[0]] == 1
                    and carry.results[0] not in self.resharded
                )
            if operation.name not in _SAME_ELEMENTS or result is None:
                return False
            value = result
        return False
