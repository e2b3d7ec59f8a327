"""The computations of a graph: the whole program and each one that an equation nests, by the equations of each.

A graph lists the operations of all computations in one row, inlined. What runs, though, are computations: the compiler
orders each by itself.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterator

from autoshard.graph.graph import Graph, Nesting, OperandsAndResults, Operation, OperationKind


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction(OperandsAndResults):
    """One equation of a computation.

    Attributes:
      equation, name, operands, results: As in `Operation`.
      operation: The operation that it is; None if it nests computations.
      nested: The computations that it nests.
      is_inlined, is_checkpoint: As in `Nesting`.
    """

    equation: int
    name: str
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    operation: Operation | None
    nested: tuple["Computation", ...] = ()
    is_inlined: bool = False
    is_checkpoint: bool = False

    @property
    def leaf(self) -> Operation:
        """The operation that it is. Raises ValueError if it nests computations."""
        if self.operation is None:
            raise ValueError(f"`{self.name}` (equation {self.equation}) nests computations; it is no operation.")
        return self.operation


Computation = tuple[Instruction, ...]
"""Instructions in program order. Those that no output of the graph needs are left out."""


def entry_computation(graph: Graph) -> Computation:
    """The computation of the whole program, which leads to all others."""
    items: dict[int, Operation | Nesting] = {o.equation: o for o in graph.operations if _is_equation(o)}
    items.update((n.equation, n) for n in graph.nestings)
    numbers = sorted(items)

    def computation(start: int, stop: int) -> Computation:
        found, following = [], start
        for number in numbers[bisect.bisect_left(numbers, start) : bisect.bisect_left(numbers, stop)]:
            if number < following:
                continue
            item, nested, kind = items[number], (), (False, False)
            if isinstance(item, Nesting):
                bounds = (*item.starts, item.stop)
                nested = tuple(computation(*pair) for pair in itertools.pairwise(bounds))
                following, kind = item.stop, (item.is_inlined, item.is_checkpoint)
            operation = None if isinstance(item, Nesting) else item
            found.append(Instruction(number, item.name, item.operands, item.results, operation, nested, *kind))
        return tuple(found)

    return computation(0, len(graph.equations))


def all_computations(entry: Computation) -> Iterator[Computation]:
    """`entry` and all computations nested in it."""
    yield entry
    for instruction in entry:
        for nested in instruction.nested:
            yield from all_computations(nested)


def first_operation(instruction: Instruction) -> int:
    """The first operation that an equation is or contains; 0 where it contains none."""
    return min((o.index for o in _operations(instruction)), default=0)


def last_operation(instruction: Instruction) -> int:
    """The last operation that an equation is or contains; 0 where it contains none."""
    return max((o.index for o in _operations(instruction)), default=0)


def _operations(instruction: Instruction) -> Iterator[Operation]:
    if instruction.operation is not None:
        yield instruction.operation
    for nested in instruction.nested:
        for inner in nested:
            yield from _operations(inner)


def _is_equation(operation: Operation) -> bool:
    return operation.kind is OperationKind.EQUATION
