"""A graph with what a plan says of its equations: what the rules of order and layout read."""

import dataclasses
from collections.abc import Mapping, Sequence

from autoshard.graph.computations import Computation, Instruction, entry_computation
from autoshard.graph.equation_plan import EquationPlan
from autoshard.graph.graph import Graph, OperationKind
from autoshard.graph.layout import SpecEntries, spec_shard_bytes

_NOTHING = EquationPlan()


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedGraph:
    """A graph with what a plan says of its equations.

    Attributes:
      graph: The graph. entry: Its entry computation.
      equations: What the plan says, by equation number.
      layouts: The layout of each value of which the plan says it, by value.
      axis_sizes: Of the mesh, by axis name.
    """

    graph: Graph
    entry: Computation
    equations: Mapping[int, EquationPlan]
    layouts: Mapping[int, SpecEntries]
    axis_sizes: Mapping[str, int]

    def plan_of(self, instruction: Instruction) -> EquationPlan:
        """What the plan says of an equation; nothing, where it does not."""
        return self.equations.get(instruction.equation, _NOTHING)

    def layout_of(self, instruction: Instruction, slot: int) -> SpecEntries | None:
        """The layout in which an operand lies; None where the plan does not say."""
        value = instruction.operands[slot]
        return None if value is None else self.layouts.get(value)

    def shard_bytes(self, value: int, entries: SpecEntries) -> float:
        """Bytes of one device's piece of a value that lies as `entries` say."""
        return spec_shard_bytes(self.graph.values[value].size_bytes, entries, self.axis_sizes)


def planned_graph(
    graph: Graph,
    equations: Mapping[int, EquationPlan],
    arguments: Sequence[SpecEntries],
    axis_sizes: Mapping[str, int],
    entry: Computation | None = None,
) -> PlannedGraph:
    """The graph with what a plan says of its equations and of the layouts of its `arguments`.

    `entry`: Its entry computation, where it is known: it is the same for all plans.
    """
    layouts = {a.value: entries for a, entries in zip(graph.arguments, arguments, strict=True)}
    for operation in graph.operations:
        plan = equations.get(operation.equation, _NOTHING)
        match operation.kind:
            case OperationKind.EQUATION:
                known = [] if plan.is_transposed_at_once else [(operation.results[s], e) for s, e in plan.results]
            case OperationKind.LOOP_CARRY | OperationKind.SCAN_SLICE:  # of a carry, what lies inside the loop
                known = [(operation.results[0], e) for s, e in plan.body if s == operation.slot]
            case _:
                known = [(operation.results[0], e) for s, e in plan.results if s == operation.slot]
        layouts.update((value, entries) for value, entries in known if value is not None)
    return PlannedGraph(graph, entry_computation(graph) if entry is None else entry, equations, layouts, axis_sizes)
