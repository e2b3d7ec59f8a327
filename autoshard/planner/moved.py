"""In which type a value travels: the compiler moves a tensor before it is widened.

XLA swaps collectives with conversions that make a tensor larger (OpenXLA, `CollectiveQuantizer` in
xla/hlo/transforms/collectives/collective_quantizer.h). A conversion behind the move that makes it smaller was not seen
to be swapped (jax 0.10.2, XLA:GPU), so that it is for the planner to convert first.
"""

from autoshard.graph.graph import Graph


def moved_itemsizes(graph: Graph) -> tuple[int, ...]:
    """For each value, the bytes of an element as it is moved."""
    sizes = [v.itemsize_bytes for v in graph.values]
    for operation in graph.operations:
        if operation.name == "convert_element_type" and operation.operands[0] is not None:
            (result,) = operation.results
            if result is not None and graph.values[result].shape:
                sizes[result] = min(sizes[result], sizes[operation.operands[0]])
    return tuple(sizes)
