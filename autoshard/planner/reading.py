"""A graph by value and by operation, as those read it who ask what is stored, where and when."""

import dataclasses

from autoshard.graph.graph import Graph, Operation, OperationKind


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
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


def read(graph: Graph) -> Reading:
    """The reading of `graph`."""
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
    return Reading(graph, producer, consumers, stretch, around, outputs)
