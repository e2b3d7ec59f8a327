"""Primitives of other libraries that are implemented in JAX are read as what they compute.

A library may define a primitive of its own to give it rules for derivatives and batches (`linear_solve` of Lineax, what
Equinox does without inlining), and leave to JAX what it computes: its implementation is a function of arrays that can
be traced. A call of that function takes the place of the primitive, so that its operations have their own rules. Those
that JAX cannot trace, such as kernels, stay what they are.
"""

import functools
from typing import Any

import jax
import jax.extend.core as jex

from autoshard.trace.rules.table import TABLE
from autoshard.trace.walk import EquationKind, kind_of, type_of, with_nested


def foreign_opened(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """`closed` with calls in place of such primitives, in the programs that it nests too; itself if it has none."""
    return _Opened({}).program(closed)


class _Opened:
    """Opens primitives; programs that are nested more than once stay shared.

    Attributes:
      done: What was made of a program, by its identity; both are kept alive.
    """

    def __init__(self, done: dict[int, tuple[Any, Any]]):
        self._done = done

    def program(self, program: Any) -> Any:
        """An open or closed program without such primitives; the same object if it has none."""
        if id(program) not in self._done:
            jaxpr = program.jaxpr if isinstance(program, jex.ClosedJaxpr) else program
            equations = list(map(self._equation, jaxpr.eqns))
            made = program
            if any(new is not old for new, old in zip(equations, jaxpr.eqns, strict=True)):
                jaxpr = jaxpr.replace(eqns=equations)
                made = jex.ClosedJaxpr(jaxpr, program.consts) if isinstance(program, jex.ClosedJaxpr) else jaxpr
            self._done[id(program)] = program, made
        return self._done[id(program)][1]

    def _equation(self, equation: jex.JaxprEqn) -> jex.JaxprEqn:
        called = _call(equation) if _is_foreign(equation) else None
        return with_nested(equation if called is None else called, self.program)


def _is_foreign(equation: jex.JaxprEqn) -> bool:
    """Whether another library implements the primitive; JAX implements its own by compiling them."""
    primitive = equation.primitive
    if primitive.name in TABLE or kind_of(equation) is not EquationKind.LEAF:
        return False
    function: Any = primitive.impl
    while isinstance(function, functools.partial):
        function = function.func
    return (getattr(function, "__module__", None) or "jax").split(".")[0] != "jax"


def _call(equation: jex.JaxprEqn) -> jex.JaxprEqn | None:
    """A call of what implements an equation's primitive; None where JAX cannot trace that."""

    def implementation(*operands: jax.Array) -> list[jax.Array]:
        results = equation.primitive.impl(*operands, **equation.params)
        return list(results) if equation.primitive.multiple_results else [results]

    types = lambda atoms: [(type_of(v).shape, type_of(v).dtype) for v in atoms]
    try:
        operands = [
            jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in map(type_of, equation.invars)
        ]
        (call,) = jax.make_jaxpr(jax.jit(implementation))(*operands).jaxpr.eqns
        is_same = types(call.outvars) == types(equation.outvars) and len(call.invars) == len(equation.invars)
    except Exception:  # noqa: BLE001 - implementations come from any library, and may fail in any way
        return None
    return equation.replace(primitive=call.primitive, params=call.params, effects=call.effects) if is_same else None
