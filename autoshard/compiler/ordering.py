"""What must be ordered or kept so that a compiled program needs no more memory than the plan predicts.

The compiler orders a program by itself, and remembers and recomputes what it likes. Where that would cost memory, the
plan says, of each equation, what waits for it, what is stored, and what lies in memory in which order. This is decided
here, once, by the graph; execution obeys.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.compiler.early_products import is_partial, is_summed_alone, products_first
from autoshard.compiler.materialized import materialized
from autoshard.compiler.planned_graph import PlannedGraph, planned_graph
from autoshard.compiler.reused_operands import used_up_first
from autoshard.compiler.row_major import row_major
from autoshard.compiler.transposed_products import transposed_at_once
from autoshard.graph.computations import Computation, Instruction, all_computations
from autoshard.graph.equation_plan import EquationPlan
from autoshard.graph.graph import Graph
from autoshard.graph.layout import SpecEntries


@dataclasses.dataclass(frozen=True, slots=True)
class OrderingRules:
    """Which orders the compiler of a kind of device needs.

    Attributes:
      product_workspace_bytes: What it gives each matrix product beside its operands and result.
      turns_rows: Whether it turns what is summed or added to the state around, if it is not kept row by row (XLA:GPU).
      transposes_in_products: Whether it makes a product without batches the other way round if it is transposed right
        away (XLA:TPU).
    """

    product_workspace_bytes: float = 0.0
    turns_rows: bool = False
    transposes_in_products: bool = False


def ordered(
    graph: Graph,
    equations: Mapping[int, EquationPlan],
    arguments: Sequence[SpecEntries],
    axis_sizes: Mapping[str, int],
    rules: OrderingRules,
    entry: Computation | None = None,
) -> PlannedGraph:
    """The graph with what a plan says of each equation, and what must be ordered or kept.

    Args:
      graph: The program. equations: The layouts around each equation, by number.
      arguments: The layout of each argument. axis_sizes: Of the mesh, by axis name.
      rules: Those of the compiler.
      entry: The graph's entry computation, where it is known: it is the same for all plans.
    """
    found = dict(equations)

    def say(number: int, **fields: Any) -> None:
        found[number] = dataclasses.replace(found.get(number, EquationPlan()), **fields)

    planned = planned_graph(graph, found, arguments, axis_sizes, entry)
    computations = list(all_computations(planned.entry))
    all_products = rules.transposes_in_products
    transposed = [n for computation in computations for n in transposed_at_once(planned, computation, all_products)]
    if transposed:  # then their results have no layouts of their own
        for number in transposed:
            say(number, is_transposed_at_once=True)
        planned = planned_graph(graph, found, arguments, axis_sizes, planned.entry)
    for computation in computations:
        for number, slots in materialized(planned, computation).items():
            say(number, materialized=slots)
        for number, (results, part) in _waits(planned, computation, rules.product_workspace_bytes).items():
            say(number, waits=results, waits_for_part=part)
    if rules.turns_rows:
        for number, kept in row_major(planned).items():
            say(number, row_major=kept.operands, row_major_copies=kept.copies)
    shared: dict[EquationPlan, EquationPlan] = {}  # equal ones are one object
    found = {number: shared.setdefault(plan, plan) for number, plan in sorted(found.items())}
    return dataclasses.replace(planned, equations=found)


def _waits(
    planned: PlannedGraph, computation: Computation, workspace_bytes: float
) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """For equations, the operand slots whose later readers wait for its results, and those whose wait for its part of a
    sum alone."""
    tied = used_up_first(planned, computation)
    for number, slot in products_first(planned, computation, workspace_bytes).items():
        tied.setdefault(number, []).append(slot)
    found = {}
    for instruction in computation:
        slots = {instruction.operands[slot]: slot for slot in tied.get(instruction.equation, ())}  # each value once
        if slots:
            part = _waiting_for_part(planned, instruction, list(slots.values()))
            found[instruction.equation] = tuple(s for s in slots.values() if s not in part), part
    return found


def _waiting_for_part(planned: PlannedGraph, instruction: Instruction, tied: Sequence[int]) -> tuple[int, ...]:
    """Those of the operand slots `tied` whose later readers wait for what each device makes of a product, and not for
    the sum of it.

    Of a convolution these are all. Of a matrix product, those that it reads where they lie, since others' readers wait
    for no more than the copy; none if its sum is reduced alone, which is waited for.
    """
    if instruction.name == "conv_general_dilated":
        return tuple(tied)
    if instruction.name != "dot_general" or not is_partial(planned, instruction):
        return ()
    if is_summed_alone(planned, instruction):
        return ()
    read_as = {slot: steps[-1] for slot, steps in planned.plan_of(instruction).operands}
    lies = {slot: planned.layout_of(instruction, slot) for slot in tied}
    return tuple(slot for slot in tied if read_as.get(slot, lies[slot]) == lies[slot])
