"""What must be ordered or kept so that a compiled program needs no more memory than the plan predicts.

The compiler orders a program by itself, and remembers and recomputes what it likes. Where that would cost memory, the
plan says, of each equation, what waits for it, what is stored, and what lies in memory in which order. This is decided
here, once, by the graph; execution obeys.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Container, Mapping, Sequence, Set
from typing import Any

from autoshard.compiler.early_products import is_partial, is_summed_alone, products_first
from autoshard.compiler.exchanged_sums import exchanged_sums
from autoshard.compiler.gradients_in_time import late_weights
from autoshard.compiler.hiding_spans import HidingSpans
from autoshard.compiler.materialized import materialized
from autoshard.compiler.pace import Pace
from autoshard.compiler.planned_graph import PlannedGraph, planned_graph
from autoshard.compiler.prefetches import Prefetches
from autoshard.compiler.read_in_turn import Turn, Turns, awaited_values
from autoshard.compiler.reused_operands import used_up_first
from autoshard.compiler.row_major import row_major
from autoshard.compiler.schedule import Schedule
from autoshard.compiler.smaller_first import smaller_first
from autoshard.compiler.transfer_times import TransferTimes
from autoshard.compiler.transposed_products import transposed_at_once
from autoshard.compiler.turned_kernels import turned_where_read
from autoshard.compiler.two_stage_sums import two_stage_sums
from autoshard.graph.computations import Computation, Instruction, all_computations
from autoshard.graph.equation_plan import EquationPlan, evaluation_order
from autoshard.graph.graph import Graph
from autoshard.graph.layout import SpecEntries, is_slice


@dataclasses.dataclass(frozen=True, slots=True)
class OrderingRules:
    """Which orders the compiler of a kind of device needs.

    Attributes:
      product_workspace_bytes: What it gives each matrix product beside its operands and result.
      turns_rows: Whether it turns what is summed or added to the state around, if it is not kept row by row (XLA:GPU).
      turns_kernels: Whether it has a kernel turned round inside of the convolution that makes the gradient of an image,
        if nothing is between the two (XLA:GPU with cuDNN).
      transposes_in_products: Whether it makes a product without batches the other way round if it is transposed right
        away (XLA:TPU).
      fuses_products: Whether it computes what reads the result of a product inside the product's kernel (XLA:TPU): ties
        to large results would cost kernels.
      sums_by_block: Whether it sums a long column by one block, unless that is made in two stages (XLA:GPU).
      exchanges_from_bytes: From how many bytes on sums that nobody waits for are exchanged (XLA:TPU hides that); None
        where none are.
      schedule: Which of its schedules it is asked for.
      pace: What kernels and sums take, by which sums are given time (`HidingSpans.reduced_within`); None where they are
        given a number of products.
    """

    product_workspace_bytes: float = 0.0
    turns_rows: bool = False
    turns_kernels: bool = False
    transposes_in_products: bool = False
    fuses_products: bool = False
    sums_by_block: bool = False
    exchanges_from_bytes: float | None = None
    schedule: Schedule = Schedule.LEAST_MEMORY
    pace: Pace | None = None


def orderings(
    graph: Graph,
    equations: Mapping[int, EquationPlan],
    arguments: Sequence[SpecEntries],
    axis_sizes: Mapping[str, int],
    rules: OrderingRules,
    entry: Computation | None = None,
) -> Callable[[TransferTimes | None], PlannedGraph]:
    """What gives the graph with what a plan says of each equation, and what must be ordered or kept.

    It is asked for when what hides is sent, where orders are to follow that; for None, the orders bound the memory.

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
    if rules.turns_kernels:
        turned = [turned_where_read(planned, computation) for computation in computations]
        if any(turned):
            found.update(item for plans in turned for item in plans.items())
            planned = planned_graph(graph, found, arguments, axis_sizes, planned.entry)
    all_products = rules.transposes_in_products
    transposed = [n for computation in computations for n in transposed_at_once(planned, computation, all_products)]
    if transposed:  # then their results have no layouts of their own
        for number in transposed:
            say(number, is_transposed_at_once=True)
        planned = planned_graph(graph, found, arguments, axis_sizes, planned.entry)
    for computation in computations:
        for number, slots in materialized(planned, computation).items():
            stored = found[number].materialized if number in found else ()
            say(number, materialized=tuple(sorted({*stored, *slots})))
        if rules.sums_by_block:
            for number, stages in two_stage_sums(planned, computation).items():
                say(number, sums_first=stages)
        if rules.schedule is Schedule.LATENCY_HIDING:
            continue
        for number, (results, part) in _waits(planned, computation, rules.product_workspace_bytes).items():
            say(number, waits=results, waits_for_part=part)
    if rules.exchanges_from_bytes is not None:
        for number in exchanged_sums(planned, computations, rules.exchanges_from_bytes):
            say(number, exchanges_parts=True)
    if rules.turns_rows:
        for number, kept in row_major(planned).items():
            say(number, row_major=kept.operands, row_major_copies=kept.copies)
    return functools.partial(_ordered, planned, found, rules)


