"""Def-use chains: a graph by value and by operation, as those read it who ask what is stored, where and when."""

import dataclasses

from autoshard.graph.graph import Graph, Operation, OperationKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DefUse:
    """The definition and the uses of every value.

    Attributes:
      graph: The graph.
      producer: For each value, the operation that makes it; None for arguments and constants.
      consumers: For each value, who reads it: (operation, operand slot).
      region: For each operation, the number of heavy kernels before it: operations of one region can fuse.
      loop_nest: For each operation, the loops around it, outermost first.
      outputs: The values that the program returns.
    """

    graph: Graph
    producer: list[Operation | None]
    consumers: list[list[tuple[Operation, int]]]
    region: list[int]
    loop_nest: list[tuple[int, ...]]
    outputs: frozenset[int]

    def made_by(self, value: int) -> Operation:
        """The operation that makes a value. Raises ValueError if it is an argument or a constant."""
        if (operation := self.producer[value]) is None:
            raise ValueError(f"No operation makes `{self.graph.values[value].name}`: it is an argument or a constant.")
        return operation

    def defined_at(self, value: int) -> int:
        """The first operation at which the value is there."""
        operation = self.producer[value]
        if operation is None:
            return 0
        if operation.kind is OperationKind.SCAN_STACK:
            return self.graph.loops[self.loop_nest[operation.index][-1]].start
        return operation.index

    def scope(self, value: int) -> tuple[int, ...]:
        """The loops outside of which the value does not exist, outermost first."""
        operation = self.producer[value]
        if operation is None:
            return ()
        loops = self.loop_nest[operation.index]
        outside = operation.kind is OperationKind.SCAN_STACK or (
            operation.kind is OperationKind.LOOP_CARRY and value == operation.results[1]
        )
        return loops[:-1] if outside else loops


def def_use(graph: Graph) -> DefUse:
    """The def-use chains of `graph`."""
    producer: list[Operation | None] = [None] * len(graph.values)
    consumers: list[list[tuple[Operation, int]]] = [[] for _ in graph.values]
    region, count = [], 0
    for operation in graph.operations:
        for r in operation.results:
            if r is not None:
                producer[r] = operation
        for slot, o in enumerate(operation.operands):
            if o is not None:
                consumers[o].append((operation, slot))
        region.append(count)
        count += operation.rule.is_heavy
    loop_nest: list[tuple[int, ...]] = [()] * len(graph.operations)
    for i, loop in sorted(enumerate(graph.loops), key=lambda l: (l[1].start, -l[1].stop)):
        for t in range(loop.start, loop.stop):
            loop_nest[t] += (i,)
    return DefUse(
        graph=graph,
        producer=producer,
        consumers=consumers,
        region=region,
        loop_nest=loop_nest,
        outputs=frozenset(o.value for o in graph.outputs if o.value is not None),
    )
