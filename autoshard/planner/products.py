"""What a matrix product needs beside its operands and its result."""

from collections.abc import Iterator, Sequence

import numpy as np

from autoshard.cluster import LogicalMesh
from autoshard.graph.graph import FactorRule
from autoshard.planner.allowed import Decision
from autoshard.planner.program import Program


def workspaces(
    program: Program, mesh: LogicalMesh, decisions: Sequence[Decision], first_group: int
) -> Iterator[tuple[int, int, int, np.ndarray, None]]:
    """(node, start, stop, bytes of each choice, None) of the workspace of every matrix product.

    XLA:GPU gives each cuBLAS product one, whatever its size. A product with a vector is not one of cuBLAS but a sum in
    a kernel of XLA's own (`DotStrengthReduction`).

    Args:
      program, mesh: What is planned. decisions: The nodes of the problem. first_group: The node of the first group.
    """
    size_bytes = mesh.device_type.product_workspace_bytes
    if not size_bytes:
        return
    amounts: dict[int, np.ndarray] = {}
    behind = dict(program.live.behind)
    for group in program.groups:
        node = first_group + group.index
        for index in group.operations:
            operation = program.graph.operations[index]
            if operation.name == "dot_general" and _is_of_matrices(operation.rule):
                num_choices = len(decisions[node].rows)
                if num_choices not in amounts:
                    amounts[num_choices] = np.full(num_choices, float(size_bytes))
                at = behind.get(index, index)
                yield node, at, at + 1, amounts[num_choices], None


def _is_of_matrices(rule: FactorRule) -> bool:
    """Whether both operands of a product have a dimension of their own."""
    sides = [{f for dim in dims for f in dim} for dims in rule.operands]
    return all([any([rule.factors[f].size > 1 for f in own - other]) for own, other in (sides, sides[::-1])])
