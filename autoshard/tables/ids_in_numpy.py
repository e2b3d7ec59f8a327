"""The program that makes ids, in NumPy: on a CPU device it would wait for the step that runs there.

Most models slice, reshape or wrap the ids of a batch, nothing else. Programs of other equations are run by JAX.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.extend.core as jex
import numpy as np

from autoshard.trace.walk import type_of


def in_numpy(closed: jex.ClosedJaxpr) -> Callable[..., list[np.ndarray]] | None:
    """A program in NumPy; None if it has equations that have no equal here.

    Args:
      closed: The program, without calls, of integers and booleans.
    """
    jaxpr = closed.jaxpr
    known = all(e.primitive.name in _NUMPY and all(_is_whole(v) for v in (*e.invars, *e.outvars)) for e in jaxpr.eqns)
    if not known:
        return None

    def run(*args: np.ndarray) -> list[np.ndarray]:
        env: dict[Any, np.ndarray] = dict(zip(jaxpr.constvars, map(np.asarray, closed.consts), strict=True))
        env |= dict(zip(jaxpr.invars, args, strict=True))
        read = lambda v: np.asarray(v.val, type_of(v).dtype) if isinstance(v, jex.Literal) else env[v]
        for equation in jaxpr.eqns:
            (made,) = equation.outvars
            env[made] = _NUMPY[equation.primitive.name](*map(read, equation.invars), **equation.params)
        return [read(v) for v in jaxpr.outvars]

    return run


def _is_whole(v: Any) -> bool:
    """Whether its elements are integers or booleans, of which both libraries make the same."""
    return np.dtype(type_of(v).dtype).kind in "iub"


def _slice(x: np.ndarray, *, start_indices: Any, limit_indices: Any, strides: Any, **_: Any) -> np.ndarray:
    steps = strides or (1,) * x.ndim
    return x[tuple(slice(*bounds) for bounds in zip(start_indices, limit_indices, steps, strict=True))]


def _broadcast(x: np.ndarray, *, shape: Any, broadcast_dimensions: Any, **_: Any) -> np.ndarray:
    sizes = [1] * len(shape)
    for size, d in zip(x.shape, broadcast_dimensions, strict=True):
        sizes[d] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    if len(cases) == 2:  # ids counted from the end, mostly, of which there are none
        return np.where(which, cases[1], cases[0]) if which.any() else np.broadcast_to(cases[0], which.shape)
    return np.select([which == n for n in range(len(cases))], cases)


def _by_element(fn: Callable[..., Any]) -> Callable[..., np.ndarray]:
    return lambda *operands, **_: np.asarray(fn(*operands))


_NUMPY: Mapping[str, Callable[..., np.ndarray]] = MappingProxyType(
    {
        "slice": _slice,
        "broadcast_in_dim": _broadcast,
        "squeeze": lambda x, *, dimensions, **_: np.squeeze(x, tuple(dimensions)),
        "reshape": lambda x, *, new_sizes, **_: np.reshape(x, new_sizes),
        "transpose": lambda x, *, permutation, **_: np.transpose(x, permutation),
        "concatenate": lambda *parts, dimension, **_: np.concatenate(parts, dimension),
        "convert_element_type": lambda x, *, new_dtype, **_: x.astype(new_dtype),
        "select_n": _by_element(_select),
        "clamp": _by_element(lambda low, x, high: np.minimum(np.maximum(x, low), high)),
        "rem": _by_element(np.fmod),  # of the sign of the dividend, as lax.rem
        "add": _by_element(np.add),
        "sub": _by_element(np.subtract),
        "mul": _by_element(np.multiply),
        "max": _by_element(np.maximum),
        "min": _by_element(np.minimum),
        "lt": _by_element(np.less),
        "le": _by_element(np.less_equal),
        "gt": _by_element(np.greater),
        "ge": _by_element(np.greater_equal),
        "eq": _by_element(np.equal),
        "ne": _by_element(np.not_equal),
        "and": _by_element(np.bitwise_and),
        "or": _by_element(np.bitwise_or),
    }
)
"""What an equation of JAX is in NumPy."""
