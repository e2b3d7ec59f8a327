"""Which nested programs an equation holds, and how its own numbering runs.

Tracing (which reads a jaxpr) and execution (which rewrites it) must number equations alike; both classify equations
through this file, and both count an equation before the equations nested in it.
"""

import enum
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.extend.core as jex
from jax.core import ShapedArray


class EquationKind(enum.Enum):
    """How an equation nests other programs."""

    LEAF = "leaf"
    CALL = "call"  # one nested program with the equation's own inputs (or some of them) and outputs
    SCAN = "scan"
    WHILE = "while"
    COND = "cond"
    OPAQUE = "opaque"  # nested programs that keep their own shardings: shard_map, Pallas kernels


_T = TypeVar("_T")
_OPAQUE = frozenset({"shard_map", "pallas_call", "xla_metadata_call", "ffi_call", "custom_partitioning", "run_state"})
_CALL_PARAMETERS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_COMBINE_ELEMENTS = frozenset({"reduce", "reduce_window"})
"""Primitives whose program says how two elements become one, and is run for many: it has as many inputs and outputs as
the equation, and is not what the equation computes."""


def open_jaxpr(jaxpr: jex.Jaxpr | jex.ClosedJaxpr) -> jex.Jaxpr:
    """The open jaxpr of an open or closed one."""
    return jaxpr.jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jaxpr


def type_of(v: jex.Var | jex.Literal) -> ShapedArray:
    """The type of an array in a jaxpr: its shape and dtype."""
    return cast(ShapedArray, v.aval)


def shape_of(v: jex.Var | jex.Literal) -> tuple[int, ...]:
    """The shape of an array in a jaxpr."""
    return type_of(v).shape


def variables(atoms: Sequence[Any]) -> list[Any]:
    """The variables among the operands or results of an equation."""
    return [v for v in atoms if not isinstance(v, jex.Literal | jex.DropVar)]


def size_bytes(v: Any) -> int:
    """Bytes of a variable."""
    itemsize = getattr(v.aval.dtype, "itemsize", 4)
    return math.prod(v.aval.shape) * itemsize


def called_jaxpr(equation: jex.JaxprEqn) -> tuple[str, jex.Jaxpr | jex.ClosedJaxpr] | None:
    """The parameter name and nested program of a call-like equation; None for any other.

    A linear solve nests four programs, of which a function that is not differentiated any more runs one.
    """
    if equation.primitive.name == "custom_linear_solve":
        return "jaxprs", equation.params["jaxprs"].solve
    if equation.primitive.name in _COMBINE_ELEMENTS:
        return None
    for name in _CALL_PARAMETERS:
        nested = equation.params.get(name)
        if isinstance(nested, jex.Jaxpr | jex.ClosedJaxpr):
            inner = open_jaxpr(nested)
            if len(inner.invars) == len(equation.invars) and len(inner.outvars) == len(equation.outvars):
                return name, nested
    return None


def with_nested(equation: jex.JaxprEqn, changed: Callable[[Any], Any]) -> jex.JaxprEqn:
    """An equation with `changed` of each open or closed program among its parameters; the same if none is another."""

    def param(value: Any) -> Any:
        if isinstance(value, jex.ClosedJaxpr | jex.Jaxpr):
            return changed(value)
        if isinstance(value, tuple) and any(isinstance(x, jex.ClosedJaxpr | jex.Jaxpr) for x in value):
            made = list(map(param, value))
            if all(new is old for new, old in zip(made, value, strict=True)):
                return value
            is_named = hasattr(value, "_fields")  # as those of a linear solve
            return type(value)(*made) if is_named else tuple(made)
        return value

    params = {name: param(value) for name, value in equation.params.items()}
    is_same = all(params[name] is value for name, value in equation.params.items())
    return equation if is_same else equation.replace(params=params)


def is_checkpoint(equation: jex.JaxprEqn) -> bool:
    """Whether a call is of a checkpointed function, which the compiler must not share with what is around it."""
    return "prevent_cse" in equation.params


def is_to_or_from_host(equation: jex.JaxprEqn) -> bool:
    """Whether an equation copies a value into the memory of the host, or back, as policies of `jax.checkpoint` do that
    offload what they keep.
    """
    if equation.primitive.name != "device_put":
        return False
    return any(type_of(v).memory_space is jax.memory.Space.Host for v in (*equation.invars, *equation.outvars))


def called_operands(equation: jex.JaxprEqn, operands: Sequence[_T]) -> list[_T]:
    """Those of a call-like equation's operands that its nested program takes."""
    if equation.primitive.name != "custom_linear_solve":
        return list(operands)
    # the operands are the constants of the four programs, and then the right-hand sides
    lengths = equation.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    stop = first + lengths.solve
    return [*operands[first:stop], *operands[stop + lengths.transpose_solve :]]


def kind_of(equation: jex.JaxprEqn) -> EquationKind:
    """Classifies one equation."""
    name = equation.primitive.name
    if name in _OPAQUE:
        return EquationKind.OPAQUE
    if name == "scan":
        return EquationKind.SCAN
    if name == "while":
        return EquationKind.WHILE
    if name == "cond":
        return EquationKind.COND
    return EquationKind.CALL if called_jaxpr(equation) is not None else EquationKind.LEAF


def scan_counts(equation: jex.JaxprEqn) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many are carried.

    Read off the types, because the parameters that say so differ between JAX versions (`num_consts` and `num_carry`
    up to
    0.11, flat trees since 0.12): a scanned input and a stacked output have one dimension more outside than inside.
    """
    inner = open_jaxpr(equation.params["jaxpr"])
    rank = lambda v: len(shape_of(v))
    carried = sum(rank(o) == rank(i) for o, i in zip(equation.outvars, inner.outvars, strict=True))
    scanned = sum(rank(o) != rank(i) for o, i in zip(equation.invars, inner.invars, strict=True))
    return len(inner.invars) - carried - scanned, carried


def equation_numbers(jaxpr: jex.Jaxpr) -> list[int]:
    """The number of each equation of `jaxpr`, which is a whole program: those nested in earlier ones count too."""
    numbers, following = [], 0
    for equation in jaxpr.eqns:
        numbers.append(following)
        following += num_equations(equation)
    return numbers


def nested_programs(equation: jex.JaxprEqn) -> list[jex.Jaxpr | jex.ClosedJaxpr]:
    """The programs nested in an equation that run under the plan, in the order in which they are numbered."""
    match kind_of(equation):
        case EquationKind.CALL:
            called = called_jaxpr(equation)
            return [called[1]] if called else []
        case EquationKind.SCAN:
            return [equation.params["jaxpr"]]
        case EquationKind.WHILE:
            return [equation.params["cond_jaxpr"], equation.params["body_jaxpr"]]
        case EquationKind.COND:
            return list(equation.params["branches"])
        case _:
            return []


def nested_numbers(equation: jex.JaxprEqn, number: int) -> list[int]:
    """The number of the first equation of each program that equation `number` nests."""
    counts = (sum(map(num_equations, open_jaxpr(nested).eqns)) for nested in nested_programs(equation))
    return list(itertools.accumulate(counts, initial=number + 1))[:-1]


def num_equations(equation: jex.JaxprEqn) -> int:
    """An equation and those nested in it, as tracing and execution number them."""
    return 1 + sum(num_equations(e) for n in nested_programs(equation) for e in open_jaxpr(n).eqns)
