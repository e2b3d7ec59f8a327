"""Products that sum nothing are read as the multiplications that they are.

`einsum("btd,dn->btdn", ...)`, as in state-space layers, and a column times a row are matrix products to JAX. XLA makes
multiplications of them (`AlgebraicSimplifier`, on all devices), which are computed inside their readers: nothing of
them is stored, none needs a workspace or its operands in memory. So does the program that is planned and run.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from autoshard.trace.walk import shape_of, type_of


def multiplication(equation: jex.JaxprEqn) -> Callable[..., Any] | None:
    """What multiplies the operands of a product that sums nothing, or elements by themselves; None of all else."""
    numbers = open_numbers(equation)
    if numbers is None or not sums_nothing(shape_of(equation.invars[0]), numbers):
        return None
    dtype = type_of(equation.outvars[0]).dtype
    return functools.partial(_multiplied, dtype=dtype, numbers=numbers)


def sums_nothing(left: Sequence[int], numbers: Any) -> bool:
    """Whether a product sums nothing; `left`: the shape of its left operand, `numbers`: as of `open_numbers`."""
    return math.prod(left[d] for d in numbers[0][0]) == 1


def open_numbers(equation: jex.JaxprEqn) -> Any:
    """The dimension numbers of a product whose result may lie anywhere: ((contracted, contracted), (batch, batch)), of
    the left and of the right operand. None of all else."""
    if equation.primitive.name != "dot_general" or equation.params.get("out_sharding") is not None:
        return None
    return equation.params["dimension_numbers"]


def _multiplied(left: jax.Array, right: jax.Array, dtype: Any, numbers: Any) -> jax.Array:
    """The product by `numbers` of a `dot_general`, whose contracted dimensions have one element, in `dtype`."""
    (summed_left, summed_right), (batch_left, batch_right) = numbers
    free_left = [d for d in range(left.ndim) if d not in (*summed_left, *batch_left)]
    free_right = [d for d in range(right.ndim) if d not in (*summed_right, *batch_right)]
    shape = [left.shape[d] for d in (*batch_left, *free_left)] + [right.shape[d] for d in free_right]
    batch, behind = range(len(batch_left)), len(batch_left) + len(free_left)

    def spread(x: jax.Array, summed: Sequence[int], kept: Sequence[int], places: Sequence[int]) -> jax.Array:
        own = x.astype(dtype).transpose((*summed, *kept)).reshape([x.shape[d] for d in kept])
        return jax.lax.broadcast_in_dim(own, shape, places)

    return jax.lax.mul(
        spread(left, summed_left, (*batch_left, *free_left), range(behind)),
        spread(right, summed_right, (*batch_right, *free_right), (*batch, *range(behind, len(shape)))),
    )
