"""Rules of primitives that cut, join, pad, repeat or reverse along some dimensions and keep the others."""

from autoshard.graph.graph import Dims, FactorRule
from autoshard.trace.rules.iteration_space import WHOLE, IterationSpace, whole
from autoshard.trace.rules.operation import Operation


def _scalars(operation: Operation, start: int) -> tuple[Dims, ...]:
    """The dimensions of operands that are scalars: start indices, padding values."""
    return tuple(whole(operand.shape) for operand in operation.operands[start:])


def _kept(space: IterationSpace, left: tuple[int, ...], right: tuple[int, ...]) -> Dims:
    """One index for each dimension of the same size in two shapes of equal rank, the others whole."""
    return tuple(space.factor(size) if size == other else WHOLE for size, other in zip(left, right, strict=True))


def slice_(operation: Operation) -> FactorRule:
    """`slice` and `dynamic_slice`: a dimension that is taken in full passes, one that is cut must stay whole."""
    space = IterationSpace()
    dims = _kept(space, operation.operands[0].shape, operation.results[0].shape)
    return space.close((dims, *_scalars(operation, 1)), (dims,))


def dynamic_update_slice(operation: Operation) -> FactorRule:
    """A dimension that the update covers in full passes."""
    operand, update = operation.operands[:2]
    space = IterationSpace()
    dims = _kept(space, operand.shape, update.shape)
    return space.close((dims, dims, *_scalars(operation, 2)), (dims,))


def pad(operation: Operation) -> FactorRule:
    """A dimension without padding passes."""
    (operand, _), config = operation.operands, operation.params["padding_config"]
    space = IterationSpace()
    dims = tuple(
        space.factor(size) if tuple(padding) == (0, 0, 0) else WHOLE
        for size, padding in zip(operand.shape, config, strict=True)
    )
    return space.close((dims, *_scalars(operation, 1)), (dims,))


def _except_axes(space: IterationSpace, shape: tuple[int, ...], axes: tuple[int, ...]) -> Dims:
    """One index for each dimension but those in `axes`."""
    return tuple(WHOLE if axis in axes else space.factor(size) for axis, size in enumerate(shape))


def concatenate(operation: Operation) -> FactorRule:
    """The dimension that is joined must stay whole."""
    space = IterationSpace()
    dims = _except_axes(space, operation.results[0].shape, (operation.params["dimension"],))
    return space.close((dims,) * len(operation.operands), (dims,))


def split(operation: Operation) -> FactorRule:
    """The dimension that is cut must stay whole."""
    space = IterationSpace()
    dims = _except_axes(space, operation.operands[0].shape, (operation.params["axis"],))
    return space.close((dims,), (dims,) * len(operation.results))


def stack(operation: Operation) -> FactorRule:
    """The new dimension must stay whole."""
    axis = operation.params["axis"]
    space = IterationSpace()
    dims = space.parallel(operation.operands[0].shape)
    return space.close((dims,) * len(operation.operands), ((*dims[:axis], WHOLE, *dims[axis:]),))


def unstack(operation: Operation) -> FactorRule:
    """The dimension that goes must stay whole."""
    axis = operation.params["axis"]
    space = IterationSpace()
    dims = _except_axes(space, operation.operands[0].shape, (axis,))
    return space.close((dims,), ((*dims[:axis], *dims[axis + 1 :]),) * len(operation.results))


def tile(operation: Operation) -> FactorRule | None:
    """A dimension that is not repeated passes."""
    (operand,), (result,) = operation.operands, operation.results
    if len(operand.shape) != len(result.shape):
        return None
    space = IterationSpace()
    dims = _kept(space, operand.shape, result.shape)
    return space.close((dims,), (dims,))


def rev(operation: Operation) -> FactorRule:
    """A dimension that is reversed must stay whole."""
    (operand,) = operation.operands
    space = IterationSpace()
    dims = _except_axes(space, operand.shape, tuple(operation.params["dimensions"]))
    return space.close((dims,), (dims,))
