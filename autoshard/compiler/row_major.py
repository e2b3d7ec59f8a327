"""Keeps what is summed, and what is added to the state, row by row in memory.

XLA:GPU stores what a reduction over 32 elements or more reads with the summed dimensions innermost, where the result's
order in memory is settled, as a gradient's is (`GpuLayoutAssignment::PropagateReductionLayoutToOperand`). The gradient
of a position embedding, a sum over the batch, so turns the residual stream of all layers around, and with it the
logits, which products need turned back: three times in memory, as soon as a device has 32 sequences.

It also stores what is gathered or scattered with that dimension outermost (`GpuLayoutAssignment`, `MoveDimToMajor`). A
gradient that is so turned would turn its optimizer's state: the update could not run in place, and the new state of all
weights would be there beside the old one before it is copied there. And features that a convolution made and that are
gathered would be there in two orders from then on, since cuDNN reads what is made of them row by row.

Arguments lie row by row. One that a scan reads in each iteration would be turned for its readers before the loop
begins, in its own type, and both would be there until it ends: weights twice, in micro-batches. Kept as it is inside,
it is turned by the kernel that casts it, in each iteration.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Set

from autoshard.compiler.planned_graph import PlannedGraph
from autoshard.compiler.primitives import PRODUCTS, SUMS
from autoshard.graph.computations import Computation, Instruction, all_computations
from autoshard.graph.graph import Graph
from autoshard.graph.layout import SpecEntries

LEAST_SUMMED = 32
"""From so many elements on XLA:GPU turns what a sum reads (`GpuLayoutAssignment`, a warp's worth)."""

_ADDING = SUMS | {"sub"}


@dataclasses.dataclass(frozen=True, slots=True)
class RowMajor:
    """What one equation reads row by row.

    Attributes:
      operands: Slots of operands; of a scan, of those that stay the same, inside. copies: Slots of gathered operands,
        whose copies are stored so.
    """

    operands: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """Values of a computation by what made them.

    What goes through a barrier is forgotten: its order in memory is settled there.

    Attributes:
      state: Donated arguments, and what is made of some that have its shape alone.
      scattered, convolved: What a scatter or a convolution made.
    """

    state: set[int]
    scattered: set[int] = dataclasses.field(default_factory=set)
    convolved: set[int] = dataclasses.field(default_factory=set)

    def forget(self, values: Iterable[int | None]) -> None:
        for known in (self.state, self.scattered, self.convolved):
            known.difference_update(values)


def row_major(planned: PlannedGraph) -> dict[int, RowMajor]:
    """What each equation reads row by row; the plan tells already what goes through barriers."""
    donated = {argument.value for argument in planned.graph.arguments if argument.donated}
    return dict(_of_computation(planned, planned.entry, _Known(donated)))


def _of_computation(planned: PlannedGraph, computation: Computation, known: _Known) -> Iterator[tuple[int, RowMajor]]:
    for instruction in computation:
        plan, here = planned.plan_of(instruction), known
        if plan.delayed and sum(o is not None for o in instruction.operands) > 1:
            here = _Known(set())  # all that it reads goes through one barrier
            known.forget(instruction.operands[slot] for slot in plan.delayed)
        if instruction.operation is not None:
            found = RowMajor(
                reduced_or_added(planned, instruction, here.state, here.scattered),
                _gathered_features(planned, instruction, here.convolved),
            )
            if found != RowMajor():
                yield instruction.equation, found
            _add_results(planned.graph, instruction, here, known)
        if instruction.name == "scan":
            kept = _arguments_inside(planned.graph, instruction)
            if kept:
                yield instruction.equation, RowMajor(kept)
        for nested in instruction.nested:
            inside = _Known({*here.state}, {*here.scattered}) if instruction.is_inlined else _Known(set())
            yield from _of_computation(planned, nested, inside)
            known.state.update(inside.state.intersection(instruction.results))
            known.scattered.update(inside.scattered.intersection(instruction.results))
        known.forget(instruction.results[slot] for slot in plan.materialized)
        if plan.waits:
            known.forget((*(instruction.operands[slot] for slot in plan.waits), *instruction.results))


def _arguments_inside(graph: Graph, scan: Instruction) -> tuple[int, ...]:
    """The operand slots of a scan that are arguments of the program, matrices or more, and are read inside."""
    of = lambda value: graph.values[value]
    arguments = {a.value for a in graph.arguments if len(of(a.value).shape) > 1}
    arguments = {value for value in arguments if not of(value).dtype.startswith("key")}
    read = {o for computation in all_computations(scan.nested[0]) for i in computation for o in i.operands}
    return tuple(slot for slot, o in enumerate(scan.operands) if o in arguments and o in read)


def _add_results(graph: Graph, instruction: Instruction, here: _Known, known: _Known) -> None:
    made = [r for r in instruction.results if r is not None]
    if is_of_state(graph, instruction, here.state):
        known.state.update(made)
    if instruction.name.startswith("scatter"):
        known.scattered.update(made)
    if instruction.name == "conv_general_dilated":
        known.convolved.update(made)


def _gathered_features(planned: PlannedGraph, instruction: Instruction, convolved: Set[int]) -> tuple[int, ...]:
    """The slot of the operand that an equation gathers along an inner dimension, if a convolution made it. Of two, XLA
    would gather the sum."""
    if convolved.isdisjoint(instruction.operands):
        return ()
    steps = planned.plan_of(instruction).operands
    gathered = [s for s, way in steps if is_gathered_inside(planned.layout_of(instruction, s), way[-1])]
    return tuple(s for s in gathered if len(gathered) == 1 and instruction.operands[s] in convolved)


def is_gathered_inside(entries: SpecEntries | None, wanted: SpecEntries) -> bool:
    """Whether an axis leaves a dimension that others are in front of, on the way from one layout to another."""
    return entries is not None and any(set(own) - set(left) for own, left in zip(entries[1:], wanted[1:], strict=True))


def reduced_or_added(
    planned: PlannedGraph, instruction: Instruction, state: Set[int], scattered: Set[int]
) -> tuple[int, ...]:
    """The slot of an operand that XLA:GPU may turn around: of a sum over a dimension, or what is added to the state.

    Args:
      planned: The graph and the plan. instruction: An equation that nests nothing.
      state: The values that are an optimizer's state. scattered: Those that a scatter made.
    """
    if instruction.name != "reduce_sum" and instruction.name not in _ADDING:
        return ()
    read_as = {slot: steps[-1] for slot, steps in planned.plan_of(instruction).operands}
    layout = lambda slot: read_as.get(slot, planned.layout_of(instruction, slot))
    if instruction.name == "reduce_sum":
        entries = layout(0)
        return (0,) if entries is not None and may_be_turned(planned, instruction, entries) else ()
    slots = added_to_state(planned.graph, instruction, state, scattered)
    return tuple(slot for slot in slots if layout(slot) is not None)


def may_be_turned(planned: PlannedGraph, reduction: Instruction, entries: SpecEntries) -> bool:
    """Whether XLA:GPU may turn what a `reduce_sum` reads.

    It does if the sum leaves a matrix, not over inner dimensions alone, over many elements on each device. Fewer are
    left alone, since the sums of several layers are added and reduced as one only where nothing stands between.

    Args:
      planned: The graph and the plan. reduction: The sum. entries: The layout in which it reads its operand.
    """
    graph, rule = planned.graph, reduction.leaf.rule
    shape = graph.values[reduction.operand(0)].shape
    summed = [d for d, dim in enumerate(rule.operands[0]) if any(rule.factors[f].reduction for f in dim)]
    if not summed or reduction.results[0] is None:
        return False
    kept = len(graph.values[reduction.results[0]].shape)
    here = math.prod(shape[d] // math.prod(planned.axis_sizes[a] for a in entries[d]) for d in summed)
    return kept > 1 and min(summed) < kept and here >= LEAST_SUMMED


def is_of_state(graph: Graph, instruction: Instruction, state: Set[int]) -> bool:
    """Whether an equation makes something of an optimizer's state alone, element by element: scalars aside, all that it
    reads is in `state` and has the shape of what it makes.
    """
    if len(instruction.results) != 1 or instruction.results[0] is None or instruction.name in PRODUCTS:
        return False
    shape = graph.values[instruction.results[0]].shape
    read = [o for o in instruction.operands if o is not None and graph.values[o].shape]
    return bool(read) and all(o in state and graph.values[o].shape == shape for o in read)


def added_to_state(graph: Graph, instruction: Instruction, state: Set[int], scattered: Set[int]) -> tuple[int, ...]:
    """The operand slot of what an equation adds to an optimizer's state, or takes from it, if that is a matrix or more.

    Not that of a sum over rows of a table: it is scattered right into what it is added to (`aliasing.scattered_into`),
    where nothing stands between.

    Args:
      graph: The graph. instruction: An equation that nests nothing.
      state: The values that are an optimizer's state. scattered: Those that a scatter made.
    """
    operands = instruction.operands
    if instruction.name not in _ADDING or None in operands or not scattered.isdisjoint(operands):
        return ()
    shapes = {graph.values[o].shape for o in operands if o is not None}
    others = [slot for slot, o in enumerate(operands) if o not in state]
    return tuple(others) if len(shapes) == 1 and len(*shapes) > 1 and len(others) == 1 else ()
