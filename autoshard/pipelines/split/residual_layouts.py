"""In which layouts a stage holds what it needs again: as the plan made them, where the plan says so."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from autoshard.execution.jit import Interface
from autoshard.graph.equation_plan import EquationPlan
from autoshard.graph.layout import SpecEntries
from autoshard.trace.walk import EquationKind, equation_numbers, kind_of, nested_programs, open_jaxpr, shape_of


def residual_layouts(jaxpr: jex.Jaxpr, interface: Interface, held: Sequence[Any]) -> list[SpecEntries | None]:
    """The layout of each variable of `held`; None where the plan leaves it to the compiler.

    A value inside a group of operations that the plan decides together has no layout of its own in the plan; it has
    that of an operand of the same shape.
    """
    numbers, shardings = equation_numbers(jaxpr), dict(interface.shardings)
    known: dict[Any, SpecEntries | None] = dict(zip(jaxpr.invars, interface.argument_entries, strict=True))
    for number, equation in zip(numbers, jaxpr.eqns, strict=True):
        planned = _planned(equation, number, shardings)
        for v, entries in zip(equation.outvars, planned, strict=True):
            if isinstance(v, jex.DropVar):
                continue
            if entries is None and kind_of(equation) is EquationKind.LEAF:
                alike = [o for o in equation.invars if not isinstance(o, jex.Literal) and shape_of(o) == shape_of(v)]
                entries = next((known[o] for o in alike if known.get(o) is not None), None)
            known[v] = entries
    return [known[v] for v in held]


def _planned(equation: jex.JaxprEqn, number: int, shardings: Mapping[int, EquationPlan]) -> list[SpecEntries | None]:
    """What the plan says of each result; of those of a call, what it says of the equations inside that make them."""
    if kind_of(equation) is not EquationKind.CALL:
        found = shardings.get(number)
        results = {} if found is None else dict(found.results)
        return [results.get(slot) for slot in range(len(equation.outvars))]
    (nested_program,) = nested_programs(equation)
    inner = open_jaxpr(nested_program)
    made: dict[Any, SpecEntries | None] = {}
    for n, nested in zip(equation_numbers(inner), inner.eqns, strict=True):
        made |= dict(zip(nested.outvars, _planned(nested, number + 1 + n, shardings), strict=True))
    return [None if isinstance(v, jex.Literal) else made.get(v) for v in inner.outvars]
