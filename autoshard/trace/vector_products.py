"""Products of many small matrices with a vector each are read as the multiplications and sums that XLA makes of them.

`einsum("btdn,btn->btd", ...)`, as where a state-space layer reads its states, is a product in a batch to JAX. On GPUs
XLA sums the products of elements in a kernel of its own (`DotStrengthReduction`), which reads what others only compute,
or is part of one that reads the sums. So does the program that is planned and run.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from autoshard.trace.outer_products import open_numbers
from autoshard.trace.walk import shape_of, type_of

_FEW = 10_000_000
"""XLA:GPU sums the product of a matrix with fewer elements than this (`IsMatrixMultiplicationTooSmallForRewriting` in
xla/service/gpu, OpenXLA); others may be left to cuBLAS."""


def multiplication_and_sum(equation: jex.JaxprEqn) -> Callable[..., Any] | None:
    """What multiplies and sums the elements of a batch of products with vectors; None of all else."""
    numbers = open_numbers(equation)
    if numbers is None:
        return None
    contracted, batch = numbers
    shapes = list(map(shape_of, equation.invars))
    elements = [math.prod(shape) // math.prod(shape[d] for d in own) for shape, own in zip(shapes, batch, strict=True)]
    is_vector = [len(shape) == len(a) + len(b) for shape, a, b in zip(shapes, contracted, batch, strict=True)]
    if not batch[0] or not any(is_vector) or max(elements) >= _FEW:
        return None
    dtype = type_of(equation.outvars[0]).dtype
    return functools.partial(_summed, dtype=dtype, numbers=numbers)


def _summed(left: jax.Array, right: jax.Array, dtype: Any, numbers: Any) -> jax.Array:
    """The product by `numbers` of a `dot_general`, summed in single precision at least."""
    (summed_left, summed_right), (batch_left, batch_right) = numbers
    if left.ndim < right.ndim:  # the matrices come first
        left, right = right, left
        summed_left, summed_right, batch_left, batch_right = summed_right, summed_left, batch_right, batch_left
    wide = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
    own = [*batch_right, *summed_right]
    places = dict(zip(own, [*batch_left, *summed_left], strict=True))  # of each dimension of the vectors
    order = sorted(own, key=places.__getitem__)
    vectors = jax.lax.broadcast_in_dim(right.astype(wide).transpose(order), left.shape, [places[d] for d in order])
    sums = jnp.sum(left.astype(wide) * vectors, axis=tuple(summed_left))
    left_over = [d for d in range(left.ndim) if d not in summed_left]
    result = [*batch_left, *(d for d in left_over if d not in batch_left)]
    return sums.transpose([left_over.index(d) for d in result]).astype(dtype)
