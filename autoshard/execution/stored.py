"""Which results are stored before anything reads them.

A matrix product reads what is stored. Where what it reads is computed from a gathered copy of an operand, the compiler
stores the result for the product, computes it again from the copy for every other reader, and so keeps both.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from autoshard.graph.equation_plan import EquationPlan
from autoshard.graph.layout import SpecEntries
from autoshard.trace.walk import EquationKind, kind_of


def read_by_products(equations: Sequence[jex.JaxprEqn]) -> frozenset[Any]:
    """The variables that matrix products read."""
    return frozenset(
        v
        for equation in equations
        if equation.primitive.name == "dot_general"
        for v in equation.invars
        if not isinstance(v, jex.Literal)
    )


def is_made_of_a_copy(equation: jex.JaxprEqn, layouts: Mapping[int, SpecEntries], wanted: EquationPlan) -> bool:
    """Whether an equation that nests no program and is no product itself reads an operand that is gathered for it.

    Args:
      equation: Any. layouts: Those of its operands that are known, by slot. wanted: What the plan says of it.
    """
    if kind_of(equation) is not EquationKind.LEAF or equation.primitive.name == "dot_general":
        return False
    axes = lambda entries: {axis for dim in entries for axis in dim}
    return any(slot in layouts and axes(layouts[slot]) - axes(steps[-1]) for slot, steps in wanted.operands)