def _ordered(
    planned: PlannedGraph, plans: Mapping[int, EquationPlan], rules: OrderingRules, times: TransferTimes | None
) -> PlannedGraph:
    """A graph with these plans of its equations and, where collectives run behind kernels, the orders of that."""
    found = dict(plans)
    if rules.schedule is Schedule.LATENCY_HIDING:
        for number, fields in _hiding(planned, rules, times).items():
            found[number] = dataclasses.replace(found.get(number, EquationPlan()), **fields)
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


def _hiding(planned: PlannedGraph, rules: OrderingRules, times: TransferTimes | None) -> dict[int, dict[str, Any]]:
    """For equations, what of an `EquationPlan` is ordered where collectives run behind kernels."""
    found: dict[int, dict[str, Any]] = collections.defaultdict(dict)
    awaited = awaited_values(planned.graph, by_products=True)
    handed_on = awaited_values(planned.graph, by_products=False)
    spans = HidingSpans(planned.graph, pace=rules.pace)

    def visit(
        computation: Computation, results: Sequence[int | None], is_checkpoint: bool = False, is_part: bool = False
    ) -> None:
        """`is_checkpoint`: Whether it is a checkpointed function. `is_part`: Whether it is a part of one."""
        if rules.fuses_products:
            _hold_gathers(planned, computation, is_checkpoint or is_part, awaited, found, times)
        else:
            _order_hiding(planned, computation, results, is_checkpoint, awaited, found, spans, times)
        for instruction in computation:
            for nested in instruction.nested:
                handed = [r if r in handed_on else None for r in instruction.results]
                visit(nested, handed, instruction.is_checkpoint, is_checkpoint or is_part)

    visit(planned.entry, ())
    return found


def _hold_gathers(
    planned: PlannedGraph,
    computation: Computation,
    is_checkpoint: bool,
    awaited: Set[int | None],
    found: Mapping[int, dict[str, Any]],
    times: TransferTimes | None,
) -> None:
    """Adds to `found` what gathers of a computation wait for, which are results that are no larger than what they are
    made of, and each other; and, where it is part of a checkpointed function or has such, which weights wait for
    gradients. All other order is the compiler's own."""
    prefetches = Prefetches(planned, computation, times, awaited)
    follows: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    moved, behind = dict(prefetches.moved), {a.equation: b.equation for a, b in itertools.pairwise(computation)}
    recomputes = is_checkpoint or any(i.is_checkpoint for i in computation)
    sizes_bytes = [v.size_bytes for v in planned.graph.values]
    for late in late_weights(computation, awaited, sizes_bytes) if recomputes else ():
        follows[late.reader].append((late.reader - late.made, late.slot))
        moved.update((number, behind[late.reader]) for number in late.along if late.reader in behind)
    for number, gradients in follows.items():
        found[number]["follows"] = tuple(sorted(gradients))
    for number, copies in prefetches.held.items():
        found[number]["holds_back"] = tuple(sorted((reader - number, slot) for reader, slot in copies))
    for number, copies in prefetches.following.items():
        found[number]["gathers_next"] = tuple((own, reader - number, slot) for own, reader, slot in copies)
    for number, slots in prefetches.opened.items():
        found[number]["opened"] = slots
    for number, until in moved.items():
        found[number]["evaluated_at"] = until - number


