"""The place of the largest or least element along a dimension that several devices hold parts of.

XLA's partitioner gathers the extremes of all parts and their places on every device. Here two all-reduces do: of the
extreme, and of the first place that has it.
"""

from collections.abc import Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp


def extreme_place(equation: jex.JaxprEqn, part: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The result of an `argmax` or `argmin` on every device, inside a region that is manual over `axes`.

    Args:
      equation: The equation.
      part: What this device has of the operand.
      axes: The mesh axes that split the dimension along which is searched, major to minor; none if it is whole.
    """
    own = equation.primitive.bind(part, **equation.params)
    if not axes:
        return own
    (axis,) = equation.params["axes"]
    value = jnp.squeeze(jnp.take_along_axis(part, jnp.expand_dims(own, axis), axis), axis)
    if value.dtype == jnp.bool_:
        value = value.astype(jnp.int8)
    best = jax.lax.pmax if equation.primitive.name == "argmax" else jax.lax.pmin
    is_nan = value != value  # the first of these is the result, whatever the others are
    zero = jnp.zeros_like(value)
    has_best = value == best(jnp.where(is_nan, zero, value), axes)
    place_dtype = jnp.promote_types(own.dtype, jnp.int32)
    num_places = part.shape[axis] * jax.lax.axis_size(tuple(axes))
    place = own.astype(place_dtype) + part.shape[axis] * jax.lax.axis_index(tuple(axes)).astype(place_dtype)
    ranked = jnp.where(is_nan, place - num_places, jnp.where(has_best, place, num_places))
    first = jax.lax.pmin(ranked, axes)
    return jnp.where(first < 0, first + num_places, first).astype(own.dtype)
