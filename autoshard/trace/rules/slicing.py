"""Rules of primitives that cut, join, pad, repeat or reverse along some dimensions and keep the others."""

from autoshard.graph.graph import Dims, FactorRule, Touched
from autoshard.trace.rules.iteration_space import WHOLE, IterationSpace, whole
from autoshard.trace.rules.leaf import Leaf


def _scalars(leaf: Leaf, start: int) -> tuple[Dims, ...]:
    """The dimensions of operands that are scalars: start indices, padding values."""
    return tuple(whole(operand.shape) for operand in leaf.operands[start:])


def _kept(space: IterationSpace, left: tuple[int, ...], right: tuple[int, ...]) -> Dims:
    """One index for each dimension of the same size in two shapes of equal rank, the others whole."""
    return tuple(space.factor(size) if size == other else WHOLE for size, other in zip(left, right, strict=True))


def slice_(leaf: Leaf) -> FactorRule:
    """`slice` and `dynamic_slice`: a dimension that is taken in full passes, one that is cut must stay whole."""
    space = IterationSpace()
    (result,) = leaf.results
    dims = _kept(space, leaf.operands[0].shape, result.shape)
    touched = Touched(dims, result.size, is_update=False)
    return space.close((dims, *_scalars(leaf, 1)), (dims,), touched=touched)


def dynamic_update_slice(leaf: Leaf) -> FactorRule:
    """A dimension that the update covers in full passes.

    One in which it covers a single element may be split in the operand and the result, since only the shard that holds
    the element writes it. The others must stay whole.
    """
    operand, update = leaf.operands[:2]
    space = IterationSpace()
    operand_dims, update_dims = [], []
    for size, update_size in zip(operand.shape, update.shape, strict=True):
        factors = space.factor(size) if update_size in (1, size) else WHOLE
        operand_dims.append(factors)
        update_dims.append(factors if update_size == size else WHOLE)
    dims = tuple(operand_dims)
    touched = Touched(tuple(update_dims), update.size, is_update=True)
    return space.close((dims, tuple(update_dims), *_scalars(leaf, 2)), (dims,), touched=touched)


def pad(leaf: Leaf) -> FactorRule:
    """A dimension without padding passes."""
    (operand, _), config = leaf.operands, leaf.params["padding_config"]
    space = IterationSpace()
    dims = tuple(
        space.factor(size) if tuple(padding) == (0, 0, 0) else WHOLE
        for size, padding in zip(operand.shape, config, strict=True)
    )
    return space.close((dims, *_scalars(leaf, 1)), (dims,))


def _except_axes(space: IterationSpace, shape: tuple[int, ...], axes: tuple[int, ...]) -> Dims:
    """One index for each dimension but those in `axes`."""
    return tuple(WHOLE if axis in axes else space.factor(size) for axis, size in enumerate(shape))


def concatenate(leaf: Leaf) -> FactorRule:
    """The dimension that is joined must stay whole."""
    space = IterationSpace()
    dims = _except_axes(space, leaf.results[0].shape, (leaf.params["dimension"],))
    return space.close((dims,) * len(leaf.operands), (dims,))


def split(leaf: Leaf) -> FactorRule:
    """The dimension that is cut must stay whole."""
    space = IterationSpace()
    dims = _except_axes(space, leaf.operands[0].shape, (leaf.params["axis"],))
    return space.close((dims,), (dims,) * len(leaf.results))


def stack(leaf: Leaf) -> FactorRule:
    """The new dimension must stay whole."""
    axis = leaf.params["axis"]
    space = IterationSpace()
    dims = space.parallel(leaf.operands[0].shape)
    return space.close((dims,) * len(leaf.operands), ((*dims[:axis], WHOLE, *dims[axis:]),))


def unstack(leaf: Leaf) -> FactorRule:
    """The dimension that goes must stay whole."""
    axis = leaf.params["axis"]
    space = IterationSpace()
    dims = _except_axes(space, leaf.operands[0].shape, (axis,))
    return space.close((dims,), ((*dims[:axis], *dims[axis + 1 :]),) * len(leaf.results))


def tile(leaf: Leaf) -> FactorRule | None:
    """A dimension that is not repeated passes."""
    (operand,), (result,) = leaf.operands, leaf.results
    if len(operand.shape) != len(result.shape):
        return None
    space = IterationSpace()
    dims = _kept(space, operand.shape, result.shape)
    return space.close((dims,), (dims,))


def rev(leaf: Leaf) -> FactorRule:
    """A dimension that is reversed must stay whole."""
    (operand,) = leaf.operands
    space = IterationSpace()
    dims = _except_axes(space, operand.shape, tuple(leaf.params["dimensions"]))
    return space.close((dims,), (dims,))
