"""Where the first value that is not finite arises in one call of a function.

The program is evaluated once, with one flag for each intermediate value: whether it holds a NaN or an infinity. From an
output that is not finite the search goes back through operands that are not finite either, until an operation whose
operands are all finite. So infinities that do no harm, such as those of attention masks, are not met. Where that
operation is a loop, a conditional or a call, its body is searched in the same way, with the operands it had.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from autoshard.trace.leaves import describe
from autoshard.trace.source import source_of
from autoshard.trace.trace import parameter_names, path_name
from autoshard.trace.walk import (
    EquationKind,
    called_operands,
    is_checkpoint,
    kind_of,
    nested_programs,
    open_jaxpr,
    scan_counts,
)

FINITE, INFINITE, NAN = 0, 1, 2
"""What a value holds at worst."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """An operand of the operation that made the first bad value.

    Attributes:
      type: Its shape and type, as in `f32[8,64]`.
      came_from: Path of the argument that it is, after changes of shape and type at most; empty if it was computed.
      least, greatest: Its range; NaN if it holds one.
    """

    type: str
    came_from: str
    least: float
    greatest: float


@dataclasses.dataclass(frozen=True, slots=True)
class NonFiniteOrigin:
    """The first value that was not finite.

    Attributes:
      kind: `NaN` or `infinity`.
      argument: Path of the argument that held it already; empty if an operation made it.
      operation: The operation that made it, with operand and result types. line: The user's line.
      iterations: For each loop around the operation, from outside in, the iteration in which it happened, from 0.
      operands: The floating-point numbers that the operation was given.
      outputs: Paths of the outputs that were not finite in the end.
    """

    kind: str
    argument: str
    operation: str
    line: str
    iterations: tuple[int, ...]
    operands: tuple[Operand, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        if self.argument:
            return f"`{self.argument}` held {self.kind} already."
        text = f"The first {self.kind} was made by `{self.operation}` at {self.line or 'an unknown line'}"
        if self.iterations:
            text += f", in iteration {', '.join(map(str, self.iterations))} of the loops around it (from 0)"
        for operand in self.operands:
            name = f" `{operand.came_from}`" if operand.came_from else ""
            text += f"\n  operand {operand.type}{name}: between {operand.least:.3g} and {operand.greatest:.3g}"
        return text


def find_nonfinite(fn: Callable[..., Any], args: Sequence[Any]) -> NonFiniteOrigin | None:
    """Calls `fn(*args)` and finds the first value on the way to a bad output that is not finite.

    Args:
      fn: Any traceable function.
      args: Its arguments, wherever they lie; they are not donated. The memory of one call is needed.

    Returns:
      The origin, or None if all outputs are finite.
    """
    closed, result = jax.make_jaxpr(fn, return_shape=True)(*args)
    leaves = jax.tree_util.tree_flatten_with_path(tuple(args))[0]
    heads = parameter_names(fn, len(args))
    names = [".".join(filter(None, (heads[path[0].idx], path_name(path[1:])))) for path, _ in leaves]
    outputs = [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(result)[0]]
    level = _Level(_Program(closed), [leaf for _, leaf in leaves])
    bad = tuple(name for name, worst in zip(outputs, level.worst_of_outputs(), strict=True) if worst)
    if not bad:
        return None
    return dataclasses.replace(_search(level, [""] * len(closed.consts) + names, ()), outputs=bad)


class _Program:
    """One jaxpr, compiled once for all its calls."""

    def __init__(self, nested: jex.Jaxpr | jex.ClosedJaxpr):
        self.jaxpr = open_jaxpr(nested)
        self.consts = list(nested.consts) if isinstance(nested, jex.ClosedJaxpr) else []
        self.inputs = [*self.jaxpr.constvars, *self.jaxpr.invars]
        made = [v for e in self.jaxpr.eqns for v in e.outvars if not isinstance(v, jex.DropVar)]
        self.watched = [v for v in (*self.inputs, *made) if _is_float(v)]
        self.maker = {v: e for e in self.jaxpr.eqns for v in e.outvars}
        self.flags = jax.jit(lambda *given: jnp.stack([_worst(x) for x in self._run(given, self.watched)]))
        self.outputs = jax.jit(lambda *given: self._run(given, self.jaxpr.outvars))

    def _run(self, given: Sequence[Any], wanted: Sequence[Any]) -> list[Any]:
        """The values of variables; what they do not need is left to the compiler to drop."""
        env = dict(zip(self.inputs, given, strict=True))
        read = lambda v: v.val if isinstance(v, jex.Literal) else env[v]
        for equation in self.jaxpr.eqns:
            env.update(zip(equation.outvars, _results(equation, list(map(read, equation.invars))), strict=True))
        return list(map(read, wanted))

    def values(self, given: Sequence[Any], wanted: Sequence[Any]) -> list[Any]:
        """The values of variables and literals, where the inputs have the values `given`."""
        return jax.jit(lambda *given: self._run(given, wanted))(*given)

    def constants(self) -> set[Any]:
        """Variables that depend on no input."""
        varying, fixed = set(self.inputs), set()
        for equation in self.jaxpr.eqns:
            depends = any(v in varying for v in equation.invars if not isinstance(v, jex.Literal))
            (varying if depends else fixed).update(equation.outvars)
        return fixed


def _results(equation: jex.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    """What an equation gives, outside of its jaxpr."""
    if kind_of(equation) is EquationKind.CALL and not is_checkpoint(equation):
        (nested,) = nested_programs(equation)
        closed = nested if isinstance(nested, jex.ClosedJaxpr) else jex.ClosedJaxpr(nested, ())
        return jex.jaxpr_as_fun(closed)(*called_operands(equation, operands))
    results = equation.primitive.bind(*operands, **equation.params)
    return results if equation.primitive.multiple_results else [results]


class _Level:
    """One run of a program: its inputs, and what each of its values holds at worst."""

    def __init__(self, program: _Program, operands: Sequence[Any]):
        self.program, self.inputs = program, [*program.consts, *operands]
        numbers = np.asarray(program.flags(*self.inputs)) if program.watched else ()
        self.worst: dict[Any, int] = dict(zip(program.watched, map(int, numbers), strict=True))

    def worst_of(self, v: Any) -> int:
        """What a variable or literal holds at worst."""
        return int(_worst(v.val)) if isinstance(v, jex.Literal) else self.worst.get(v, FINITE)

    def worst_of_outputs(self) -> list[int]:
        """What each output holds at worst."""
        return [self.worst_of(v) for v in self.program.jaxpr.outvars]


def _search(level: _Level, names: Sequence[str], iterations: tuple[int, ...]) -> NonFiniteOrigin:
    """The origin of the bad outputs of `level`, whose inputs are called `names`."""
    program, fixed = level.program, level.program.constants()
    is_constant = lambda v: isinstance(v, jex.Literal) or v in fixed
    top = max(level.worst_of_outputs())
    stack: list[Any] = [v for v in program.jaxpr.outvars if level.worst_of(v) == top and not isinstance(v, jex.Literal)]
    met: set[Any] = set(stack)
    inputs: list[int] = []
    origins: list[tuple[bool, int]] = []
    numbers = {id(e): number for number, e in enumerate(program.jaxpr.eqns)}
    while stack:
        v = stack.pop()
        if v not in program.maker:
            inputs.append(program.inputs.index(v))
            continue
        equation = program.maker[v]
        operands = [o for o in equation.invars if level.worst_of(o) and not is_constant(o)]
        # A NaN made of a NaN came from there, whatever infinities it met as well.
        behind = [o for o in operands if level.worst_of(o) == NAN] or operands
        if not behind:
            constants = [o for o in equation.invars if is_constant(o) and level.worst_of(o)]
            origins.append((level.worst_of(v) == INFINITE and bool(constants), numbers[id(equation)]))
        stack += [o for o in dict.fromkeys(behind) if o not in met]
        met.update(behind)
    if inputs or not origins:
        name = names[min(inputs)] if inputs else ""
        return NonFiniteOrigin(_KINDS[top], name or "a constant of the program", "", "", iterations, (), ())
    return _inside(level, program.jaxpr.eqns[min(origins)[1]], names, iterations)


def _inside(
    level: _Level, equation: jex.JaxprEqn, names: Sequence[str], iterations: tuple[int, ...]
) -> NonFiniteOrigin:
    """The origin in an equation whose operands are good: the equation itself, or one in a program that it nests."""
    operands = level.program.values(level.inputs, equation.invars)
    came_from = [_argument_of(level.program, v, names) for v in equation.invars]
    for inner, iteration in _runs(equation, operands):
        if any(inner.worst_of_outputs()):
            return _search(inner, _names_inside(inner, equation, came_from), (*iterations, *iteration))
    worst = max(level.worst_of(v) for v in equation.outvars)
    given = tuple(
        Operand(v.aval.str_short(short_dtypes=True), name, float(jnp.min(x)), float(jnp.max(x)))
        for v, x, name in zip(equation.invars, operands, came_from, strict=True)
        if jnp.issubdtype(jnp.result_type(x), jnp.floating) and np.size(x)
    )
    return NonFiniteOrigin(_KINDS[worst], "", describe(equation), source_of(equation), iterations, given, ())


def _runs(equation: jex.JaxprEqn, operands: list[Any]) -> Iterator[tuple[_Level, tuple[int, ...]]]:
    """The runs of what an equation nests, in order, each with its number (from 0) if it is an iteration of a loop.

    None for an equation that nests nothing.
    """
    p = equation.params
    match kind_of(equation):
        case EquationKind.CALL:
            yield _Level(_Program(*nested_programs(equation)), called_operands(equation, operands)), ()
        case EquationKind.COND:
            branch = min(max(int(operands[0]), 0), len(p["branches"]) - 1)
            yield _Level(_Program(p["branches"][branch]), operands[1:]), ()
        case EquationKind.SCAN:
            body = _Program(p["jaxpr"])
            num_fixed, num_carried = scan_counts(equation)
            fixed, carried, scanned = _split(operands, num_fixed, num_carried)
            for step in range(p["length"]):
                row = p["length"] - 1 - step if p["reverse"] else step
                run = [*fixed, *carried, *(x[row] for x in scanned)]
                yield _Level(body, run), (step,)
                carried = body.outputs(*body.consts, *run)[:num_carried]
        case EquationKind.WHILE:
            body, goes_on, step = _Program(p["body_jaxpr"]), _Program(p["cond_jaxpr"]), 0
            for_condition, for_body, carried = _split(operands, p["cond_nconsts"], p["body_nconsts"])
            while bool(goes_on.outputs(*goes_on.consts, *for_condition, *carried)[0]):
                yield _Level(body, [*for_body, *carried]), (step,)
                carried, step = body.outputs(*body.consts, *for_body, *carried), step + 1


def _split(operands: list[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    """The first so many, the next so many, and the rest."""
    return operands[:first], operands[first : first + second], operands[first + second :]


def _names_inside(inner: _Level, equation: jex.JaxprEqn, came_from: Sequence[str]) -> list[str]:
    """Names of a nested program's inputs, which are the last operands of its equation; what a loop carries has none."""
    names = list(came_from)
    if kind_of(equation) is EquationKind.SCAN:
        num_fixed, num_carried = scan_counts(equation)
        names[num_fixed : num_fixed + num_carried] = [""] * num_carried
    elif kind_of(equation) is EquationKind.WHILE:
        num_carried = len(equation.outvars)
        names[len(names) - num_carried :] = [""] * num_carried
    padded = [""] * len(inner.inputs) + names
    return padded[len(padded) - len(inner.inputs) :]


def _argument_of(program: _Program, v: Any, names: Sequence[str]) -> str:
    """The name of the input that `v` is, if only changes of shape, type or place lie between."""
    while not isinstance(v, jex.Literal):
        if v not in program.maker:
            return names[program.inputs.index(v)]
        equation = program.maker[v]
        if equation.primitive.name not in _SAME_NUMBERS:
            return ""
        v = equation.invars[0]
    return ""


_SAME_NUMBERS = frozenset(
    {"convert_element_type", "reshape", "transpose", "broadcast_in_dim", "squeeze", "copy", "sharding_constraint"}
)


def _is_float(v: Any) -> bool:
    dtype = getattr(v.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact) and bool(np.prod(v.aval.shape, dtype=int))


def _worst(x: Any) -> Any:
    """FINITE, INFINITE or NAN: int32 scalar; FINITE for what is no floating-point array."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        return FINITE
    return jnp.where(jnp.isnan(x).any(), NAN, jnp.where(jnp.isinf(x).any(), INFINITE, FINITE))


_KINDS = {INFINITE: "infinity", NAN: "NaN"}
