"""Rules of primitives that combine elements along some dimensions: reductions, windows, scans, sorts."""

from autoshard.graph.graph import FactorRule
from autoshard.trace.rules.iteration_space import WHOLE, IterationSpace, whole
from autoshard.trace.rules.leaf import Leaf

COMBINERS = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "mul",
    "reduce_and": "and",
    "reduce_or": "or",
}
"""How partial results of a reduction primitive combine."""


def _without(dims: tuple, axes: tuple[int, ...]) -> tuple:
    return tuple(factors for axis, factors in enumerate(dims) if axis not in axes)


def reduce_known(leaf: Leaf) -> FactorRule:
    """`reduce_sum` and its like: the dimensions that go are reductions."""
    (operand,) = leaf.operands
    axes = tuple(leaf.params["axes"])
    combiner = COMBINERS[leaf.name]
    space = IterationSpace()
    dims = tuple(space.factor(size, combiner if axis in axes else None) for axis, size in enumerate(operand.shape))
    return space.close((dims,), (_without(dims, axes),), flops=operand.size)


def extreme_place(leaf: Leaf) -> FactorRule:
    """`argmax` and `argmin`: each device finds the place of its own, and those of all are compared."""
    (operand,) = leaf.operands
    (axis,) = leaf.params["axes"]
    space = IterationSpace()
    dims = tuple(space.factor(size, leaf.name if i == axis else None) for i, size in enumerate(operand.shape))
    return space.close((dims,), (_without(dims, (axis,)),), flops=operand.size, by_shards=True)


def reduce_whole(leaf: Leaf) -> FactorRule:
    """`reduce_xor` and `reduce` with any function: the dimensions that go must stay whole.

    `reduce` takes n operands of one shape, then n scalars.
    """
    shape = leaf.operands[0].shape
    axes = tuple(leaf.params["axes"] if "axes" in leaf.params else leaf.params["dimensions"])
    space = IterationSpace()
    dims = tuple(WHOLE if axis in axes else space.factor(size) for axis, size in enumerate(shape))
    operands = tuple(dims if operand.shape == shape else whole(operand.shape) for operand in leaf.operands)
    results = (_without(dims, axes),) * len(leaf.results)
    return space.close(operands, results, flops=leaf.operands[0].size)


def _along(leaf: Leaf, axis: int, flops: float) -> FactorRule:
    """All tensors have the same dimensions, of which one must stay whole."""
    shape = leaf.operands[0].shape
    axis %= len(shape)
    space = IterationSpace()
    dims = tuple(WHOLE if i == axis else space.factor(size) for i, size in enumerate(shape))
    return space.close((dims,) * len(leaf.operands), (dims,) * len(leaf.results), flops=flops, is_heavy=True)


def cumulative(leaf: Leaf) -> FactorRule:
    """`cumsum` and its like."""
    return _along(leaf, leaf.params["axis"], leaf.operands[0].size)


def sort(leaf: Leaf) -> FactorRule:
    """Any number of operands of one shape are sorted together."""
    return _along(leaf, leaf.params["dimension"], leaf.operands[0].size)


def window(leaf: Leaf) -> FactorRule:
    """`reduce_window*`, `select_and_gather_add`, `select_and_scatter_add`.

    A dimension in which the window is one element and neither moves nor pads passes; the others must stay whole.
    Scalars (initial values) may follow the tensors.
    """
    params = leaf.params
    rank = len(params["window_dimensions"])
    ones = (1,) * rank
    source, result = leaf.operands[0].shape, leaf.results[0].shape
    space = IterationSpace()
    dims = tuple(
        space.factor(source[axis])
        if source[axis] == result[axis]
        and params["window_dimensions"][axis] == 1
        and params["window_strides"][axis] == 1
        and tuple(params["padding"][axis]) == (0, 0)
        and (params.get("base_dilation") or ones)[axis] == 1
        and (params.get("window_dilation") or ones)[axis] == 1
        else WHOLE
        for axis in range(rank)
    )
    operands = tuple(dims if operand.shape else () for operand in leaf.operands)
    window_size = 1
    for size in params["window_dimensions"]:
        window_size *= size
    flops = window_size * leaf.results[0].size
    return space.close(operands, (dims,) * len(leaf.results), flops=flops, is_heavy=True)
