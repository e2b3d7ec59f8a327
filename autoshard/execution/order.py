"""Which gathered copies must be used up before the same copy is made again.

A copy that is gathered for two uses far apart is made twice, so that it need not be kept. Where the first use is a
forward pass that is computed again, only to be multiplied with a gradient, nothing makes the second use wait for the
first, and both copies would be there at once.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from autoshard.planner.decisions import EquationShardings

_REACH = 256
"""How many equations after one it is looked for a second use: a layer has fewer. Farther uses are those of the forward
and the backward pass, of which the second waits for the first."""


def used_up_first(
    equations: Sequence[jex.JaxprEqn], numbers: Sequence[int], shardings: Mapping[int, EquationShardings]
) -> dict[int, list[Any]]:
    """For positions of equations, the variables whose copies the equation must use up before they are made again.

    Args:
      equations: Those of one jaxpr, in order. numbers: Of each. shardings: What the plan says, by equation number.
    """
    wanted = [shardings.get(number, EquationShardings()) for number in numbers]
    latest: dict[tuple[Any, Any], int] = {}  # a variable and its layout -> the position that read it so
    found: dict[int, list[Any]] = collections.defaultdict(list)
    for at, (equation, own) in enumerate(zip(equations, wanted, strict=True)):
        for slot, steps in own.operands:
            variable = equation.invars[slot]
            if isinstance(variable, jex.Literal):
                continue
            before = latest.get((variable, steps[-1]))
            if slot in own.again and before is not None and at - before <= _REACH:
                others = {v for s, v in enumerate(equation.invars) if s != slot and not isinstance(v, jex.Literal)}
                if not _is_made_of(equations[before].outvars, equations[before + 1 : at], others):
                    found[before].append(variable)
            latest[variable, steps[-1]] = at
    return dict(found)


def _is_made_of(sources: Sequence[Any], equations: Sequence[jex.JaxprEqn], wanted: set[Any]) -> bool:
    """Whether any of the variables `wanted` is one of `sources`, or is made of one by `equations`."""
    reached = set(sources)
    for equation in equations:
        if any(not isinstance(v, jex.Literal) and v in reached for v in equation.invars):
            reached.update(equation.outvars)
    return not reached.isdisjoint(wanted)
