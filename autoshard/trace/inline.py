"""Inlines nested `jit` calls, so that a program is one list of equations that can be cut anywhere.

Differentiation rules and control flow stay what they are; so do checkpointed functions, unless they are asked to open.
"""

from collections.abc import Callable
from typing import Any

import jax.extend.core as jex

from autoshard.trace.blocks import standing_in
from autoshard.trace.source import SourceLines
from autoshard.trace.walk import is_checkpoint

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
"""Primitives that only call, and the parameter that holds what they call; `jit` was `pjit` before JAX 0.7."""


def inlined(closed: jex.ClosedJaxpr, opens_checkpoints: bool = False) -> jex.ClosedJaxpr:
    """`closed` without nested `jit` calls; its inputs and outputs stay the same.

    Args:
      closed: The program.
      opens_checkpoints: Whether functions under `jax.checkpoint` are inlined too, so that differentiation keeps what it
        likes; not those in loops.
    """
    equations: list[jex.JaxprEqn] = []
    consts: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    renamed = _inline(closed.jaxpr, lambda v: v, equations, consts, opens_checkpoints, SourceLines(), is_top=True)
    jaxpr = closed.jaxpr.replace(
        constvars=list(consts),
        eqns=equations,
        outvars=[v if isinstance(v, jex.Literal) else renamed(v) for v in closed.jaxpr.outvars],
    )
    return jex.ClosedJaxpr(jaxpr, list(consts.values()))


def _inline(
    jaxpr: jex.Jaxpr,
    outer: Callable[[Any], Any],
    equations: list[jex.JaxprEqn],
    consts: dict[Any, Any],
    opens_checkpoints: bool,
    lines: SourceLines,
    is_top: bool = False,
    caller: Any = None,
) -> Callable[[Any], Any]:
    """Appends the equations of `jaxpr` with its variables renamed; returns the renaming.

    They keep the scopes of the call that they come from, and its line where they have none: `caller`, its source info.

    A cached jaxpr is the same object in every call, so each call of it gets variables of its own.
    """
    names: dict[Any, Any] = {}

    def read(v: Any) -> Any:
        if isinstance(v, jex.Literal):
            return v
        return names[v] if v in names else outer(v)

    for equation in jaxpr.eqns:
        if caller is not None:
            equation = standing_in(equation, caller.name_stack)
            if not lines.of(equation):
                info = equation.source_info.replace(traceback=caller.traceback)
                equation = equation.replace(source_info=info)
        operands = [read(v) for v in equation.invars]
        held = _CALLS.get(equation.primitive.name)
        if opens_checkpoints and is_checkpoint(equation):
            held = "jaxpr"
        if held is not None:
            nested = equation.params[held]
            inner = nested.jaxpr if isinstance(nested, jex.ClosedJaxpr) else nested
            inputs = dict(zip(inner.invars, operands, strict=True))
            for v, value in zip(inner.constvars, getattr(nested, "consts", ()), strict=True):
                inputs[v] = jex.Var(v.aval)
                consts[inputs[v]] = value
            around = equation.source_info
            inside = _inline(inner, inputs.__getitem__, equations, consts, opens_checkpoints, lines, caller=around)
            for v, result in zip(equation.outvars, inner.outvars, strict=True):
                names[v] = result if isinstance(result, jex.Literal) else inside(result)
            continue
        results = equation.outvars if is_top else [_fresh(v, names) for v in equation.outvars]
        equations.append(equation.replace(invars=operands, outvars=list(results)))
    return read


def _fresh(v: Any, names: dict[Any, Any]) -> Any:
    if isinstance(v, jex.DropVar):
        return v
    names[v] = jex.Var(v.aval)
    return names[v]
