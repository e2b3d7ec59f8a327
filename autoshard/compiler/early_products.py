"""Which products are made before what comes after them reads their operands.

XLA's schedule for least memory looks one step ahead: it puts off a product whose result takes more than the operands
that end with it, and gradients of weights can wait to the end of the step. Then their operands wait with them: for
that of an output layer, the gradient of all logits. Nor does it see that a product has become the last reader of a
value, if the reader before it knew the value by another name, as two products of one value do (`ListScheduler` in
OpenXLA, xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc).
"""

import dataclasses
from collections.abc import Iterable, Iterator

from autoshard.compiler.collective_combiner import is_reduced_alone
from autoshard.compiler.options import MOST_REDUCED_BYTES, MOST_SCATTERED_BYTES
from autoshard.compiler.planned_graph import PlannedGraph
from autoshard.compiler.primitives import PRODUCTS, SUMS
from autoshard.graph.computations import Computation, Instruction
from autoshard.graph.graph import Graph


@dataclasses.dataclass(frozen=True, slots=True)
class EarlyProduct:
    """A product that nothing after it waits for, and of which a later product of its computation reads an operand.

    Attributes:
      instruction: The product.
      slot: Its operand that a product reads next.
      ending: Its operands that no product reads after that one.
      is_term: Whether its result is only added to something: the compiler makes both in one kernel.
    """

    instruction: Instruction
    slot: int
    ending: tuple[int, ...]
    is_term: bool

    @property
    def operand(self) -> int:
        """The value that a product reads next."""
        return self.instruction.operand(self.slot)

    @property
    def is_convolution(self) -> bool:
        """Whether it is a convolution, and not a matrix product."""
        return self.instruction.name == "conv_general_dilated"


def early_products(computation: Computation) -> Iterator[EarlyProduct]:
    """The products of a computation that could be made before the next product that reads one of their operands, last
    first."""
    readers: dict[int | None, list[str]] = {}  # of each value, who reads it after the current equation
    next_product: dict[int, int] = {}  # of each value, the first position after the current one
    last_product: dict[int, int] = {}  # of each value, the last position
    awaited: set[int] = set()  # what products after the current one are made of
    for at in range(len(computation) - 1, -1, -1):
        instruction = computation[at]
        operands = {slot: o for slot, o in enumerate(instruction.operands) if o is not None}
        is_product, is_awaited = has_product(instruction), not awaited.isdisjoint(instruction.results)
        later = [slot for slot, o in operands.items() if o in next_product]
        if instruction.name in PRODUCTS and later and not is_awaited:
            first = min(later, key=lambda slot: next_product[operands[slot]])
            until = next_product[operands[first]]
            ending = [slot for slot, o in operands.items() if last_product.get(o, at) <= until]
            after = readers.get(instruction.results[0], [])
            yield EarlyProduct(instruction, first, tuple(ending), len(after) == 1 and after[0] in SUMS)
        if is_product or is_awaited:
            awaited.update(operands.values())
        for o in operands.values():
            readers.setdefault(o, []).append(instruction.name)
            if is_product:
                next_product[o] = at
                last_product.setdefault(o, at)


def has_product(instruction: Instruction) -> bool:
    """Whether an equation is a product, or contains one."""
    return instruction.name in PRODUCTS or any(has_product(i) for nested in instruction.nested for i in nested)


def num_products(instruction: Instruction) -> int:
    """How many products an equation contains; 1 if it is one."""
    return int(instruction.name in PRODUCTS) + sum(num_products(i) for nested in instruction.nested for i in nested)


def awaited_sums(graph: Graph, early: Iterable[EarlyProduct]) -> dict[int, int]:
    """For each matrix product, by operation, whose sum the next one waits for if it is reduced alone, the operand whose
    later readers do: the rule of `products_first`, as far as it holds whatever the shardings.

    `early`: All early products of the graph.
    """
    found = {}
    for product in early:
        size_bytes = graph.values[product.instruction.result()].size_bytes
        if not product.is_convolution and not product.is_term and is_reduced_alone(size_bytes):
            found[product.instruction.leaf.index] = product.operand
    return found


