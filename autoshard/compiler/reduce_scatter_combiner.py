"""Which partial sums of gradients XLA reduces together, and so how long each waits.

XLA joins the reduce-scatters of one type, up to `COMBINED_BYTES` of results: it goes through them as a walk from the
program's outputs back to what they are made of meets them, and begins anew with the first that does not fit (OpenXLA,
xla/service/collective_combiner_utils.h). The joined one waits for the last of them, with all its operands.
"""

import math
from collections.abc import Collection, Sequence, Set

from autoshard.compiler.def_use import DefUse
from autoshard.cost.collectives import COMBINED_BYTES
from autoshard.graph.graph import Graph
from autoshard.graph.groups import Group


def combined_until(
    graph: Graph, groups: Sequence[Group], order: Sequence[int], num_devices: int, alone: Collection[int] = ()
) -> dict[int, int]:
    """For each group that makes a gradient, one past the operation at which its reduce-scatter runs, if it does.

    A gradient that is scattered is so over all devices, unless something else keeps it whole. Those of the operations
    `alone` are reduced at once. `order`: As `reduce_scatter_order` tells.
    """
    joined: list[list[int]] = []
    latest: dict[str, tuple[list[int], float]] = {}  # of each type, the groups that the next may join, and their bytes
    for index in order:
        value = graph.values[groups[index].writes[-1].value]
        own_bytes = value.size_bytes / num_devices
        found, found_bytes = latest.get(value.dtype, ([], math.inf))
        if own_bytes > COMBINED_BYTES or groups[index].operations[0] in alone:
            joined.append([index])  # joins nothing; the next may still join those before it
            continue
        if found_bytes + own_bytes > COMBINED_BYTES:
            found, found_bytes = [], 0.0
            joined.append(found)
        found.append(index)
        latest[value.dtype] = found, found_bytes + own_bytes
    last = [max([groups[g].operations[-1] for g in found]) for found in joined]
    return {g: stop + 1 for found, stop in zip(joined, last, strict=True) for g in found}


def reduce_scatter_order(chains: DefUse, groups: Sequence[Group], gradients: Set[int]) -> tuple[int, ...]:
    """The groups that make gradients by sums, in the order in which XLA's walk from the outputs meets them.

    It goes through the successors of the state.
    """
    graph, producer = chains.graph, chains.producer
    made_by = _made_by(graph, groups, gradients)
    found: dict[int, None] = {}
    seen: set[int] = set()
    for output in graph.outputs:
        left = [] if output.value is None or output.successor_of is None else [output.value]
        while left:
            value = left.pop()
            if value in seen:
                continue
            seen.add(value)
            operation = producer[value]
            if value in made_by:
                found.setdefault(made_by[value])
            elif operation is not None and not operation.rule.is_heavy:
                operands = [o for o in operation.operands if o is not None and graph.values[o].shape]
                left.extend(reversed(operands))
    return tuple(found)


def _made_by(graph: Graph, groups: Sequence[Group], gradients: Set[int]) -> dict[int, int]:
    """For each gradient that is a sum, the group that makes it.

    One that an optimizer sums by rows and columns is a gradient, too: what counts is that nothing heavy is made of it.
    """
    operations = graph.operations
    awaited: set[int] = set()  # what heavy operations are made of
    for operation in reversed(operations):
        if operation.rule.is_heavy or not awaited.isdisjoint(operation.results):
            awaited.update(o for o in operation.operands if o is not None)
    found: dict[int, int] = {}
    for group in groups:
        value = group.writes[-1].value
        is_last = operations[group.operations[0]].rule.is_heavy and value not in awaited
        if (is_last or value in gradients) and any(f.reduction is not None for f in group.factors):
            found[value] = group.index
    made_of_gradients: set[int] = set()
    for operation in operations:
        is_later = not made_of_gradients.isdisjoint(operation.operands)
        for r in operation.results:
            if r is not None and is_later:
                found.pop(r, None)
            if r is not None and (is_later or r in found):
                made_of_gradients.add(r)
    return found
