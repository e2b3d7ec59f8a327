"""Which gradients of convolution kernels execution has made before others read what they are made of."""

from collections.abc import Set

from autoshard.compiler.primitives import PRODUCTS
from autoshard.graph.graph import Graph


def kernels_first(graph: Graph, gradients: Set[int]) -> dict[int, int]:
    """For each convolution that makes a gradient, the operand whose later readers wait for it.

    It is that which a product reads next: the rule of `execution/products_first.py`. A gradient of which no product
    reads an operand later, as of a first layer, is made when XLA sees fit.

    Args:
      graph: The graph. gradients: What only the successors of the state are made of.
    """
    next_product: dict[int, int] = {}  # of each value, the first after the current one
    found: dict[int, int] = {}
    for operation in reversed(graph.operations):
        if operation.name not in PRODUCTS:
            continue
        operands = [o for o in operation.operands if o is not None]
        later = [o for o in operands if o in next_product]
        if later and operation.name == "conv_general_dilated" and operation.results[0] in gradients:
            found[operation.index] = min(later, key=next_product.__getitem__)
        next_product.update((o, operation.index) for o in operands)
    return found
