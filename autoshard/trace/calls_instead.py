"""Calls of functions of JAX in place of equations that are read as what these compute."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from autoshard.trace.walk import type_of, with_nested

Rule = Callable[[jex.JaxprEqn], Callable[..., Any] | None]
"""What computes the results of an equation from its operands; None of equations that stay what they are."""


def with_calls(closed: jex.ClosedJaxpr, rules: Sequence[Rule]) -> jex.ClosedJaxpr:
    """`closed` with calls in place of some equations, in the programs that it nests too; itself if it has none of them.

    Args:
      closed: The program.
      rules: Of each equation the first that has a function for it serves, if JAX can trace that and its results are of
        the same types. Calls are late ones (`late_calls_inlined`).
    """
    return _Replacing(tuple(rules), {}).program(closed)


class _Replacing:
    """Replaces equations; programs that are nested more than once stay shared.

    Attributes:
      rules: See `with_calls`. done: What was made of a program, by its identity; both are kept alive.
    """

    def __init__(self, rules: Sequence[Rule], done: dict[int, tuple[Any, Any]]):
        self._rules, self._done = rules, done

    def program(self, program: Any) -> Any:
        """An open or closed program without such equations; the same object if it has none."""
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
        function = next(filter(None, (rule(equation) for rule in self._rules)), None)
        called = None if function is None else _call(function, equation)
        return with_nested(equation if called is None else called, self.program)


def _call(function: Callable[..., Any], equation: jex.JaxprEqn) -> jex.JaxprEqn | None:
    """A call of `function` with an equation's operands, at its line; None where JAX cannot trace that."""

    def computed(*operands: jax.Array) -> list[jax.Array]:
        results = function(*operands)
        return list(results) if equation.primitive.multiple_results else [results]

    types = lambda atoms: [(type_of(v).shape, type_of(v).dtype) for v in atoms]
    try:
        operands = [
            jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in map(type_of, equation.invars)
        ]
        (call,) = jax.make_jaxpr(jax.jit(computed))(*operands).jaxpr.eqns
        is_same = types(call.outvars) == types(equation.outvars) and len(call.invars) == len(equation.invars)
    except Exception:  # noqa: BLE001 - implementations come from any library, and may fail in any way
        return None
    if not is_same:
        return None
    nested, line = call.params["jaxpr"], equation.source_info.traceback
    equations = [e.replace(source_info=e.source_info.replace(traceback=line)) for e in nested.jaxpr.eqns]
    placed = jex.ClosedJaxpr(nested.jaxpr.replace(eqns=equations), nested.consts)
    params = {**call.params, "jaxpr": placed, "inline": True}
    return equation.replace(primitive=call.primitive, params=params, effects=call.effects)
