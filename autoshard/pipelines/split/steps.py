"""A jaxpr as a list of steps on numbered values, its calls inlined, so that parts of it can be run apart.

A jaxpr's variables are those of one program; values here are numbers, which any selection of steps may read and write.
Conditionals and loops stay one step each.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from autoshard.trace.leaves import Leaves
from autoshard.trace.source import SourceLines
from autoshard.trace.walk import EquationKind, called_operands, kind_of, nested_programs


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One operation on numbered values.

    Attributes:
      name: Primitive name. line: The user's line, or an empty string.
      operands: The values that it reads, in order; literals are left out. results: Those that it makes; None for one
        that nothing reads.
      run: From the operands' arrays to the results' arrays.
      has_effects: Whether it does something besides (a print, a callback), so that it must run exactly once.
      branches: Of a conditional, the branches' programs; `operands[0]` chooses, and each takes all others of
        `arguments`.
      arguments: Of a conditional, what the branches take: a value, or a literal.
    """

    name: str
    line: str
    operands: tuple[int, ...]
    results: tuple[int | None, ...]
    run: Callable[[Sequence[Any]], Sequence[Any]]
    has_effects: bool = False
    branches: tuple[jex.ClosedJaxpr, ...] = ()
    arguments: tuple[int | jex.Literal, ...] = ()


class Site(NamedTuple):
    """Where a value is there first: on `submeshes` in `level`; on all others, if sent, in the level after."""

    level: int
    submeshes: frozenset[int]

    def level_on(self, submesh: int) -> int:
        """The first level in which the value can be read on `submesh`."""
        return self.level + (submesh not in self.submeshes)


def run_steps(steps: Iterable[Step], arrays: MutableMapping[int, Any]) -> None:
    """IntervalCostTable `steps` in order; `arrays` holds what they read, and then also what they make."""
    for step in steps:
        made = step.run([arrays[v] for v in step.operands])
        arrays.update((v, x) for v, x in zip(step.results, made, strict=True) if v is not None)


class Flattening:
    """Turns jaxprs into steps. All values of one flattening have different numbers."""

    def __init__(self):
        self.avals: list[Any] = []
        """The abstract value of each value."""
        self._lines, self._types = SourceLines(), Leaves()

    def new_value(self, aval: Any) -> int:
        """The number of a new value."""
        self.avals.append(aval)
        return len(self.avals) - 1

    def size_bytes(self, value: int) -> int:
        """Bytes of a value."""
        kind = self._types.type_of(self.avals[value])
        return math.prod(kind.shape) * kind.itemsize_bytes

    def is_scalar(self, value: int) -> bool:
        """Whether a value is a single number, of any rank."""
        return math.prod(self._types.type_of(self.avals[value]).shape) == 1

    def flatten(
        self, closed: jex.ClosedJaxpr, inputs: Sequence[int | jex.Literal], line: str = ""
    ) -> tuple[list[Step], list[int]]:
        """The steps of `closed` on `inputs`, and the values of its outputs.

        Args:
          closed: Any closed jaxpr.
          inputs: A value or literal for each of its inputs.
          line: The user's line of the call of it; steps without a line of their own get it.
        """
        steps: list[Step] = []
        outs = self._inline_call(closed, inputs, line, steps)
        return steps, [self._constant(o.aval, o.val, steps) if isinstance(o, jex.Literal) else o for o in outs]

    def _constant(self, aval: Any, array: Any, steps: list[Step]) -> int:
        """Adds a step that makes a constant, wherever it runs: not tied to the devices that hold `array`."""
        value = self.new_value(aval)
        if not jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            array = np.asarray(array, aval.dtype)
        steps.append(Step("constant", "", (), (value,), lambda _: (jnp.asarray(array),)))
        return value

    def _inline(
        self, jaxpr: jex.Jaxpr, inputs: Sequence[int | jex.Literal], line: str, steps: list[Step]
    ) -> list[int | jex.Literal]:
        """Adds the steps of `jaxpr` on `inputs` (constvars first); returns its outputs."""
        env: dict[Any, int | jex.Literal] = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))
        read = lambda v: v if isinstance(v, jex.Literal) else env[v]
        for equation in jaxpr.eqns:
            operands = [read(v) for v in equation.invars]
            at = self._lines.of(equation) or line
            kind = kind_of(equation)
            if kind is EquationKind.CALL:
                (nested,) = nested_programs(equation)
                results = self._inline_call(nested, called_operands(equation, operands), at, steps)
            elif kind is EquationKind.COND and isinstance(operands[0], jex.Literal):
                branch = equation.params["branches"][int(operands[0].val)]
                results = self._inline_call(branch, operands[1:], at, steps)
            else:
                results = self._step(equation, operands, at, kind, steps)
            for v, r in zip(equation.outvars, results, strict=True):
                if r is not None and not isinstance(v, jex.DropVar):
                    env[v] = r
        return [read(v) for v in jaxpr.outvars]

    def _inline_call(
        self, nested: jex.Jaxpr | jex.ClosedJaxpr, operands: Sequence[Any], line: str, steps: list[Step]
    ) -> list[int | jex.Literal]:
        if not isinstance(nested, jex.ClosedJaxpr):
            return self._inline(nested, operands, line, steps)
        closed = zip(nested.jaxpr.constvars, nested.consts, strict=True)
        constants = [self._constant(v.aval, x, steps) for v, x in closed]
        return self._inline(nested.jaxpr, [*constants, *operands], line, steps)

    def _step(
        self, equation: jex.JaxprEqn, operands: list[Any], line: str, kind: EquationKind, steps: list[Step]
    ) -> list[int | None]:
        results = [None if isinstance(v, jex.DropVar) else self.new_value(v.aval) for v in equation.outvars]
        is_cond = kind is EquationKind.COND
        steps.append(
            Step(
                equation.primitive.name,
                line,
                tuple(o for o in operands if not isinstance(o, jex.Literal)),
                tuple(results),
                _binding(equation, operands),
                bool(equation.effects),
                tuple(equation.params["branches"]) if is_cond else (),
                tuple(operands[1:]) if is_cond else (),
            )
        )
        return results


def _binding(equation: jex.JaxprEqn, operands: Sequence[Any]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that evaluates `equation` on the arrays of those `operands` that are no literals."""

    def run(arrays: Sequence[Any]) -> Sequence[Any]:
        given = iter(arrays)
        values = [o.val if isinstance(o, jex.Literal) else next(given) for o in operands]
        results = equation.primitive.bind(*values, **equation.params)
        return results if equation.primitive.multiple_results else (results,)

    return run
