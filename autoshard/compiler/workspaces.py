"""What an operation needs beside its operands and its result: matrix products, look-ups that are exchanged, regions."""

from collections.abc import Iterator, Sequence

import numpy as np

from autoshard.compiler.analysis import ProgramAnalysis
from autoshard.compiler.buffer_uses import BufferKind, BufferUse, GroupChoices
from autoshard.graph.graph import FactorRule


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
            if operation.name == "dot_general" and _is_of_matrices(operation.rule):
                num_choices = len(choices[group.index].partial_bytes)
                if num_choices not in amounts:
                    amounts[num_choices] = np.full(num_choices, float(workspace_bytes))
                at = analysis.live.delayed.get(index, index)
                yield BufferUse(BufferKind.WORKSPACE, group.index, at, at + 1, amounts[num_choices])


def own_workspaces(analysis: ProgramAnalysis, choices: Sequence[GroupChoices]) -> Iterator[BufferUse]:
    """What look-ups exchange and what regions hold inside, while they run."""
    for group, own in zip(analysis.groups, choices, strict=True):
        if own.workspace_bytes.any():
            at = group.operations[0]
            yield BufferUse(BufferKind.WORKSPACE, group.index, at, at + 1, own.workspace_bytes)


def _is_of_matrices(rule: FactorRule) -> bool:
    """Whether both operands of a product have a dimension of their own."""
    sides = [{f for dim in dims for f in dim} for dims in rule.operands]
    return all([any([rule.factors[f].size > 1 for f in own - other]) for own, other in (sides, sides[::-1])])
