"""The equations of a program and of those that it calls by their numbers, with the operands that are known already."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex

from autoshard.trace.walk import EquationKind, called_operands, kind_of, nested_programs, num_equations, open_jaxpr


class NumberedEquations(NamedTuple):
    """The equations of a program and of those that it calls, by number; those in loops and conditionals are left out.

    Attributes:
      equations: By number.
      known: The operands that are literals or constants, in their own program or in one that calls it, by equation and
        slot.
      outputs: The outputs that are such.
      backward: The equations of backward passes, as JAX derives them.
    """

    equations: Mapping[int, jex.JaxprEqn]
    known: Mapping[tuple[int, int], Any]
    outputs: Mapping[int, Any]
    backward: Collection[int]


def numbered_equations(closed: jex.ClosedJaxpr) -> NumberedEquations:
    """The equations of `closed`."""
    equations: dict[int, jex.JaxprEqn] = {}
    operands: dict[tuple[int, int], Any] = {}
    backward: set[int] = set()

    def walk(
        nested: jex.Jaxpr | jex.ClosedJaxpr, given: Mapping[Any, Any], first: int, is_backward: bool
    ) -> tuple[int, dict[int, Any]]:
        """Numbers a program; returns the number behind it, and its outputs that are known."""
        inner, number = open_jaxpr(nested), first
        known = {**given, **dict(zip(inner.constvars, getattr(nested, "consts", ()), strict=False))}
        for equation in inner.eqns:
            equations[number] = equation
            stack = str(equation.source_info.name_stack)
            is_own = (is_backward or "transpose(" in stack) and "rematted_computation" not in stack
            if is_own:
                backward.add(number)
            here = _known(equation.invars, known)
            operands.update({(number, slot): value for slot, value in here.items()})
            if kind_of(equation) is EquationKind.CALL:
                (program,) = nested_programs(equation)
                passed = called_operands(equation, list(range(len(equation.invars))))
                inputs = zip(open_jaxpr(program).invars, passed, strict=True)
                inside = {v: here[slot] for v, slot in inputs if slot in here}
                number, made = walk(program, inside, number + 1, is_own)
                known.update({equation.outvars[slot]: value for slot, value in made.items()})
            else:
                number += num_equations(equation)
        return number, _known(inner.outvars, known)

    _, outputs = walk(closed, {}, 0, False)
    return NumberedEquations(equations, operands, outputs, frozenset(backward))


def _known(atoms: Sequence[Any], known: Mapping[Any, Any]) -> dict[int, Any]:
    """Those of some operands or outputs that are literals or known, by position."""
    found = {}
    for slot, v in enumerate(atoms):
        if isinstance(v, jex.Literal):
            found[slot] = v.val
        elif v in known:
            found[slot] = known[v]
    return found
