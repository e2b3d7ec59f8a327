"""Counters in the mutable state: whole numbers to which every micro-batch adds the same, whatever its examples are.

Flax NNX draws random numbers by them. A pipeline can begin where those before it will have ended, without waiting for
them, so that pipelines side by side draw what micro-batches in turn draw.
"""

from collections.abc import Mapping
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from autoshard.pipelines.split.forward import Forward
from autoshard.trace.walk import EquationKind, called_jaxpr, called_operands, kind_of, open_jaxpr, scan_counts

_Sum = tuple[Any, int]
"""A variable, and what is added to it."""


def added_to_mutable(forward: Forward) -> tuple[int | None, ...]:
    """For each leaf of the mutable state, what a micro-batch adds: 0 if it stays, None if it changes otherwise."""
    sums = _sums(forward.jaxpr)
    found = []
    for before, after in zip(forward.mutable_vars, forward.mutable_outs, strict=True):
        base, added = (None, 0) if isinstance(after, jex.Literal) else sums.get(after, (after, 0))
        found.append(added if base is before else None)
    return tuple(found)


def _sums(jaxpr: jex.Jaxpr) -> Mapping[Any, _Sum]:
    """The variables of a program that are whole numbers added to one of its inputs, and inputs handed on."""
    found: dict[Any, _Sum] = {}

    def of(v: Any) -> _Sum | None:
        return None if isinstance(v, jex.Literal) else found.get(v, (v, 0))

    for equation in jaxpr.eqns:
        for result, sum_of in zip(equation.outvars, _results(equation), strict=True):
            outer = None if sum_of is None else of(equation.invars[sum_of[0]])
            if outer is not None and sum_of is not None:
                found[result] = outer[0], outer[1] + sum_of[1]
    return found


def _results(equation: jex.JaxprEqn) -> list[tuple[int, int] | None]:
    """For each result of an equation that is a sum: the position of the operand that it is a sum of, and what is
    added."""
    match kind_of(equation):
        case EquationKind.LEAF:
            return [_added(equation)] * len(equation.outvars)
        case EquationKind.CALL:
            called = called_jaxpr(equation)
            assert called is not None  # it is a call
            inner = open_jaxpr(called[1])
            positions = dict(zip(inner.invars, called_operands(equation, range(len(equation.invars))), strict=True))
            return _positioned(inner, positions)
        case EquationKind.SCAN:
            inner = open_jaxpr(equation.params["jaxpr"])
            first, num_carried = scan_counts(equation)
            positions = {v: n for n, v in enumerate(inner.invars)}
            results = _positioned(inner, positions)
            carried = [
                (r[0], r[1] * equation.params["length"]) if r is not None and r[0] == first + k else None
                for k, r in enumerate(results[:num_carried])
            ]
            # of what is stacked, each slice is a sum of the slice that was read, if it was read in the same order
            scanned = [r if r is not None and r[0] >= first + num_carried else None for r in results[num_carried:]]
            return carried + scanned
        case _:
            return [None] * len(equation.outvars)


def _positioned(inner: jex.Jaxpr, positions: Mapping[Any, int]) -> list[tuple[int, int] | None]:
    """`_results` of a program within an equation, of whose operands the inputs have these positions."""
    sums = _sums(inner)
    found = [None if isinstance(v, jex.Literal) else sums.get(v, (v, 0)) for v in inner.outvars]
    return [None if own is None or own[0] not in positions else (positions[own[0]], own[1]) for own in found]


def _added(equation: jex.JaxprEqn) -> tuple[int, int] | None:
    """The operand and what is added to it, of an equation that adds a constant to a whole number."""
    if equation.primitive.name not in ("add", "sub"):
        return None
    constants = {n: np.asarray(v.val) for n, v in enumerate(equation.invars) if isinstance(v, jex.Literal)}
    if len(constants) != 1:
        return None
    ((place, value),) = constants.items()
    is_turned = equation.primitive.name == "sub" and place == 0
    if value.ndim or is_turned or not jnp.issubdtype(value.dtype, jnp.integer):
        return None
    return 1 - place, int(value) if equation.primitive.name == "add" else -int(value)
