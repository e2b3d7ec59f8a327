"""Which products are made before what comes after them reads their operands.

XLA's schedule for least memory looks one step ahead: it puts off a product whose result takes more than the operands
that end with it, and gradients of weights can wait to the end of the step. Then their operands wait with them: for
that of an output layer, the gradient of all logits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from autoshard.planner.buffers import PRODUCTS, SUMS
from autoshard.planner.decisions import EquationShardings
from autoshard.trace.walk import nested_programs, open_jaxpr


def products_first(
    equations: Sequence[jex.JaxprEqn], numbers: Sequence[int], shardings: Mapping[int, EquationShardings]
) -> dict[int, list[Any]]:
    """For positions of products, the operand that other products may read only when the product is made.

    It is that which a product reads next, and the products are those that none after them depends on. A product whose
    result must be summed over devices is left alone: others would wait for the sum. So is one that a sum follows
    (`buffers.sums_in_place`): the compiler makes both in one kernel.

    Args:
      equations: Those of one jaxpr, in order. numbers: Of each. shardings: What the plan says, by equation number.
    """
    readers: dict[Any, list[jex.JaxprEqn]] = {}  # of each variable, the equations after the current one
    next_product: dict[Any, int] = {}  # of each variable, the first position after the current one
    awaited: set[Any] = set()  # what products after the current one are made of
    found: dict[int, list[Any]] = {}
    for at in range(len(equations) - 1, -1, -1):
        equation = equations[at]
        variables = [v for v in equation.invars if not isinstance(v, jex.Literal)]
        is_product = has_product(equation)
        is_awaited = not awaited.isdisjoint(equation.outvars)
        if equation.primitive.name == "dot_general" and not is_awaited:
            after = readers.get(equation.outvars[0], [])
            is_term = len(after) == 1 and after[0].primitive.name in SUMS
            later = [v for v in variables if v in next_product]
            wanted = shardings.get(numbers[at], EquationShardings())
            if later and not is_term and not _is_partial(equation, wanted):
                found[at] = [min(later, key=next_product.__getitem__)]
        if is_product or is_awaited:
            awaited.update(variables)
        for v in variables:
            readers.setdefault(v, []).append(equation)
            if is_product:
                next_product[v] = at
    return found


def has_product(equation: jex.JaxprEqn) -> bool:
    """Whether an equation is a product, or contains one."""
    if equation.primitive.name in PRODUCTS:
        return True
    return any(has_product(e) for nested in nested_programs(equation) for e in open_jaxpr(nested).eqns)


def _is_partial(equation: jex.JaxprEqn, wanted: EquationShardings) -> bool:
    """Whether each device makes only a part of the sum: a dimension that the product sums over is split.

    Operands that are not named are those that the program makes from nothing; the others tell how they are split.
    """
    (summed, _) = equation.params["dimension_numbers"]
    return any(steps[-1][dim] for slot, steps in wanted.operands for dim in summed[slot])
