"""Which gradients execution has reduced before the next product is made, each by a collective of its own."""

from autoshard.compiler.primitives import PRODUCTS, SUMS
from autoshard.cost.collectives import COMBINED_BYTES
from autoshard.graph.graph import Graph


def waited_for(graph: Graph) -> dict[int, int]:
    """For each product whose sum over devices the next one may wait for, the operand whose later readers do.

    They do if the gradient is scattered and its partial sum takes more than `COMBINED_BYTES`: the rule of
    `execution/products_first.py`, as far as it holds whatever the shardings.
    """
    readers: dict[int, list[str]] = {}  # of each value, the operations after the current one
    next_product: dict[int, int] = {}  # of each value, the first after the current one
    awaited: set[int] = set()  # what products after the current one are made of
    found: dict[int, int] = {}
    for operation in reversed(graph.operations):
        operands = [o for o in operation.operands if o is not None]
        is_awaited = not awaited.isdisjoint(operation.results)
        if operation.name == "dot_general" and not is_awaited:
            result = operation.results[0]
            after, later = readers.get(result, []), [o for o in operands if o in next_product]
            is_term = len(after) == 1 and after[0] in SUMS
            if later and not is_term and graph.values[result].size_bytes > COMBINED_BYTES:
                found[operation.index] = min(later, key=next_product.__getitem__)
        is_product = operation.name in PRODUCTS
        if is_product or is_awaited:
            awaited.update(operands)
        for o in operands:
            readers.setdefault(o, []).append(operation.name)
            if is_product:
                next_product[o] = operation.index
    return found
