"""From the compiler's buffers to the solver's usages: the nodes that owners are, and the instants that matter.

Time is the index of an operation. Only some instants are kept: any set of buffers alive together is alive at one of
them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autoshard.compiler.buffer_uses import BufferKind, BufferUse, Choices, OperandRead, spans_of
from autoshard.compiler.instants import instants_that_matter
from autoshard.compiler.protocol import Compiler
from autoshard.graph.layout_columns import LayoutColumn
from autoshard.planner.program import Program
from autoshard.solver.problem import EdgeUsage, Usage


@dataclasses.dataclass(frozen=True, slots=True)
class ResidualEdge:
    """The edge between what defines a residual and whether it lies in the memory of the host.

    Attributes:
      edge: Its number. away: The operations during which it is not on the device then.
      column: The layouts of the residual under each choice.
    """

    edge: int
    away: tuple[int, int]
    column: LayoutColumn


def _around_host(use: BufferUse, residual: ResidualEdge) -> list[BufferUse]:
    """The buffers of a value that may lie on the host meanwhile: one if it stays, two if it goes."""
    own, of_choice = residual.column, use.size_bytes
    first = np.unique(own.of_choice, return_index=True)[1]  # a choice with each layout
    sizes_bytes, (leaves, comes) = of_choice[first], residual.away
    stays = np.stack([sizes_bytes, 0 * sizes_bytes], axis=1)
    goes = stays[:, ::-1].copy()
    return [
        dataclasses.replace(use, size_bytes=stays),
        BufferUse(BufferKind.AROUND_HOST, use.owner, use.start, leaves, goes),
        BufferUse(BufferKind.AROUND_HOST, use.owner, comes, use.stop, goes),
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Usages:
    """What takes memory, and when.

    Attributes:
      usages: Values, partial sums, and workspaces of products. edge_usages: Resharded copies.
      buffers: What each usage stands for, then each usage of an edge.
      instants: The operation that runs at each instant.
    """

    usages: tuple[Usage, ...]
    edge_usages: tuple[EdgeUsage, ...]
    buffers: tuple[BufferUse, ...]
    instants: tuple[int, ...]


def usages_of(
    compiler: Compiler,
    program: Program,
    choices: Choices,
    reads: Sequence[OperandRead | None],
    node_of: Callable[[int], int],
    residuals: Mapping[int, "ResidualEdge"],
) -> Usages:
    """Collects usages of memory.

    Args:
      compiler: Whose buffers they are. program: What is planned. choices: What the choices of its nodes mean.
      reads: For each edge, what is read in another layout; None where no copy is made for a group.
      node_of: The node that defines a value.
      residuals: By value, the edges of those that may lie in the memory of the host meanwhile.
    """
    first_group = len(program.graph.arguments)
    owned, of_edges = [], []
    for use in compiler.buffers(program.analysis, choices):
        if use.kind is BufferKind.VALUE and use.owner in residuals:
            of_edges += _around_host(use, residuals[use.owner])
        else:
            owned.append(use)
    copied = ((edge, read) for edge, read in enumerate(reads) if read is not None)
    copies = list(compiler.operand_copies(program.analysis, copied))
    found = [*owned, *of_edges, *copies]
    edge_of = [None] * len(owned) + [residuals[u.owner].edge for u in of_edges] + [u.owner for u in copies]
    spans = spans_of(found)
    instants = instants_that_matter(*spans.T)
    at = np.searchsorted(instants, spans).tolist()
    kept = [k for k, (first, last) in enumerate(at) if first < last]
    usages, edge_usages = [], []
    for k in kept:
        use, (first, last) = found[k], at[k]
        if (edge := edge_of[k]) is not None:
            edge_usages.append(EdgeUsage(edge, first, last, use.size_bytes))
        else:
            node = first_group + use.owner if use.value is None else node_of(use.value)
            usages.append(Usage(node, first, last, use.size_bytes))
    return Usages(
        usages=tuple(usages),
        edge_usages=tuple(edge_usages),
        buffers=tuple([found[k] for k in kept]),
        instants=tuple(instants.tolist()),
    )
