"""The numbers that stand in a program, such as what a mean is divided by."""

from collections.abc import Collection, Iterator
from typing import Any

import jax.extend.core as jex
import numpy as np

from autoshard.trace.walk import nested_programs, open_jaxpr, variables


def literals_of(program: jex.ClosedJaxpr) -> tuple[tuple[str, str], ...]:
    """Every number on which the results of a program depend, behind the primitive that reads it; in program order.

    Numbers that only decide what nobody reads are left out, but for those within nested programs.
    """
    return tuple(_literals(open_jaxpr(program), frozenset(variables(open_jaxpr(program).outvars))))


def _literals(jaxpr: jex.Jaxpr, needed: Collection[Any]) -> Iterator[tuple[str, str]]:
    wanted, equations = set(needed), []
    for equation in reversed(jaxpr.eqns):
        if wanted.intersection(equation.outvars):
            wanted.update(variables(equation.invars))
            equations.append(equation)
    for equation in reversed(equations):
        name = equation.primitive.name
        yield from ((name, repr(np.asarray(v.val).tolist())) for v in equation.invars if isinstance(v, jex.Literal))
        for nested in nested_programs(equation):
            inner = open_jaxpr(nested)
            yield from _literals(inner, frozenset(variables(inner.outvars)))
    yield from (("", repr(np.asarray(v.val).tolist())) for v in jaxpr.outvars if isinstance(v, jex.Literal))