def _order_hiding(
    planned: PlannedGraph,
    computation: Computation,
    results: Sequence[int | None],
    is_checkpoint: bool,
    awaited: Set[int | None],
    found: Mapping[int, dict[str, Any]],
    spans: HidingSpans,
    times: TransferTimes | None,
) -> None:
    """Adds to `found` what is ordered of a computation; `results` and `awaited` as in `Turns`.

    `is_checkpoint`: Whether it is a checkpointed function; what others hand on may be kept for the backward pass, which
    would be stored beside what it is made of if anything were tied to it.
    """
    if not computation:
        return
    held: dict[int, set[tuple[int, int]]] = collections.defaultdict(set)
    holding: dict[int, set[int]] = collections.defaultdict(set)
    gathered: dict[int, set[int]] = collections.defaultdict(set)
    moved = smaller_first(planned, computation, awaited)
    order, by_number = _evaluated(computation, moved), {i.equation: i for i in computation}
    turns, prefetches = Turns(planned, order, results, awaited), Prefetches(planned, order, times)
    for number, slots in turns.operands().items():
        found[number]["waits_for_part"] = slots
    for turn in turns.sums():  # made last of what is there before: what it holds back must be there
        until = computation[-1].equation + 1 if turn.after is None else turn.after
        moved.update(dict.fromkeys((turn.before, *turn.along), until))
        if turn.after is None:
            holding[turn.before].add(turn.slot)
        else:
            held[turn.before].add((turn.after - turn.before, turn.slot))
        found[turn.before]["operands"] = _read_as(planned, by_number[turn.before])
    for turn in turns.handed_over() if is_checkpoint else ():
        holding[turn.before].add(turn.slot)
    moved_with_room = dict(moved)
    with_room = _followers(turns, turns.reduced(spans, opened=prefetches.opened, has_room=True), moved_with_room)
    follows = _followers(turns, turns.reduced(spans, times, prefetches.opened), moved)
    for number, copies in prefetches.held.items():
        held[number].update((reader - number, slot) for reader, slot in copies)
        for reader, slot in copies:
            gathered[reader].add(slot)
    for number, slots in prefetches.opened.items():
        found[number]["opened"] = slots
    for number, until in (moved | prefetches.moved).items():
        found[number]["evaluated_at"] = until - number
    for number, until in moved_with_room.items():
        found[number]["evaluated_with_room"] = until - number
    first = {reader: slots for reader, slots in gathered.items() if _sends_more(planned, by_number[reader], slots)}
    ordered_slots = {
        "holds_back": held,
        "holds_results": holding,
        "follows": follows,
        "follows_with_room": with_room,
        "gathered_first": first,
    }
    for field, slots_of in ordered_slots.items():
        for number, slots in slots_of.items():
            found[number][field] = tuple(sorted(slots))


def _followers(turns: Turns, reduced: Sequence[Turn], moved: dict[int, int]) -> dict[int, set[tuple[int, int]]]:
    """What waits for sums, as `EquationPlan.follows` has it. What is made of a sum comes behind that, in `moved`: it
    would read the sum itself otherwise, and XLA would drop what ties the two, which nobody reads."""
    found: dict[int, set[tuple[int, int]]] = collections.defaultdict(set)
    for turn in reduced:
        if turn.after is not None:
            found[turn.after].add((turn.after - turn.before, turn.slot))
            moved.update(dict.fromkeys(turn.along, turns.behind(turn.after)))
    return found


def _sends_more(planned: PlannedGraph, reader: Instruction, gathered: Container[int]) -> bool:
    """Whether an equation that nests nothing reads another operand than those `gathered` that is sent for it."""
    if reader.nested:
        return False
    steps = [(s, planned.layout_of(reader, s), own[-1]) for s, own in planned.plan_of(reader).operands]
    return any(s not in gathered and lies is not None and not is_slice(lies, to) for s, lies, to in steps)


def _read_as(planned: PlannedGraph, instruction: Instruction) -> tuple[tuple[int, tuple[SpecEntries, ...]], ...]:
    """The layouts in which a sum reads its operand, which must be known where it is made by shards."""
    told = planned.plan_of(instruction).operands
    lies = planned.layout_of(instruction, 0)
    return told or (() if lies is None else ((0, (lies,)),))


def _evaluated(computation: Computation, before: Mapping[int, int]) -> Computation:
    """The instructions of a computation in the order in which they are evaluated.

    `before`: For those that are not evaluated where the program has them, by equation, the equation right before which
    they are.
    """
    plans = {number: EquationPlan(evaluated_at=until - number) for number, until in before.items()}
    return tuple([computation[k] for k in evaluation_order([i.equation for i in computation], plans)])


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
