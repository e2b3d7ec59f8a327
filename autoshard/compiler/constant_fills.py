"""Buffers that are filled with a constant before something is added into them, and when XLA:GPU fills them."""

from collections.abc import Collection, Mapping, Set

from autoshard.compiler.def_use import DefUse
from autoshard.compiler.primitives import PRODUCTS
from autoshard.graph.graph import OperationKind

_LARGE_BYTES = 2**20
"""From which size on it matters when a buffer is filled."""


def late_fills(chains: DefUse, made_in: Mapping[int, int]) -> dict[int, bool]:
    """For each scatter into a broadcast scalar that execution fills when what is scattered is there, by operation,
    whether it does so only if the sum is partial.

    Left alone, XLA's schedule for least memory takes first what waits for nothing, and one kernel makes all constants
    of one type (`MultiOutputFusion`): the zeros of all rounds of a program would be there from the first one on.
    `made_in`: results that are scattered into another value; they need zeros only where they are partial sums.
    """
    found = {}
    for operation in chains.graph.operations:
        if operation.name.startswith("scatter") and not chains.loop_nest[operation.index]:
            filled = chains.producer[operation.operands[0]] if operation.operands[0] is not None else None
            sizes_bytes = [chains.graph.values[r].size_bytes for r in operation.results if r is not None]
            is_constant = filled is not None and filled.name == "broadcast_in_dim" and filled.operands == (None,)
            if is_constant and max(sizes_bytes, default=0) >= _LARGE_BYTES:
                found[operation.index] = operation.results[0] in made_in
    return found


def late_stacks(chains: DefUse) -> frozenset[int]:
    """The operations that stack results of scans in buffers that execution fills when the scan's operands are there:
    large ones of scans that are in no other loop.

    Left alone, XLA fills all buffers of one type at once, when the first scan of a program begins: of layers that are
    computed again, each with a scan, the stacks of all would take memory from then on.
    """
    values = chains.graph.values
    return frozenset(
        o.index
        for o in chains.graph.operations
        if o.kind is OperationKind.SCAN_STACK
        and len(chains.loop_nest[o.index]) == 1
        and values[o.result()].size_bytes >= _LARGE_BYTES
        and not values[o.result()].dtype.startswith("key")
    )


def constant_fills(
    chains: DefUse, free: Set[int], gradients: Set[int], made_in: Mapping[int, int], late: Collection[int] = ()
) -> dict[int, int]:
    """For each value whose buffer is filled with a constant before something is written into it, the operation at which
    that happens: results of scatters into constants, and the stacked outputs of loops, but for those in `late`
    (`late_fills`, `late_stacks`).

    XLA's schedule for least memory takes first what waits for nothing: the zeros to which the gradients of a look-up
    are added are mostly there as soon as the product from which the first gradient comes. And one kernel makes all
    constants of one type (`MultiOutputFusion`). The gradient of a maximum over windows becomes such a scatter
    (`SelectAndScatterExpander`); its zeros are made with what the windows slide over, which has the same shape and,
    behind a ReLU, is compared to zeros.
    """
    operations, values = chains.graph.operations, chains.graph.values
    first = next((o.index for o in operations if o.rule.is_heavy and o.results and o.results[0] in gradients), 0)
    first = next((o.index for o in reversed(operations[:first]) if o.name in PRODUCTS), first)
    found: dict[int, int] = {}
    for o in operations:
        for value in o.results:
            if value is None or value in made_in or not values[value].shape:
                continue
            if o.index in late:
                continue
            if o.kind is OperationKind.SCAN_STACK:
                if len(chains.loop_nest[o.index]) == 1:
                    found[value] = chains.defined_at(value)
            elif o.name == "select_and_scatter_add":
                found[value] = chains.defined_at(o.operand(1))
            elif o.name.startswith("scatter") and o.operands[0] in free and not chains.loop_nest[o.index]:
                found[value] = min(o.index, first) if value in gradients else o.index
    together: dict[tuple[tuple[int, ...], str], int] = {}
    for value, at in found.items():
        key = values[value].shape, values[value].dtype
        together[key] = min(at, together.get(key, at))
    return {value: together[values[value].shape, values[value].dtype] for value in found}
