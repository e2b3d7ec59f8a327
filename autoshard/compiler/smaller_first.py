"""Which of two products that share an operand is made first, where collectives run behind kernels.

The backward pass of a product of two activations makes a gradient for each of them: of attention, one as large as all
scores, and one as large as the values. What the smaller one is made of beside the shared operand is free once it is
made, so that the larger one can take its place.
"""

from collections.abc import Set

from autoshard.compiler.planned_graph import PlannedGraph
from autoshard.graph.computations import Computation, Instruction

_REACH = 3
"""How many equations after one product the other one is at most: what transposes an operand or a result lies between
them."""


def smaller_first(planned: PlannedGraph, computation: Computation, awaited: Set[int | None]) -> dict[int, int]:
    """For products, by equation, the equation before which each is made: a larger product that comes before it, reads
    one of its operands, and is not needed for it. Other products need both.

    Args:
      planned: The graph and the plan. computation: One of its computations. awaited: What products are made of.
    """
    found: dict[int, int] = {}
    for at, first in enumerate(computation):
        if first.name != "dot_general" or first.equation in found or awaited.isdisjoint(first.results):
            continue
        made = {*first.results}
        for second in computation[at + 1 : at + 1 + _REACH]:
            if second.name == "dot_general":
                shared = {*first.operands}.intersection(second.operands) - {None}
                if shared and made.isdisjoint(second.operands) and not awaited.isdisjoint(second.results):
                    if _result_bytes(planned, second) < _result_bytes(planned, first):
                        found[second.equation] = first.equation
                break
            made.update(second.results)
    return found


def _result_bytes(planned: PlannedGraph, product: Instruction) -> float:
    """Bytes of a product's result on a device."""
    return planned.shard_bytes(product.result(), dict(planned.plan_of(product).results).get(0, ()))