def products_first(planned: PlannedGraph, computation: Computation, workspace_bytes: float) -> dict[int, int]:
    """For products, by equation, the operand slot whose later readers wait for the product.

    Gradients of convolution kernels, which are small, are made first in any case: XLA may take a schedule that makes
    all of them last where it needs no more at its fullest instant than another, and does not count the gaps between
    what is then there for long. Of matrix products:

    It is that which a product reads next, and the products are those that none after them depends on. A product whose
    result must be summed over devices is left alone, unless it and its workspace take less than the operands that end
    with it: its partial sum may wait for others to be reduced with. One that is reduced alone need not wait, nor is it
    put off: where a gradient is scattered, so is its weight, and the copy that the next product gathers takes as much.
    XLA begins a reduce-scatter that makes many bytes after all that makes fewer, so that the next product waits for the
    sum. A product that a sum follows is left alone (`aliasing.sums_in_place`): the compiler makes both in one kernel.

    Args:
      planned: The graph and the plan. computation: One of its computations.
      workspace_bytes: What the compiler gives each matrix product beside its operands and result.
    """
    return {
        product.instruction.equation: product.slot
        for product in early_products(computation)
        if product.is_convolution or (not product.is_term and _is_made_first(planned, product, workspace_bytes))
    }


def _is_made_first(planned: PlannedGraph, product: EarlyProduct, workspace_bytes: float) -> bool:
    instruction = product.instruction
    if not is_partial(planned, instruction) or is_summed_alone(planned, instruction):
        return True
    read_as = {slot: steps[-1] for slot, steps in planned.plan_of(instruction).operands}
    ending_bytes = sum(
        planned.shard_bytes(instruction.operand(slot), read_as[slot]) for slot in product.ending if slot in read_as
    )
    return frees_more(ending_bytes, _partial_bytes(planned, instruction), workspace_bytes)


def frees_more(ending_bytes: float, partial_bytes: float, workspace_bytes: float) -> bool:
    """Whether the operands that end with a product take more than its partial sum and its workspace."""
    return ending_bytes > partial_bytes + workspace_bytes


def partial_axes(planned: PlannedGraph, product: Instruction) -> frozenset[str]:
    """The mesh axes over which each device makes only a part of the sum: those that split a dimension that a matrix
    product sums over.

    Operands that are not named are those that the program makes from nothing; the others tell how they are split.
    """
    rule = product.leaf.rule
    return frozenset(
        axis
        for slot, steps in planned.plan_of(product).operands
        for dim, entries in zip(rule.operands[slot], steps[-1], strict=True)
        if any(rule.factors[f].reduction for f in dim)
        for axis in entries
    )


def is_partial(planned: PlannedGraph, product: Instruction) -> bool:
    """Whether each device makes only a part of the sum."""
    return bool(partial_axes(planned, product))


def is_all_reduced(planned: PlannedGraph, product: Instruction) -> bool:
    """Whether the sum over some axes is all-reduced: of what is left where it is scattered over others, or of all."""
    return not partial_axes(planned, product) <= {axis for axis, _ in planned.plan_of(product).scatters}


def is_summed_alone(planned: PlannedGraph, product: Instruction) -> bool:
    """Whether a product's partial sum is scattered by a collective of its own."""
    return bool(planned.plan_of(product).scatters and is_reduced_alone(_partial_bytes(planned, product)))


def is_joined_with_none(planned: PlannedGraph, product: Instruction) -> bool:
    """Whether a product's partial sum is so large that it is joined with no other where collectives hide: by what a
    reduce-scatter leaves of it, or by all that an all-reduce sums."""
    plan = planned.plan_of(product)
    size_bytes = planned.shard_bytes(product.result(), dict(plan.results).get(0, ()))
    return size_bytes > (MOST_SCATTERED_BYTES if plan.scatters else MOST_REDUCED_BYTES)


def _partial_bytes(planned: PlannedGraph, product: Instruction) -> float:
    """Bytes of a product's result on a device before it is scattered."""
    plan = planned.plan_of(product)
    scattered = {axis for axis, _ in plan.scatters}
    whole = tuple(tuple(a for a in axes if a not in scattered) for axes in dict(plan.results).get(0, ()))
    return planned.shard_bytes(product.result(), whole)
