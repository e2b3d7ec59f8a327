"""Rules of matrix products and convolutions."""

import math
from typing import Any

import jax
import numpy as np

from autoshard.graph.graph import Convolved, Dims, FactorRule
from autoshard.trace.rules.iteration_space import WHOLE, IterationSpace
from autoshard.trace.rules.leaf import Leaf


def _flops_per_multiply_add(dtype: str) -> float:
    """2 for real numbers; a complex multiply-add is four real multiplications and four real additions."""
    return 8.0 if dtype.startswith("complex") else 2.0


def _is_rounded(leaf: Leaf) -> bool:
    """Whether a product demands no more than the device's default precision of either operand."""
    precision = leaf.params["precision"]
    return precision is None or precision == (jax.lax.Precision.DEFAULT,) * 2


def _narrowed_bytes(leaf: Leaf) -> int | None:
    """Bytes of an element of what a product's algorithm multiplies; None if it names none."""
    preset = leaf.params["precision"]
    types = preset.supported_lhs_types if isinstance(preset, jax.lax.DotAlgorithmPreset) else None
    return min((np.dtype(t).itemsize for t in types), default=None) if types else None


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
        is_rounded=_is_rounded(leaf),
        narrowed_bytes=_narrowed_bytes(leaf),
    )


def ragged_dot(leaf: Leaf) -> FactorRule | None:
    """Products of the rows of each group with its matrix, or of groups of contracted rows; groups stay whole.

    Rows of the left side may be split: how many rows of each group a device has follows from the sizes of the groups.
    XLA's partitioner would gather them (jax 0.10.2, for CPU and H100). Groups are counted as XLA computes them there:
    all rows with the matrix of each group, those of others being zero. Of forms with batches nothing is said.
    """
    lhs, rhs, sizes = leaf.operands
    numbers = leaf.params["ragged_dot_dimension_numbers"]
    (lhs_contract, rhs_contract), (lhs_batch, _) = numbers.dot_dimension_numbers
    if lhs_batch or len(sizes.shape) != 1 or leaf.params["group_offset"] is not None:
        return None
    space = IterationSpace()
    lhs_dims: list[Any] = [None] * len(lhs.shape)
    rhs_dims: list[Any] = [None] * len(rhs.shape)
    for group in numbers.rhs_group_dimensions:
        rhs_dims[group] = WHOLE
    for left, right in zip(lhs_contract, rhs_contract, strict=True):
        lhs_dims[left] = rhs_dims[right] = space.factor(lhs.shape[left], "add")
    result_dims = [] if numbers.rhs_group_dimensions else [WHOLE]
    for shape, dims in ((lhs.shape, lhs_dims), (rhs.shape, rhs_dims)):
        for axis, size in enumerate(shape):
            if dims[axis] is None:
                dims[axis] = space.factor(size)
                result_dims.append(dims[axis])
    free = math.prod(size for axis, size in enumerate(rhs.shape) if axis not in rhs_contract)
    return space.close(
        (tuple(lhs_dims), tuple(rhs_dims), (WHOLE,)),
        (tuple(result_dims),),
        flops=2.0 * lhs.size * free * (1 if numbers.rhs_group_dimensions else sizes.shape[0]),
        is_heavy=True,
        is_rounded=_is_rounded(leaf),
        narrowed_bytes=_narrowed_bytes(leaf),
        by_shards=True,
    )


def _placed(spec: tuple[int, ...], first: tuple[int, ...], second: tuple[int, ...]) -> Dims:
    """The dimensions of a convolution's tensor: the two that `spec` names first are given, the spatial ones whole."""
    dims = [WHOLE] * len(spec)
    dims[spec[0]], dims[spec[1]] = first, second
    return tuple(dims)


def _positions(shape: tuple[int, ...], spec: tuple[int, ...]) -> int:
    """Spatial elements of a convolution's tensor: of all dimensions but the two that `spec` names first."""
    return math.prod(shape[d] for d in spec[2:])


def conv_general_dilated(leaf: Leaf) -> FactorRule:
    """Images are parallel, input features add up, output features are parallel; spatial dimensions stay whole.

    Groups are the major index of the features that they divide, and parallel; in the gradient of a grouped
    convolution's kernel it is the images that they divide. XLA's partitioner gathers the operands of convolutions
    with groups (tried on jax 0.10.2), so they run by shards.
    """
    lhs, rhs = leaf.operands
    (result,) = leaf.results
    numbers, of_features, of_images = (
        leaf.params[key] for key in ("dimension_numbers", "feature_group_count", "batch_group_count")
    )
    num_groups = of_features * of_images
    space = IterationSpace()
    group = space.factor(num_groups)
    image = space.factor(lhs.shape[numbers.lhs_spec[0]] // of_images)
    in_feature = space.factor(rhs.shape[numbers.rhs_spec[1]], "add")
    out_feature = group + space.factor(rhs.shape[numbers.rhs_spec[0]] // num_groups)
    divided_image, divided_feature = (group + image, in_feature) if of_images > 1 else (image, group + in_feature)
    # the gradient of a kernel slides one image over another, to few positions; its channels are images here
    is_kernel_gradient = _positions(rhs.shape, numbers.rhs_spec) > _positions(result.shape, numbers.out_spec)
    inserted = math.prod(leaf.params["lhs_dilation"])  # zeros between elements, with which nothing multiplies
    multiply_adds = result.size * rhs.size / rhs.shape[numbers.rhs_spec[0]] / inserted
    return space.close(
        (_placed(numbers.lhs_spec, divided_image, divided_feature), _placed(numbers.rhs_spec, out_feature, in_feature)),
        (_placed(numbers.out_spec, image, out_feature),),
        flops=_flops_per_multiply_add(lhs.dtype) * multiply_adds,
        is_heavy=True,
        by_shards=True,
        is_rounded=_is_rounded(leaf),
        convolved=Convolved(image if is_kernel_gradient else in_feature, is_kernel_gradient),
    )
