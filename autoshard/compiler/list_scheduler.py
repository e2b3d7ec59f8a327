"""Which products XLA makes before the one that the program has in front of them, since that frees more memory.

XLA's schedule for least memory does next, of all that waits for nothing, what frees most for what it makes
(`ListScheduler` in OpenXLA, xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc). In the backward pass of attention
the program makes the gradient of the weights of all pairs first, and then that of the values, with which the weights
themselves end. XLA does it the other way round, and never has both.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Set

from autoshard.compiler.def_use import DefUse
from autoshard.compiler.primitives import PRODUCTS
from autoshard.graph.graph import Operation


@dataclasses.dataclass(frozen=True, slots=True)
class FreeingFirst:
    """Products that are made before the one in front of them.

    Attributes:
      made: For the result of each, the operation at which it is there.
      stops: For each buffer that ends with one of them, one past the last operation that needs it.
    """

    made: Mapping[int, int]
    stops: Mapping[int, int]


def freeing_first(
    chains: DefUse,
    stops: Mapping[int, int],
    root: Mapping[int, int],
    weights: Set[int],
    gradients: Set[int],
) -> FreeingFirst:
    """Those of two products in a row, neither of which waits for the other, of which the second frees more.

    Bytes are those of whole tensors: how a plan splits activations that belong together is much the same for all.

    Args:
      chains: The graph. stops: For each buffer, one past the last operation that needs it in the program's order.
      root: For each value without a buffer of its own, whose it has.
      weights, gradients: Weights, whose gathered copies count as well, and gradients, which wait for others to be
        reduced with. Products that read or make one stay where they are, but for the gradient of a weight behind that
        of what the weight was multiplied with, as of several matrices at once: activations end with it.
    """
    values = chains.graph.values

    def buffers_of(operation: Operation) -> set[int]:
        return {root.get(o, o) for o in operation.operands if o is not None}

    def ending(operation: Operation) -> set[int]:
        """The buffers that end with an operation in the program's order; arguments never do."""
        ends = operation.index + 1
        return {b for b in buffers_of(operation) if chains.producer[b] is not None and stops.get(b) == ends}

    def freed_bytes(operation: Operation, buffers: Set[int]) -> int:
        return sum(values[b].size_bytes for b in buffers) - values[operation.result()].size_bytes

    made: dict[int, int] = {}
    sooner: dict[int, int] = {}
    products, held = [o for o in chains.graph.operations if o.name in PRODUCTS], weights | gradients
    for first, second in itertools.pairwise(products):
        if chains.region[second.index] != chains.region[first.index] + 1:
            continue
        known = {*first.operands, *first.results, *second.operands, *second.results}
        if _is_gradient_behind(first, second, weights, gradients):
            known -= held
        is_ready = all([chains.defined_at(b) < first.index for b in buffers_of(second)])
        if not is_ready or known & held or chains.loop_nest[first.index] != chains.loop_nest[second.index]:
            continue
        gained = ending(second) - buffers_of(first)
        copies = {o for o in first.operands if o is not None and o in weights}
        if gained and freed_bytes(second, gained) > freed_bytes(first, ending(first) | copies):
            made[second.result()] = first.index - 1
            sooner.update((b, first.index) for b in gained)
    return FreeingFirst(made, sooner)


def _is_gradient_behind(first: Operation, second: Operation, weights: Set[int], gradients: Set[int]) -> bool:
    """Whether a product of a weight is followed by one that makes a gradient of what the former reads as well."""
    shared = {o for o in first.operands if o is not None and o not in weights} & set(second.operands)
    return bool(shared) and not weights.isdisjoint(first.operands) and second.result() in gradients
