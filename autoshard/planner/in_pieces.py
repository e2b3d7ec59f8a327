"""Matrix products in pieces: which may run so, and what it takes on one device (`cost/in_pieces.py`).

A product of an operand X, which lacks the dimension that a mesh axis splits, can read X split along that axis as well,
along a dimension f of its own, and send the pieces round. Where f is among the dimensions of the result, each piece of
X gives a piece of the result; where f is summed, the products are added. And a product whose sum over an axis is
scattered onto a dimension f of its result can make the pieces of the result one after another, and send each to the
device that adds it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from autoshard.cluster import LogicalMesh
from autoshard.cost.collectives import Collective, all_gather
from autoshard.cost.compute import Work, flops_s, kernel_s
from autoshard.cost.in_pieces import may_run_in_pieces, transfers
from autoshard.graph.graph import Dims
from autoshard.graph.layout import WHOLE, Assignment, Layout, layout_of, shard_bytes
from autoshard.planner.group_shapes import GroupShape, Kernel


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """Of a product that runs in as many pieces as a mesh axis has devices.

    Attributes:
      axis: Index of the mesh axis. factor: The factor whose pieces travel.
      is_gathered: Whether they are pieces of the operand that the axis does not split otherwise; else of the result,
        whose sum over the axis is scattered.
    """

    axis: int
    factor: int
    is_gathered: bool

    def __str__(self) -> str:
        return f"{'gathers' if self.is_gathered else 'scatters'} factor {self.factor} over axis {self.axis}"

    def layout_of(self, dims: Dims, layout: Layout) -> Layout:
        """How a tensor whose dimensions are `dims` lies, which would lie as `layout` says if nothing ran in pieces."""
        if not self.is_gathered or layout[self.axis] != WHOLE:
            return layout
        home = next((d for d, factors in enumerate(dims) if self.factor in factors), WHOLE)
        return (*layout[: self.axis], home, *layout[self.axis + 1 :])


@dataclasses.dataclass(frozen=True, slots=True)
class PiecesCost:
    """What a product in pieces takes on one device.

    Attributes:
      compute_s: Seconds of all its kernels. sent: The transfers of its pieces.
      spared_s: Seconds of the collective that runs otherwise, if it is waited for.
      workspace_bytes: Memory beside operands and result.
    """

    compute_s: float
    sent: Collective
    spared_s: float
    workspace_bytes: float


def product_of(shape: GroupShape) -> Kernel | None:
    """The matrix product that a group is, of two tensors and nothing else; None for any other group."""
    if len(shape.kernels) != 1 or len(shape.reads) != 2 or len(shape.writes) != 1 or shape.transposed:
        return None
    (kernel,) = shape.kernels
    return kernel if kernel.work is Work.PRODUCT and kernel.sides and kernel.count == 1 else None


def ways_in_pieces(shape: GroupShape, assignment: Assignment, scatter: Layout, mesh: LogicalMesh) -> Iterator[Pieces]:
    """The ways to run a product in pieces, where its factors are split by `assignment` and its sums resolved by
    `scatter`: over one axis of several devices, along a dimension that nothing else splits.
    """
    split = [a for a, axis in enumerate(mesh.axes) if axis.size > 1]
    result, _, _ = shape.writes[0]
    operands = [dims for dims, _, _ in shape.reads]
    summed = [a for a in split if assignment[a] != WHOLE and shape.factors[assignment[a]].reduction is not None]
    for a in split:
        own = assignment[a]
        if own == WHOLE or not may_run_in_pieces(mesh.axes[a]):
            continue
        fits = lambda f, n=mesh.axes[a].size: f not in assignment and shape.factors[f].size % n == 0
        if own in _factors(result) and scatter[a] == WHOLE:
            for dims, other in (operands, operands[::-1]):
                if own in _factors(dims):
                    continue
                for f in _factors(dims):
                    if (f in _factors(result)) != (f in _factors(other)) and fits(f):
                        yield Pieces(a, f, True)
        elif summed == [a] and scatter[a] != WHOLE:
            (*rest, f) = result[scatter[a]] or (WHOLE,)
            if not rest and f != WHOLE and fits(f) and all(s == WHOLE for b, s in enumerate(scatter) if b != a):
                yield Pieces(a, f, False)


def _factors(dims: Dims) -> set[int]:
    """The factors that are a dimension by themselves."""
    return {factors[0] for factors in dims if len(factors) == 1}


def price(
    shape: GroupShape,
    kernel: Kernel,
    assignment: Assignment,
    pieces: Pieces,
    mesh: LogicalMesh,
    hidden_share: float,
    least_dim: Callable[[Assignment, Sequence[int]], float],
) -> PiecesCost:
    """What a product takes in `pieces`.

    Args:
      shape, kernel: The group and its product. assignment: The factors that mesh axes split. mesh: The mesh.
      hidden_share: The share of a product's time that a transfer beside it makes use of.
      least_dim: The least dimension of the product on one device under an assignment to axes of some sizes.
    """
    device, axis, f = mesh.device_type, mesh.axes[pieces.axis], pieces.factor
    n, split, sizes = axis.size, (*assignment, f), (*mesh.shape, axis.size)
    here = kernel.flops / math.prod(k for k, g in zip(sizes, split, strict=True) if g in kernel.own)
    arithmetic_s = flops_s(device, here, kernel.dtype, kernel.work, 1, least_dim(split, sizes))
    local_bytes = lambda access: shard_bytes(access[1], layout_of(access[0], assignment), mesh.shape)
    result_bytes = local_bytes(shape.writes[0])
    result_is_cut = f in _factors(shape.writes[0][0])
    cut = [(local_bytes(read), f in _factors(read[0])) for read in shape.reads]
    operands_bytes = sum(b / n if is_cut else b for b, is_cut in cut)
    # a sum of products is read again by each but the first
    written_bytes = result_bytes / n if result_is_cut else result_bytes * (2 - 1 / n)
    product_s = kernel_s(device, arithmetic_s, operands_bytes + written_bytes, 1)
    if pieces.is_gathered:
        gathered_bytes, sliced_bytes = _gathered_and_sliced(shape, cut, assignment, pieces)
        piece_bytes = gathered_bytes / n
        joined_bytes = 2 * result_bytes if result_is_cut else 0.0
        workspace_bytes = 2 * piece_bytes + sliced_bytes + (result_bytes if result_is_cut else 0.0)
        otherwise = all_gather([axis], gathered_bytes)
    else:
        piece_bytes, sliced_bytes = result_bytes / n, sum(b for b, is_cut in cut if is_cut)
        joined_bytes = result_bytes + piece_bytes
        workspace_bytes = max(result_bytes, sliced_bytes) + 2 * piece_bytes
        otherwise = None
    beside_bytes = 2 * sliced_bytes + joined_bytes
    launches = bool(sliced_bytes) + bool(joined_bytes)
    compute_s = n * product_s + kernel_s(device, 0.0, beside_bytes, launches)
    sent = transfers(axis, device, piece_bytes, product_s, hidden_share)
    spared_s = 0.0 if otherwise is None else otherwise.time_s + device.launch_overhead_s
    return PiecesCost(compute_s, sent, spared_s, workspace_bytes)


def _gathered_and_sliced(
    shape: GroupShape, cut: Sequence[tuple[float, bool]], assignment: Assignment, pieces: Pieces
) -> tuple[float, float]:
    """Bytes of the operand whose pieces travel, all of them, and of the other one where it is cut too."""
    own = assignment[pieces.axis]
    gathered = next(n for n, (dims, _, _) in enumerate(shape.reads) if own not in _factors(dims))
    other_bytes, is_cut = cut[1 - gathered]
    return cut[gathered][0], other_bytes if is_cut else 0.0
