"""Rules of gather and scatter.

In both, index positions ("batch" dimensions of the index tensor) and windows are distinct. A window dimension that is
taken in full passes. A dimension of the table that is addressed by an index, one element at a time, may be split: each
shard serves the indices that fall into its part. A gather then has to add the shards' results (zero elsewhere), while
a scatter needs no communication. Neither touches more of the table than the elements that it takes or changes.
"""

from autoshard.graph.graph import FactorRule, Touched
from autoshard.trace.rules.iteration_space import WHOLE, IterationSpace
from autoshard.trace.rules.leaf import Leaf

COMBINERS = {"scatter-add": "add", "scatter-mul": "mul", "scatter-min": "min", "scatter-max": "max"}
"""How updates of several index positions combine.

`scatter` is absent, since there the last update wins, and so is `scatter-sub`, whose partial results XLA's partitioner
cannot combine (it gathers indices and updates).
"""


def _masked_sum(dtype: str) -> str | None:
    """How to join gathers of which all shards but one gave zero; None for types that cannot be added."""
    if dtype == "bool":
        return "or"
    return None if dtype.startswith("key<") else "add"


def gather(leaf: Leaf) -> FactorRule:
    """Embedding look-ups and `take_along_axis`; the index vector is the last dimension of the indices."""
    operand, indices = leaf.operands
    (result,) = leaf.results
    numbers = leaf.params["dimension_numbers"]
    slice_sizes = leaf.params["slice_sizes"]
    masked_sum = _masked_sum(operand.dtype)
    space = IterationSpace()
    index_dims = space.parallel(indices.shape[:-1])
    operand_dims = [WHOLE] * len(operand.shape)
    result_dims = [WHOLE] * len(result.shape)
    positions = [axis for axis in range(len(result.shape)) if axis not in numbers.offset_dims]
    for axis, factors in zip(positions, index_dims, strict=True):
        result_dims[axis] = factors
    for axis, index_axis in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        operand_dims[axis] = index_dims[index_axis]
    offsets = iter(numbers.offset_dims)
    for axis, size in enumerate(operand.shape):
        if axis in numbers.operand_batching_dims:
            continue
        offset = None if axis in numbers.collapsed_slice_dims else next(offsets)
        is_indexed = axis in numbers.start_index_map
        if is_indexed and slice_sizes[axis] == 1 and masked_sum is not None:
            operand_dims[axis] = space.factor(size, masked_sum)
        elif offset is not None and slice_sizes[axis] == size:
            operand_dims[axis] = result_dims[offset] = space.factor(size)
    touched = Touched(tuple(result_dims), result.size, is_update=False)
    return space.close(
        (tuple(operand_dims), (*index_dims, WHOLE)), (tuple(result_dims),), is_heavy=True, touched=touched
    )


def scatter(leaf: Leaf) -> FactorRule:
    """`scatter` and its combining variants, such as the gradient of an embedding."""
    operand, indices, updates = leaf.operands
    numbers = leaf.params["dimension_numbers"]
    combiner = COMBINERS.get(leaf.name)
    space = IterationSpace()
    batching = dict(
        zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True),
    )
    operand_dims = [WHOLE] * len(operand.shape)
    update_dims = [WHOLE] * len(updates.shape)
    index_dims = [WHOLE] * len(indices.shape)
    positions = [axis for axis in range(len(updates.shape)) if axis not in numbers.update_window_dims]
    for index_axis, update_axis in enumerate(positions):
        size = indices.shape[index_axis]
        if index_axis in batching:
            factors = operand_dims[batching[index_axis]] = space.factor(size)
        elif combiner is not None:
            factors = space.factor(size, combiner)
        else:
            factors = WHOLE
        index_dims[index_axis] = update_dims[update_axis] = factors
    windows = iter(numbers.update_window_dims)
    for axis, size in enumerate(operand.shape):
        if axis in numbers.operand_batching_dims:
            continue
        window = None if axis in numbers.inserted_window_dims else next(windows)
        is_indexed = axis in numbers.scatter_dims_to_operand_dims
        if is_indexed and (window is None or updates.shape[window] == 1):
            operand_dims[axis] = space.factor(size)
        elif window is not None and updates.shape[window] == size:
            operand_dims[axis] = update_dims[window] = space.factor(size)
    dims = tuple(operand_dims)
    touched = Touched(tuple(update_dims), updates.size, is_update=True)
    operands = dims, tuple(index_dims), tuple(update_dims)
    return space.close(operands, (dims,), flops=updates.size, is_heavy=True, touched=touched)
