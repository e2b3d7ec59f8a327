"""When each value occupies memory, in program order.

Time is counted in operations of the flattened program. A loop body is passed once: what it needs of the world outside
lives through the whole loop. The compiler's own schedule may differ; these are its laws that matter for size:

  * A pointwise result that only other fusible operations read is fused away and never stored, if they all belong to the
    same stretch (between two heavy kernels) or if it is cheap to compute again: then what it is made of lives on
    instead.
  * What can be rebuilt from nothing (iotas, broadcast scalars, masks made of them) is never stored.
  * Reshapes, loop carries and barriers are other names for their operand.
  * The successor of a donated argument takes over its buffer.
"""

import bisect
import collections
import dataclasses

from autoshard.graph.graph import Graph, Operation, OperationKind
from autoshard.graph.groups import free_values, is_key_or_random, is_pointwise

_ALIASING = frozenset(
    {
        "reshape",
        "squeeze",
        "expand_dims",
        "optimization_barrier",
        "sharding_constraint",
        "copy",
        "bitcast_convert_type",
        "loop_carry",
        "branch_join",
        "random_wrap",
        "random_unwrap",
    }
)

_EXPENSIVE = frozenset(
    {
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "log2",
        "tanh",
        "logistic",
        "erf",
        "erfc",
        "erf_inv",
        "pow",
        "sin",
        "cos",
        "tan",
        "atan2",
        "cbrt",
        "lgamma",
        "digamma",
        "sort",
        "transpose",
    }
)
"""Pointwise operations that XLA does not repeat in each consumer (its `IsExpensiveToRepeat`), and transposes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lifetime:
    """A stored value occupies memory during `start <= t < stop` (operation indices)."""

    value: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class Liveness:
    """Lifetimes of everything stored.

    Attributes:
      lifetimes: One per stored value; arguments included.
      stored: The values that have a lifetime.
      stretch: For each operation, the number of heavy kernels before it: operations of one stretch fuse.
      alias_stop: For each value that is another name of its operand, when its last use ends.
    """

    lifetimes: tuple[Lifetime, ...]
    stored: frozenset[int]
    stretch: tuple[int, ...]
    alias_stop: tuple[tuple[int, int], ...]


def _stretches(graph: Graph) -> tuple[int, ...]:
    stretch, count = [], 0
    for operation in graph.operations:
        stretch.append(count)
        count += operation.rule.is_heavy
    return tuple(stretch)


def _enclosing(graph: Graph) -> list[tuple[int, ...]]:
    """For each operation, the loops around it, outermost first."""
    around: list[list[int]] = [[] for _ in graph.operations]
    for i, loop in sorted(enumerate(graph.loops), key=lambda l: (l[1].start, -l[1].stop)):
        for t in range(loop.start, loop.stop):
            around[t].append(i)
    return [tuple(a) for a in around]


def is_alias(operation: Operation) -> bool:
    """Whether the results are other names of the operands' memory."""
    return operation.name in _ALIASING


