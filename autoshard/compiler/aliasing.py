"""Which values share a buffer."""

from collections.abc import Set

from autoshard.compiler.def_use import DefUse
from autoshard.compiler.primitives import PRODUCTS, SUMS
from autoshard.graph.graph import Graph, Operation, OperationKind

_ALIASING = frozenset(
    {
        "reshape",
        "squeeze",
        "expand_dims",
        "optimization_barrier",
        "sharding_constraint",
        "copy",
        "bitcast_convert_type",
        "loop_carry",
        "branch_join",
        "random_wrap",
        "random_unwrap",
        "pvary",
        "pcast",
    }
)


def is_alias(operation: Operation) -> bool:
    """Whether the results are other names of the operands' memory."""
    return operation.name in _ALIASING


def aliases(graph: Graph) -> dict[int, int]:
    """For each value that is another name of a value's memory, the latter."""
    root: dict[int, int] = {}
    for operation in graph.operations:
        if operation.kind is OperationKind.LOOP_CARRY:
            # the loop owns one buffer: the value inside; the value after is its last content
            inside, after = operation.results
            if after is not None and inside is not None:
                root[after] = inside
        elif is_alias(operation) and operation.operands:
            for slot, r in enumerate(operation.results):
                source = operation.operands[slot if slot < len(operation.operands) else 0]
                if r is not None and source is not None:
                    root[r] = root.get(source, source)
    return root


def sums_in_place(chains: DefUse, free: Set[int]) -> dict[int, int]:
    """For each sum of a product and another value, the product whose buffer it is made in.

    XLA:GPU hands the other term to the product's kernel, which adds to it (`GemmRewriter`, `ConvRewriter`), if nothing
    else reads the product.
    """
    made_in: dict[int, int] = {}
    values = chains.graph.values
    for operation in chains.graph.operations:
        if operation.name not in SUMS or operation.results[0] is None:
            continue
        result = operation.results[0]
        for o in reversed(operation.operands):
            if (
                o is not None
                and (producer := chains.producer[o]) is not None
                and producer.name in PRODUCTS
                and len(chains.consumers[o]) == 1
                and o not in chains.outputs
                and values[o].size_bytes == values[result].size_bytes
                and chains.loop_nest[producer.index] == chains.loop_nest[operation.index]
                and not any(other in free for other in operation.operands)
            ):
                made_in[result] = o
                break
    return made_in


def scattered_into(chains: DefUse, free: Set[int]) -> dict[int, int]:
    """For each scatter into zeros whose result is only added to a value, that value: XLA scatters into it instead.

    The gradient of a table is never there as such where a plain update adds it to the table.
    """
    made_in: dict[int, int] = {}
    for operation in chains.graph.operations:
        result = operation.results[0] if operation.results else None
        if operation.name != "scatter-add" or operation.operands[0] not in free or result is None:
            continue
        consumers = chains.consumers[result]
        if len(consumers) == 1 and consumers[0][0].name in SUMS and result not in chains.outputs:
            others = [o for o in consumers[0][0].operands if o is not None and o != result and o not in free]
            if others:
                made_in[result] = others[0]
    return made_in
