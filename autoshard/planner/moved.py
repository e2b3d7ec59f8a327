"""In which type a value travels: the compiler moves a tensor before it is widened, or after it is narrowed.

XLA swaps collectives with conversions where that makes them smaller (OpenXLA, `CollectiveQuantizer` in
xla/hlo/transforms/collectives/collective_quantizer.h).
"""

from collections.abc import Sequence

from autoshard.graph.graph import Graph, Operation


def moved_itemsizes(graph: Graph) -> tuple[int, ...]:
    """For each value, the bytes of an element as it is moved, were every reader to take it as it is."""
    sizes = [v.itemsize_bytes for v in graph.values]
    for operation in graph.operations:
        if operation.name == "convert_element_type" and operation.operands[0] is not None:
            (result,) = operation.results
            if result is not None and graph.values[result].shape:
                sizes[result] = min(sizes[result], sizes[operation.operands[0]])
    return tuple(sizes)


def read_itemsize(graph: Graph, moved_bytes: int, readers: Sequence[Operation]) -> int:
    """Bytes of an element of a value on its way to `readers`; `moved_bytes` if they take it as it is."""
    narrowed = [
        graph.values[o.results[0]].itemsize_bytes
        for o in readers
        if o.name == "convert_element_type" and o.results[0] is not None
    ]
    return min(moved_bytes, max(narrowed)) if len(narrowed) == len(readers) and narrowed else moved_bytes
