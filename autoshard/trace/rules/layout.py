"""Rules of primitives that only rename the dimensions of one tensor, or create a tensor from nothing."""

import itertools

from autoshard.graph.graph import Dims, FactorRule
from autoshard.trace.rules.iteration_space import WHOLE, IterationSpace, whole
from autoshard.trace.rules.leaf import Leaf


def broadcast_in_dim(leaf: Leaf) -> FactorRule | None:
    """A new or stretched dimension is an index of the result alone."""
    if len(leaf.operands) != 1:
        return None
    (operand,), (result,) = leaf.operands, leaf.results
    space = IterationSpace()
    dims = space.parallel(result.shape)
    targets = leaf.params["broadcast_dimensions"]
    operand_dims = tuple(
        dims[target] if size == result.shape[target] else WHOLE
        for size, target in zip(operand.shape, targets, strict=True)
    )
    return space.close((operand_dims,), (dims,))


def squeeze(leaf: Leaf) -> FactorRule:
    """Dimensions of size 1 go; the others keep their order."""
    (operand,), _ = leaf.operands, leaf.results
    removed = {axis % len(operand.shape) for axis in leaf.params["dimensions"]}
    space = IterationSpace()
    dims = space.parallel(operand.shape)
    return space.close((dims,), (tuple(factors for axis, factors in enumerate(dims) if axis not in removed),))


def transpose(leaf: Leaf) -> FactorRule:
    """Dimension i of the result is dimension `permutation[i]` of the operand."""
    (operand,) = leaf.operands
    space = IterationSpace()
    dims = space.parallel(operand.shape)
    return space.close((dims,), (tuple(dims[axis] for axis in leaf.params["permutation"]),))


def _segments(left: tuple[int, ...], right: tuple[int, ...]) -> list[tuple[range, range]]:
    """Cuts two shapes of equal product where their cumulative products meet.

    Returns:
      Pairs of position ranges in the two shapes; the sizes in a pair have equal products, and no shorter pair does.
    """
    segments = []
    start, other_start = 0, 0
    while start < len(left):
        end, other_end = start + 1, other_start + 1
        product, other_product = left[start], right[other_start]
        while product != other_product:
            if product < other_product:
                product *= left[end]
                end += 1
            else:
                other_product *= right[other_end]
                other_end += 1
        segments.append((range(start, end), range(other_start, other_end)))
        start, other_start = end, other_end
    return segments


def _common_refinement(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """Sizes of which both shapes are made by merging neighbours, or None if there are none.

    Every cumulative product (from the major end) of either shape must be one of the refinement, so that these, in
    ascending order, must divide each other.
    """
    products = sorted({*itertools.accumulate(left, int.__mul__), *itertools.accumulate(right, int.__mul__)})
    sizes, previous = [], 1
    for product in products:
        if product % previous:
            return None
        sizes.append(product // previous)
        previous = product
    return tuple(sizes)


def _merge(sizes: tuple[int, ...], refined: list[tuple[int, tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """Distributes a refinement (size and factors of each part) over the sizes that it refines."""
    parts = iter(refined)
    merged = []
    for size in sizes:
        factors: tuple[int, ...] = ()
        product = 1
        while product < size:
            part_size, part = next(parts)
            factors += part
            product *= part_size
        merged.append(factors)
    return merged


def reshape_dims(space: IterationSpace, source: tuple[int, ...], target: tuple[int, ...]) -> tuple[Dims, Dims]:
    """Ties the dimensions of two shapes of the same elements in row-major order.

    `(6, 8) -> (2, 3, 8)` has the indices 2, 3 and 8, the first dimension of the source being made of two. Where the
    borders do not fit into each other, as in `(4, 6) -> (6, 4)`, the dimensions concerned must stay whole.

    Args:
      space: Where the indices are added.
      source: Shape before.
      target: Shape after, of the same number of elements.

    Returns:
      The dimensions of source and target.
    """
    source_dims, target_dims = list(whole(source)), list(whole(target))
    if 0 in source:
        return tuple(source_dims), tuple(target_dims)
    source_axes = [axis for axis, size in enumerate(source) if size != 1]
    target_axes = [axis for axis, size in enumerate(target) if size != 1]
    source_sizes = tuple(source[axis] for axis in source_axes)
    target_sizes = tuple(target[axis] for axis in target_axes)
    for source_range, target_range in _segments(source_sizes, target_sizes):
        left = tuple(source_sizes[i] for i in source_range)
        right = tuple(target_sizes[i] for i in target_range)
        sizes = _common_refinement(left, right)
        if sizes is None:
            continue
        refined = [(size, space.factor(size)) for size in sizes]
        for i, factors in zip(source_range, _merge(left, refined), strict=True):
            source_dims[source_axes[i]] = factors
        for i, factors in zip(target_range, _merge(right, refined), strict=True):
            target_dims[target_axes[i]] = factors
    return tuple(source_dims), tuple(target_dims)


def reshape(leaf: Leaf) -> FactorRule | None:
    """Dimensions merge and split, see `reshape_dims`, after a transposition if the parameter `dimensions` says so."""
    if len(leaf.operands) != 1:
        return None
    (operand,), (result,) = leaf.operands, leaf.results
    order = leaf.params.get("dimensions")
    if order is None:
        order = tuple(range(len(operand.shape)))
    space = IterationSpace()
    ordered_dims, result_dims = reshape_dims(space, tuple(operand.shape[axis] for axis in order), result.shape)
    operand_dims = tuple(ordered_dims[order.index(axis)] for axis in range(len(operand.shape)))
    return space.close((operand_dims,), (result_dims,))


def iota(leaf: Leaf) -> FactorRule | None:
    """`iota` and `empty2`: every shard of the result makes its own part."""
    if leaf.operands:
        return None
    (result,) = leaf.results
    space = IterationSpace()
    dims = space.parallel(result.shape)
    counted = next(iter(dims[leaf.params["dimension"]]), None) if "dimension" in leaf.params else None
    return space.close((), (dims,), counted=counted)
