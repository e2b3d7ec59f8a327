"""Primitives of other libraries that are implemented in JAX are read as what they compute.

A library may define a primitive of its own to give it rules for derivatives and batches (`linear_solve` of Lineax, what
Equinox does without inlining), and leave to JAX what it computes: its implementation is a function of arrays that can
be traced. A call of that function takes the place of the primitive, so that its operations have their own rules. Those
that JAX cannot trace, such as kernels, stay what they are.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.extend.core as jex

from autoshard.trace.rules.table import TABLE
from autoshard.trace.walk import EquationKind, kind_of


def implementation(equation: jex.JaxprEqn) -> Callable[..., Any] | None:
    """What another library implements an equation's primitive by; None of JAX's own, which are compiled."""
    primitive = equation.primitive
    if primitive.name in TABLE or kind_of(equation) is not EquationKind.LEAF:
        return None
    function: Any = primitive.impl
    while isinstance(function, functools.partial):
        function = function.func
    if (getattr(function, "__module__", None) or "jax").split(".")[0] == "jax":
        return None
    return functools.partial(primitive.impl, **equation.params)
