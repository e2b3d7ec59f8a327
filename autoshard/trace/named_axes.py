"""Steps written for `jax.pmap`: what they reduce over the axis of devices, the plan reduces by itself.

Such a step sees the part of the batch that is one device's, and takes the mean of gradients over a named axis that only
`jax.pmap` binds. A planned step sees the whole batch: it is the step of a single device that has all of it. So the axis
is bound with one device, where means and sums over it are what they are taken of.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

_UNBOUND = re.compile(r"unbound axis name: (?P<name>[^.\s]+)")


def with_axes_bound(make: Callable[[Callable[..., Any]], Any], fn: Callable[..., Any]) -> Any:
    """What `make` makes of `fn`, with the axes of `jax.pmap` that `fn` names bound to one device that has the batch.

    A warning tells of each. Errors are those of `make`.
    """
    bound: list[str] = []
    while True:
        try:
            return make(_of_one_device(fn, bound))
        except NameError as error:
            found = _UNBOUND.search(str(error))
            if found is None or found["name"] in bound:
                raise
            bound.append(found["name"])
            warnings.warn(
                f"`{getattr(fn, '__name__', 'the function')}` reduces over the axis `{found['name']}`, as under "
                "jax.pmap. It is planned as the step of one device that has the whole batch: pass the whole batch and "
                "one random key, and leave out jax.pmap.",
                stacklevel=2,
            )


def _of_one_device(fn: Callable[..., Any], axes: Sequence[str]) -> Callable[..., Any]:
    for axis in axes:
        fn = _bound(fn, axis)
    return fn


def _bound(fn: Callable[..., Any], axis: str) -> Callable[..., Any]:
    def with_axis(*args: Any) -> Any:
        over = lambda out_axes: jax.vmap(
            lambda _, inner: fn(*inner), in_axes=(0, None), out_axes=out_axes, axis_name=axis
        )
        try:
            return over(None)(jnp.zeros(1), args)
        except ValueError:  # something depends on the device's number
            return jax.tree_util.tree_map(lambda x: jnp.squeeze(x, 0), over(0)(jnp.zeros(1), args))

    return with_axis
