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

import dataclasses
from collections.abc import Sequence

from autoshard.garbage import collection_paused
from autoshard.graph.graph import Graph, Operation, OperationKind
from autoshard.graph.groups import free_values, is_key_or_random, pointwise_operations

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


@dataclasses.dataclass(frozen=True, slots=True)
class _Reading:
    """The graph by value and by operation.

    Attributes:
      graph: The graph.
      producer: For each value, the operation that makes it; None for arguments and constants.
      consumers: For each value, who reads it: (operation, operand slot).
      stretch: As in `Liveness`.
      around: For each operation, the loops around it, outermost first.
      outputs: The values that the program returns.
    """

    graph: Graph
    producer: list[Operation | None]
    consumers: list[list[tuple[Operation, int]]]
    stretch: list[int]
    around: list[tuple[int, ...]]
    outputs: frozenset[int]

    def born(self, value: int) -> int:
        """The first operation at which the value is there."""
        operation = self.producer[value]
        if operation is None:
            return 0
        if operation.kind is OperationKind.SCAN_STACK:
            return self.graph.loops[self.around[operation.index][-1]].start
        return operation.index

    def home(self, value: int) -> tuple[int, ...]:
        """The loops that a value lives in, i.e. outside of which it does not exist."""
        operation = self.producer[value]
        if operation is None:
            return ()
        loops = self.around[operation.index]
        outside = operation.kind is OperationKind.SCAN_STACK or (
            operation.kind is OperationKind.LOOP_CARRY and value == operation.results[1]
        )
        return loops[:-1] if outside else loops


def _read(graph: Graph) -> _Reading:
    producer: list[Operation | None] = [None] * len(graph.values)
    consumers: list[list[tuple[Operation, int]]] = [[] for _ in graph.values]
    stretch, count = [], 0
    for operation in graph.operations:
        for r in operation.results:
            if r is not None:
                producer[r] = operation
        for slot, o in enumerate(operation.operands):
            if o is not None:
                consumers[o].append((operation, slot))
        stretch.append(count)
        count += operation.rule.is_heavy
    around: list[tuple[int, ...]] = [()] * len(graph.operations)
    for i, loop in sorted(enumerate(graph.loops), key=lambda l: (l[1].start, -l[1].stop)):
        for t in range(loop.start, loop.stop):
            around[t] += (i,)
    outputs = frozenset(o.value for o in graph.outputs if o.value is not None)
    return _Reading(graph, producer, consumers, stretch, around, outputs)


def is_alias(operation: Operation) -> bool:
    """Whether the results are other names of the operands' memory."""
    return operation.name in _ALIASING


def _fused_values(reading: _Reading, pointwise: Sequence[bool]) -> bytearray:
    """For each value, whether it is computed inside its consumers instead of being stored."""
    fused, stretch = bytearray(len(reading.graph.values)), reading.stretch
    for operation in reading.graph.operations:
        if not pointwise[operation.index]:
            continue
        here = stretch[operation.index]
        is_cheap = operation.name not in _EXPENSIVE and not is_key_or_random(operation)
        for value in operation.results:
            if value is None or value in reading.outputs:
                continue
            for c, _ in reading.consumers[value]:
                if c.kind is not OperationKind.EQUATION or c.rule.is_heavy:
                    break
                if not is_cheap and stretch[c.index] != here:
                    break
            else:
                fused[value] = True
    return fused


def _last_needs(reading: _Reading, fused: Sequence[int]) -> list[int]:
    """For each value, one past the last operation that needs it, directly or to compute a fused value again."""
    graph, around, loops = reading.graph, reading.around, reading.graph.loops
    until = [0] * len(graph.values)

    def settle(value: int) -> None:
        last, home = reading.born(value) + 1, reading.home(value)
        for operation, slot in reading.consumers[value]:
            inside = around[operation.index]
            when = operation.index + 1
            if operation.kind is not OperationKind.LOOP_CARRY:
                for r in operation.results:
                    if r is not None and fused[r] and until[r] > when:
                        when = until[r]
            elif slot == 0:  # the initial value ends where the loop begins
                inside = inside[:-1]
            else:  # the value carried back lives to the body's end
                when = loops[inside[-1]].stop
            if inside != home:
                when = next((loops[l].stop for l in inside if l not in home), when)
            last = max(last, when)
        until[value] = last

    for operation in reversed(graph.operations):
        for r in operation.results:
            if r is not None:
                settle(r)
    for argument in graph.arguments:
        settle(argument.value)
    return until


def _aliases(graph: Graph) -> dict[int, int]:
    """For each value that is another name of a value's memory, the latter."""
    root: dict[int, int] = {}
    for operation in graph.operations:
        if operation.kind is OperationKind.LOOP_CARRY:
            # the loop owns one buffer: the value inside; the value after is its last content
            inside, after = operation.results
            if after is not None and inside is not None:
                root[after] = inside
        elif is_alias(operation) and operation.operands:
            for slot, r in enumerate(operation.results):
                source = operation.operands[slot if slot < len(operation.operands) else 0]
                if r is not None and source is not None:
                    root[r] = root.get(source, source)
    return root


@collection_paused()
def liveness(graph: Graph) -> Liveness:
    """Computes when each value of `graph` is stored."""
    reading, pointwise = _read(graph), pointwise_operations(graph)
    free, fused, root = free_values(graph, pointwise), _fused_values(reading, pointwise), _aliases(graph)
    until = _last_needs(reading, fused)
    end = len(graph.operations)
    arguments = [a.value for a in graph.arguments]
    made = [r for o in graph.operations for r in o.results if r is not None]
    stop: dict[int, int] = {}
    for value in (*arguments, *made):
        own = end if value in reading.outputs else until[value]
        at = root.get(value, value)
        if own > stop.get(at, 0):
            stop[at] = own
    succeeded = {o.successor_of for o in graph.outputs}
    lifetimes = []
    for i, argument in enumerate(graph.arguments):
        if not argument.donated or i in succeeded:
            # a caller's buffer, or one that the successor takes over, is there from first to last
            lifetimes.append(Lifetime(argument.value, 0, max(end, 1)))
        else:
            lifetimes.append(Lifetime(argument.value, 0, stop[argument.value]))
    in_place = {
        o.value for o in graph.outputs if o.successor_of is not None and graph.arguments[o.successor_of].donated
    }
    for value in made:
        if not (fused[value] or value in root or value in free or value in in_place):
            lifetimes.append(Lifetime(value, reading.born(value), stop[value]))
    return Liveness(
        tuple(lifetimes),
        frozenset(l.value for l in lifetimes),
        tuple(reading.stretch),
        tuple((v, until[v]) for v in root),
    )
