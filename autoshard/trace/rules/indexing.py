"""Rules of gather and scatter.

In both, index positions ("batch" dimensions of the index tensor) and windows are distinct. A window dimension that is
taken in full passes. A dimension of the table that is addressed by an index, one element at a time, may be split: each
shard serves the indices that fall into its part. A gather then has to add the shards' results (zero elsewhere), while
a scatter needs no communication. Neither touches more of the table than the elements that it takes or changes.

Where whole rows of a table are addressed by one id each, and the table has no other dimensions in front of its rows
than those that it shares with the ids, the rule names the rows and the ids (`LookUp`): devices can exchange them.
"""

from collections.abc import Sequence

from jax.lax import GatherScatterMode

from autoshard.graph.graph import Dims, FactorRule, LookUp, Touched
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


_EXCHANGED = (GatherScatterMode.CLIP, GatherScatterMode.FILL_OR_DROP, GatherScatterMode.PROMISE_IN_BOUNDS)
"""What may become of ids that are no rows, where look-ups are exchanged."""


def _look_up(
    leaf: Leaf, table: Dims, ids: Dims, batching: Sequence[int], indexed: Sequence[int], collapsed: Sequence[int]
) -> LookUp | None:
    """The rows and ids of a look-up of whole rows; None where elements are addressed in any other way.

    Args:
      leaf: The equation. table, ids: Their dimensions; without the last one, of index vectors.
      batching: Dimensions of the table that the ids share. indexed, collapsed: Those that are addressed, and of these
        those that the result lacks.
    """
    num_batching = len(batching)
    is_row = tuple(batching) == tuple(range(num_batching)) and tuple(indexed) == tuple(collapsed) == (num_batching,)
    if not is_row or leaf.params["mode"] not in _EXCHANGED or not table[num_batching]:
        return None
    sizes = (*leaf.operands[0].shape[num_batching + 1 :], *leaf.operands[1].shape[:-1])
    if any(not own and size > 1 for own, size in zip((*table[num_batching + 1 :], *ids), sizes, strict=True)):
        return None  # part of a row
    tables = tuple(f for dim in table[:num_batching] for f in dim)
    own_ids = tuple(f for dim in ids for f in dim if f not in tables)
    return LookUp(table[num_batching][0], own_ids, tables) if own_ids else None


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
    addressed = numbers.operand_batching_dims, numbers.start_index_map, numbers.collapsed_slice_dims
    look_up = _look_up(leaf, tuple(operand_dims), index_dims, *addressed) if masked_sum == "add" else None
    operands = tuple(operand_dims), (*index_dims, WHOLE)
    return space.close(operands, (tuple(result_dims),), is_heavy=True, touched=touched, look_up=look_up)


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
    addressed = numbers.operand_batching_dims, numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims
    look_up = _look_up(leaf, dims, tuple(index_dims[:-1]), *addressed) if combiner == "add" else None
    return space.close(operands, (dims,), flops=updates.size, is_heavy=True, touched=touched, look_up=look_up)
