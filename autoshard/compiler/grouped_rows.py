"""What XLA lays out for products of rows in groups (`jax.lax.ragged_dot`), which it computes as dense products.

`RaggedDotRewriter` repeats what lies in groups once for each group, with zeros for the rows of others, and multiplies
all of it with the matrices of all groups. Where groups of contracted rows are multiplied with each other, as for the
gradient of the matrices, both sides are repeated. The matrices are transposed where what is summed is not their first
dimension behind the groups. Execution keeps what is laid out from being shared by several products
(`execution/ragged_rows.py`).
"""

from autoshard.graph.graph import Graph, Operation


def copies_for_groups(graph: Graph, operation: Operation) -> tuple[tuple[int, float], ...]:
    """The operands that are laid out anew for a product, each with the bytes of that; none for any other operation."""
    if operation.name != "ragged_dot_general":
        return ()
    rows, matrices, sizes = (operation.operand(slot) for slot in range(3))
    (num_groups,) = graph.values[sizes].shape
    of_rows, of_matrices, _ = operation.rule.operands
    factors, size_bytes = operation.rule.factors, lambda value: float(graph.values[value].size_bytes)
    repeated = rows, num_groups * size_bytes(rows)
    if len(operation.rule.results[0]) == len(of_rows) + len(of_matrices) - 1:  # groups of contracted rows
        return repeated, (matrices, num_groups * size_bytes(matrices))
    is_summed = [any(factors[f].reduction is not None for f in dim) for dim in of_matrices]
    is_transposed = len(of_matrices) > 1 and not is_summed[1]
    return (repeated, (matrices, size_bytes(matrices))) if is_transposed else (repeated,)
