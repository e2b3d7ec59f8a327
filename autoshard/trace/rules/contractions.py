"""Rules of matrix products and convolutions."""

import math
from typing import Any

from autoshard.graph.graph import FactorRule
from autoshard.trace.rules.iteration_space import WHOLE, IterationSpace
from autoshard.trace.rules.leaf import Leaf


def _flops_per_multiply_add(dtype: str) -> float:
    """2 for real numbers; a complex multiply-add is four real multiplications and four real additions."""
    return 8.0 if dtype.startswith("complex") else 2.0


def dot_general(leaf: Leaf) -> FactorRule:
    """Batch dimensions, then the free ones of the left side, then those of the right; the contracted ones add up."""
    lhs, rhs = leaf.operands
    (result,) = leaf.results
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = leaf.params["dimension_numbers"]
    space = IterationSpace()
    lhs_dims: list[Any] = [None] * len(lhs.shape)
    rhs_dims: list[Any] = [None] * len(rhs.shape)
    result_dims = []
    for left, right in zip(lhs_batch, rhs_batch, strict=True):
        lhs_dims[left] = rhs_dims[right] = space.factor(lhs.shape[left])
        result_dims.append(lhs_dims[left])
    for left, right in zip(lhs_contract, rhs_contract, strict=True):
        lhs_dims[left] = rhs_dims[right] = space.factor(lhs.shape[left], "add")
    for shape, dims in ((lhs.shape, lhs_dims), (rhs.shape, rhs_dims)):
        for axis, size in enumerate(shape):
            if dims[axis] is None:
                dims[axis] = space.factor(size)
                result_dims.append(dims[axis])
    contracted = math.prod(lhs.shape[axis] for axis in lhs_contract)
    return space.close(
        (tuple(lhs_dims), tuple(rhs_dims)),
        (tuple(result_dims),),
        flops=_flops_per_multiply_add(lhs.dtype) * contracted * result.size,
        is_heavy=True,
    )


def conv_general_dilated(leaf: Leaf) -> FactorRule:
    """Images are parallel, input features add up, output features are parallel; spatial dimensions stay whole.

    In a grouped convolution the features stay whole, and unless it is depthwise, the images too: XLA's partitioner
    gathers them otherwise (tried on jax 0.10.2).
    """
    lhs, rhs = leaf.operands
    (result,) = leaf.results
    params = leaf.params
    numbers = params["dimension_numbers"]
    is_batch_grouped = params["batch_group_count"] != 1
    is_feature_grouped = params["feature_group_count"] != 1
    is_depthwise = is_feature_grouped and rhs.shape[numbers.rhs_spec[1]] == 1
    space = IterationSpace()
    batch = in_feature = out_feature = WHOLE
    if not is_batch_grouped and (is_depthwise or not is_feature_grouped):
        batch = space.factor(lhs.shape[numbers.lhs_spec[0]])
    if not (is_feature_grouped or is_batch_grouped):
        in_feature = space.factor(lhs.shape[numbers.lhs_spec[1]], "add")
        out_feature = space.factor(rhs.shape[numbers.rhs_spec[0]])

    def dims(spec: tuple[int, ...], first: tuple[int, ...], second: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        placed = [WHOLE] * len(spec)
        placed[spec[0]], placed[spec[1]] = first, second
        return tuple(placed)

    multiply_adds = result.size * rhs.size / rhs.shape[numbers.rhs_spec[0]]
    return space.close(
        (dims(numbers.lhs_spec, batch, in_feature), dims(numbers.rhs_spec, out_feature, in_feature)),
        (dims(numbers.out_spec, batch, out_feature),),
        flops=_flops_per_multiply_add(lhs.dtype) * multiply_adds,
        is_heavy=True,
    )
