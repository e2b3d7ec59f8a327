"""What an operation needs beside its operands and its result: matrix products, sorts, look-ups that are exchanged,
regions."""

from collections.abc import Iterator, Sequence

import numpy as np

from autoshard.compiler.analysis import ProgramAnalysis
from autoshard.compiler.buffer_uses import BufferKind, BufferUse, GroupChoices
from autoshard.compiler.grouped_rows import copies_for_groups
from autoshard.compiler.sorted_rows import sorted_rows
from autoshard.graph.graph import FactorRule

_MATRIX_PRODUCTS = frozenset({"dot_general", "ragged_dot_general"})
"""Products that cuBLAS may compute."""


def product_workspaces(
    analysis: ProgramAnalysis, choices: Sequence[GroupChoices], workspace_bytes: int
) -> Iterator[BufferUse]:
    """The workspace of every matrix product.

    XLA:GPU gives each cuBLAS product one, whatever its size (`GemmRewriter`). A product with a vector is not one of
    cuBLAS but a sum in a kernel of XLA's own (`DotStrengthReduction`).

    Args:
      analysis: The program. choices: Of each group. workspace_bytes: Of one product.
    """
    amounts: dict[int, np.ndarray] = {}
    for group in analysis.groups:
        for index in group.operations:
            operation = analysis.graph.operations[index]
            if operation.name in _MATRIX_PRODUCTS and _is_of_matrices(operation.rule):
                num_choices = len(choices[group.index].partial_bytes)
                if num_choices not in amounts:
                    amounts[num_choices] = np.full(num_choices, float(workspace_bytes))
                at = analysis.live.delayed.get(index, index)
                yield BufferUse(BufferKind.WORKSPACE, group.index, at, at + 1, amounts[num_choices])


def laid_out(
    analysis: ProgramAnalysis, choices: Sequence[GroupChoices], mesh_shape: Sequence[int]
) -> Iterator[BufferUse]:
    """What products of rows in groups are given instead of their operands (`grouped_rows.py`), and what is sorted
    (`sorted_rows.py`)."""
    graph, live = analysis.graph, analysis.live
    stops = {life.value: life.stop for life in live.ranges if analysis.chains.producer[life.value] is not None}
    for group, own in zip(analysis.groups, choices, strict=True):
        for index in group.operations:
            operation, at = graph.operations[index], live.delayed.get(index, index)
            found = *copies_for_groups(graph, operation), *sorted_rows(graph, operation, stops)
            for value, size_bytes in found:
                for access, layouts in zip(group.reads, own.reads, strict=True):
                    if access.value == value and index in access.operations:
                        taken = layouts.shard_bytes(size_bytes, mesh_shape)
                        yield BufferUse(BufferKind.WORKSPACE, group.index, at, at + 1, taken)


def own_workspaces(analysis: ProgramAnalysis, choices: Sequence[GroupChoices]) -> Iterator[BufferUse]:
    """What look-ups exchange and what regions hold inside, while they run."""
    for group, own in zip(analysis.groups, choices, strict=True):
        if own.workspace_bytes.any():
            at = group.operations[0]
            yield BufferUse(BufferKind.WORKSPACE, group.index, at, at + 1, own.workspace_bytes)


def _is_of_matrices(rule: FactorRule) -> bool:
    """Whether both operands of a product have a dimension of their own."""
    sides = [{f for dim in dims for f in dim} for dims in rule.operands[:2]]
    return all([any([rule.factors[f].size > 1 for f in own - other]) for own, other in (sides, sides[::-1])])
