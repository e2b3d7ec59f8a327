"""Inlines nested `jit` calls: all, so that a program is one list of equations that can be cut anywhere, or those that
JAX itself inlines when it lowers the program.

Differentiation rules and control flow stay what they are; so do checkpointed functions, unless they are asked to open.
"""

from collections.abc import Callable
from typing import Any

import jax.extend.core as jex

from autoshard.trace.blocks import standing_in
from autoshard.trace.source import SourceLines
from autoshard.trace.walk import is_checkpoint, with_nested

_EVALUATED = "eval_jaxpr"
"""What runs a traced function in another one (`jax.stages.Traced`) since JAX 0.12; before, it was inlined at once."""

_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    _EVALUATED: "call_jaxpr",
}
"""Primitives that only call, and the parameter that holds what they call; `jit` was `pjit` before JAX 0.7."""

_TAKES_CONSTANTS = frozenset(
    {"jit", "pjit", "closed_call", _EVALUATED, "scan", "while", "cond", "custom_jvp_call", "custom_vjp_call"}
)
"""Primitives that run their programs with the constants of these.

Others, such as checkpoints and `shard_map`, have programs without any. Until 0.11 that showed in the type; since 0.12
all programs have one type, and constants that such a program is given are missing when it runs.
"""


def inlined(closed: jex.ClosedJaxpr, opens_checkpoints: bool = False) -> jex.ClosedJaxpr:
    """`closed` without nested `jit` calls; its inputs and outputs stay the same.

    Args:
      closed: The program.
      opens_checkpoints: Whether functions under `jax.checkpoint` are inlined too, so that differentiation keeps what it
        likes; not those in loops.
    """

    def held(equation: jex.JaxprEqn) -> str | None:
        is_opened = opens_checkpoints and is_checkpoint(equation)
        return "jaxpr" if is_opened else _CALLS.get(equation.primitive.name)

    return _inlined(closed, held)


def late_calls_inlined(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """`closed` without the calls of `jit(inline=True)` and of traced functions, in the programs that it nests too.

    Before 0.11 JAX inlined the former while it traced; since then they stay until the program is lowered
    (`jax.Inline.JAX_LATE`); the latter stay since 0.12. Most are a few equations of `jax.numpy` or of an optimizer.
    Programs come out as of the JAX before, and what is known of those holds.
    """
    return _LateCalls({}).inlined(closed)


class _LateCalls:
    """Inlines late calls; programs that are nested more than once stay shared.

    Attributes:
      done: What was made of a program, by its identity and whether it can have constants; both are kept alive.
    """

    def __init__(self, done: dict[tuple[int, bool], tuple[Any, Any]]):
        self._done = done

    def inlined(self, program: Any, takes_constants: bool = True) -> Any:
        """A program without late calls; the same object if it has none."""
        key = id(program), takes_constants
        if key not in self._done:
            is_closed = isinstance(program, jex.ClosedJaxpr)
            closed = program if is_closed else jex.ClosedJaxpr(program, ())
            made = self._made(closed, can_have_consts=is_closed and takes_constants)
            own = closed if made is None else made
            found = program if made is None else own if is_closed else own.jaxpr
            self._done[key] = program, found
        return self._done[key][1]

    def _made(self, closed: jex.ClosedJaxpr, can_have_consts: bool) -> jex.ClosedJaxpr | None:
        equations = [self._inside(equation) for equation in closed.jaxpr.eqns]
        held = lambda equation: _late_call(equation, can_have_consts)
        if any(map(held, equations)):
            return _inlined(jex.ClosedJaxpr(closed.jaxpr.replace(eqns=equations), closed.consts), held)
        if all(new is old for new, old in zip(equations, closed.jaxpr.eqns, strict=True)):
            return None
        return jex.ClosedJaxpr(closed.jaxpr.replace(eqns=equations), closed.consts)

    def _inside(self, equation: jex.JaxprEqn) -> jex.JaxprEqn:
        """An equation whose nested programs have no late calls."""
        takes_constants = equation.primitive.name in _TAKES_CONSTANTS
        return with_nested(equation, lambda program: self.inlined(program, takes_constants))


def _late_call(equation: jex.JaxprEqn, can_have_consts: bool) -> str | None:
    """The parameter that holds what a late call calls; None of others, and where its constants would have no place."""
    held = _CALLS.get(equation.primitive.name)
    inline = equation.params.get("inline")
    is_late = inline is True or getattr(inline, "name", "") == "JAX_LATE" or equation.primitive.name == _EVALUATED
    if held is None or not is_late:
        return None
    called = equation.params[held]
    has_consts = bool((called.jaxpr if isinstance(called, jex.ClosedJaxpr) else called).constvars)
    return held if can_have_consts or not has_consts else None


def _inlined(closed: jex.ClosedJaxpr, held: Callable[[jex.JaxprEqn], str | None]) -> jex.ClosedJaxpr:
    """`closed` with some equations inlined: those of which `held` names the parameter with what they call."""
    equations: list[jex.JaxprEqn] = []
    consts: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    renamed = _inline(closed.jaxpr, lambda v: v, equations, consts, held, SourceLines(), is_top=True)
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
    held: Callable[[jex.JaxprEqn], str | None],
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
        called = held(equation)
        if called is not None:
            nested = equation.params[called]
            inner = nested.jaxpr if isinstance(nested, jex.ClosedJaxpr) else nested
            inputs = dict(zip(inner.invars, operands, strict=True))
            for v, value in zip(inner.constvars, getattr(nested, "consts", ()), strict=True):
                inputs[v] = jex.Var(v.aval)
                consts[inputs[v]] = value
            around = equation.source_info
            inside = _inline(inner, inputs.__getitem__, equations, consts, held, lines, caller=around)
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
