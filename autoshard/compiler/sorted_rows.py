"""What XLA:GPU sorts to find the largest elements of rows (`top_k`).

A kernel of its own finds them if they are few and the rows are long (`TopkSpecializer`). Otherwise the rows are sorted
whole, together with the place of each element (`TopkDecomposer`), in the memory of the rows if nothing else needs
these. Execution keeps what is taken of them from being taken later (`execution/by_shards.py`).
"""

import math
from collections.abc import Mapping

from autoshard.graph.graph import Graph, Operation

_MOST_TAKEN, _SHORTEST_ROW, _KERNEL_DTYPES = 16, 1024, frozenset({"float32", "bfloat16"})
"""What `TopkSpecializer` has a kernel for: how many elements at most, of rows how long at least, and of which types.
Read off compiled programs, as `tests/compiler/test_sorted_rows.py` does (jax 0.10.2)."""

_PLACE_BYTES = 4
"""Of the place of an element, an int32."""


def sorted_rows(graph: Graph, operation: Operation, stops: Mapping[int, int]) -> tuple[tuple[int, float], ...]:
    """The operand whose rows are sorted for an operation, with the bytes of what that makes; none where none are.

    `stops`: One past the last reader of each value that the program makes.
    """
    if operation.name != "top_k" or operation.operands[0] is None or not _are_sorted(graph, operation):
        return ()
    value = operation.operands[0]
    places_bytes = float(_PLACE_BYTES * math.prod(graph.values[value].shape))
    is_needed = stops.get(value) != operation.index + 1
    return ((value, places_bytes + is_needed * graph.values[value].size_bytes),)


def _are_sorted(graph: Graph, operation: Operation) -> bool:
    """Whether whole rows are sorted to find the largest of their elements."""
    rows = graph.values[operation.operand(0)]
    whole = [d for d, dim in enumerate(operation.rule.operands[0]) if not dim]
    row = max(whole, key=lambda d: rows.shape[d])  # other dimensions that stay whole have one element
    taken = max(graph.values[r].shape[row] for r in operation.results if r is not None)
    has_kernel = rows.shape[row] >= _SHORTEST_ROW and rows.dtype in _KERNEL_DTYPES and taken <= _MOST_TAKEN
    return not has_kernel
