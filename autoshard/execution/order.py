"""Which equations must have read a weight before the next one does.

A forward pass that is computed again, only for what its result was multiplied with, has nothing that makes the backward
product with the same weight wait for it. XLA then does the backward product first and keeps what both need; and if the
weight is gathered for each of them, both copies are there at once.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from autoshard.graph.equation_plan import EquationPlan

_REACH = 256
"""How many equations after one it is looked for a second use: a layer has fewer. Farther uses are those of the forward
and the backward pass, of which the second waits for the first."""


def used_up_first(
    equations: Sequence[jex.JaxprEqn], numbers: Sequence[int], shardings: Mapping[int, EquationPlan]
) -> dict[int, list[Any]]:
    """For positions of equations, the variables that the equation must have read before the next one reads them: whose
    copy is then made again, or with which the next one multiplies the gradient of what it was multiplied with.

    Args:
      equations: Those of one jaxpr, in order. numbers: Of each. shardings: What the plan says, by equation number.
    """
    wanted = [shardings.get(number, EquationPlan()) for number in numbers]
    latest: dict[tuple[Any, Any], tuple[int, int]] = {}  # a variable and its layout -> who read it so, in which slot
    found: dict[int, list[Any]] = collections.defaultdict(list)
    for at, (equation, own) in enumerate(zip(equations, wanted, strict=True)):
        for slot, steps in own.operands:
            variable = equation.invars[slot]
            if isinstance(variable, jex.Literal):
                continue
            before = latest.get((variable, steps[-1]))
            if before is not None and at - before[0] <= _REACH:
                first = equations[before[0]]
                others = {v for s, v in enumerate(equation.invars) if s != slot and not isinstance(v, jex.Literal)}
                if slot in own.delayed or _is_backward(equations, before, (at, slot)):
                    if not _is_made_of(first.outvars, equations[before[0] + 1 : at], others):
                        found[before[0]].append(variable)
            latest[variable, steps[-1]] = at, slot
    return dict(found)


def _is_backward(equations: Sequence[jex.JaxprEqn], first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether the second of two (position, slot) is the backward product of the first, whose operand of this slot both
    have: the other operands, an activation and a gradient, are multiplied as well, for the gradient of this one.
    """
    (at, slot), (later, own) = first, second
    if any(equations[k].primitive.name != "dot_general" for k in (at, later)):
        return False
    others = [equations[at].invars[1 - slot], equations[later].invars[1 - own]]
    near = equations[at + 1 : later + _REACH]
    return any(e.primitive.name == "dot_general" and e.invars in (others, others[::-1]) for e in near)


def _is_made_of(sources: Sequence[Any], equations: Sequence[jex.JaxprEqn], wanted: set[Any]) -> bool:
    """Whether any of the variables `wanted` is one of `sources`, or is made of one by `equations`."""
    reached = set(sources)
    for equation in equations:
        if any(not isinstance(v, jex.Literal) and v in reached for v in equation.invars):
            reached.update(equation.outvars)
    return not reached.isdisjoint(wanted)
