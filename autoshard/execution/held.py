"""In which layouts a stage holds what it needs again: as the plan made them, where the plan says so."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from autoshard.execution.jit import Interface
from autoshard.planner.decisions import EquationShardings, SpecEntries
from autoshard.trace.walk import EquationKind, called_jaxpr, equation_numbers, kind_of, open_jaxpr


def held_layouts(jaxpr: jex.Jaxpr, interface: Interface, held: Sequence[Any]) -> list[SpecEntries | None]:
    """The layout of each variable of `held`; None where the plan leaves it to the compiler.

    A value inside a group of operations that the plan decides together has no layout of its own in the plan; it has
    that of an operand of the same shape.
    """
    numbers, shardings = equation_numbers(jaxpr), dict(interface.shardings)
    known: dict[Any, SpecEntries | None] = dict(zip(jaxpr.invars, interface.argument_entries, strict=True))
    for i, equation in enumerate(jaxpr.eqns):
        for slot, v in enumerate(equation.outvars):
            if isinstance(v, jex.DropVar):
                continue
            entries = _planned(equation, numbers[i], slot, shardings)
            if entries is None and kind_of(equation) is EquationKind.LEAF:
                alike = [o for o in equation.invars if not isinstance(o, jex.Literal) and o.aval.shape == v.aval.shape]
                entries = next((known[o] for o in alike if known.get(o) is not None), None)
            known[v] = entries
    return [known[v] for v in held]


def _planned(
    equation: jex.JaxprEqn, number: int, slot: int, shardings: Mapping[int, EquationShardings]
) -> SpecEntries | None:
    """What the plan says of a result; of a call, what it says of the equation inside that makes it."""
    if kind_of(equation) is not EquationKind.CALL:
        found = shardings.get(number)
        return None if found is None else dict(found.results).get(slot)
    inner = open_jaxpr(called_jaxpr(equation)[1])
    v = inner.outvars[slot]
    following = [number + 1 + n for n in equation_numbers(inner)]
    for n, nested in zip(following, inner.eqns, strict=True):
        if v in nested.outvars:
            return _planned(nested, n, nested.outvars.index(v), shardings)
    return None