def liveness(graph: Graph) -> Liveness:
    """Computes when each value of `graph` is stored."""
    stretch, around = _stretches(graph), _enclosing(graph)
    end = len(graph.operations)
    producer: dict[int, Operation] = {}
    consumers: dict[int, list[tuple[Operation, int]]] = collections.defaultdict(list)
    for operation in graph.operations:
        for r in operation.results:
            if r is not None:
                producer[r] = operation
        for slot, o in enumerate(operation.operands):
            if o is not None:
                consumers[o].append((operation, slot))

    def born(value: int) -> int:
        operation = producer.get(value)
        if operation is None:
            return 0
        if operation.kind is OperationKind.SCAN_STACK:
            return graph.loops[around[operation.index][-1]].start
        return operation.index

    def home(value: int) -> tuple[int, ...]:
        """The loops that a value lives in, i.e. outside of which it does not exist."""
        operation = producer.get(value)
        if operation is None:
            return ()
        loops = around[operation.index]
        outside = operation.kind is OperationKind.SCAN_STACK or (
            operation.kind is OperationKind.LOOP_CARRY and value == operation.results[1]
        )
        return loops[:-1] if outside else loops

    free = free_values(graph)
    outputs = {o.value for o in graph.outputs if o.value is not None}
    in_place = {
        o.value
        for o in graph.outputs
        if o.value is not None and o.successor_of is not None and graph.arguments[o.successor_of].donated
    }
    arguments = {a.value for a in graph.arguments}

    def is_fused(value: int) -> bool:
        """Whether the value is computed inside its consumers instead of being stored."""
        operation = producer.get(value)
        if operation is None or value in outputs or not is_pointwise(operation):
            return False
        if any(c.kind is not OperationKind.EQUATION or c.rule.is_heavy for c, _ in consumers[value]):
            return False
        if all(stretch[c.index] == stretch[operation.index] for c, _ in consumers[value]):
            return True
        return operation.name not in _EXPENSIVE and not is_key_or_random(operation)

    until: dict[int, int] = {}
    """One past the last operation that needs each value, directly or to compute a fused value again."""

    def settle(value: int) -> None:
        last, mine = born(value) + 1, home(value)
        for operation, slot in consumers[value]:
            loops = around[operation.index]
            if operation.kind is OperationKind.LOOP_CARRY:
                # the initial value ends where the loop begins; the value carried back lives to the body's end
                when = operation.index + 1 if slot == 0 else graph.loops[loops[-1]].stop
                loops = loops[:-1] if slot == 0 else loops
            else:
                when = max(
                    [operation.index + 1, *(until[r] for r in operation.results if r is not None and is_fused(r))]
                )
            entered = [l for l in loops if l not in mine]
            last = max(last, graph.loops[entered[0]].stop if entered else when)
        until[value] = last

    for operation in reversed(graph.operations):
        for r in operation.results:
            if r is not None:
                settle(r)
    for argument in graph.arguments:
        settle(argument.value)

    root: dict[int, int] = {}
    for operation in graph.operations:
        for slot, r in enumerate(operation.results):
            source = operation.operands[slot if slot < len(operation.operands) else 0] if operation.operands else None
            if operation.kind is OperationKind.LOOP_CARRY:
                # the loop owns one buffer: the value inside; the value after is its last content
                if r is not None and r == operation.results[1] and operation.results[0] is not None:
                    root[r] = operation.results[0]
                continue
            if r is not None and is_alias(operation) and source is not None:
                root[r] = root.get(source, source)

    def is_stored(value: int) -> bool:
        if value not in producer:
            return value in arguments
        return value not in in_place and value not in free and not is_fused(value)

    stop: dict[int, int] = {}
    names = [a.value for a in graph.arguments] + [r for o in graph.operations for r in o.results if r is not None]
    for value in names:
        own = end if value in outputs else until[value]
        at = root.get(value, value)
        stop[at] = max(stop.get(at, 0), own)
    lifetimes = []
    for value in names:
        if value in root:
            continue
        if not is_stored(value):
            continue
        lifetimes.append(Lifetime(value, born(value), stop[value]))
    for i, a in enumerate(graph.arguments):
        kept = not a.donated or any(o.successor_of == i for o in graph.outputs)
        if kept:  # a caller's buffer, or one that the successor takes over, is there from first to last
            lifetimes[i] = dataclasses.replace(lifetimes[i], start=0, stop=max(end, 1))
    alias_stop = tuple((v, until[v]) for v in root)
    return Liveness(tuple(lifetimes), frozenset(l.value for l in lifetimes), stretch, alias_stop)


def compress(times: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Maps intervals onto the fewest instants that keep every maximal set of simultaneous intervals.

    An instant matters only if it is the last before some interval ends and after some interval began.
    """
    if not times:
        return []
    starts = sorted({s for s, _ in times})
    stops = sorted({e for _, e in times})
    instants = []  # the latest start before each run of stops
    for s, following in zip(starts, [*starts[1:], float("inf")], strict=True):
        first_stop = bisect.bisect_right(stops, s)
        if first_stop < len(stops) and stops[first_stop] <= following:
            instants.append(s)
    return [(bisect.bisect_left(instants, s), bisect.bisect_left(instants, e)) for s, e in times]
