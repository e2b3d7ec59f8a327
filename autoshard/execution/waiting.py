"""What waits for what in a program that runs under a plan, so that the compiler's order is the plan's."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from autoshard.execution.order import used_up_first
from autoshard.execution.products_first import CONVOLUTIONS, is_partial, is_reduced_alone, products_first
from autoshard.graph.equation_plan import EquationPlan
from autoshard.graph.layout import SpecEntries


def tied_after(
    equations: Sequence[jex.JaxprEqn],
    numbers: Sequence[int],
    shardings: Mapping[int, EquationPlan],
    axis_sizes: Mapping[str, int],
) -> dict[int, list[Any]]:
    """For positions of equations, the variables whose later readers wait for its results.

    Args:
      equations: Those of one jaxpr, in order. numbers: Of each. shardings: What the plan says, by equation number.
      axis_sizes: Of the mesh.
    """
    found = used_up_first(equations, numbers, shardings)
    for at, variables in products_first(equations, numbers, shardings, axis_sizes).items():
        known = found.setdefault(at, [])
        known += [v for v in variables if v not in known]
    return found


def tied_to_partial_sum(
    equation: jex.JaxprEqn,
    wanted: EquationPlan,
    layouts: Mapping[int, SpecEntries],
    tied: Sequence[Any],
    axis_sizes: Mapping[str, int],
) -> list[Any]:
    """Those of the variables `tied` that wait for what each device makes of a product, and not for the sum of it.

    Of a convolution these are all. Of a matrix product, those that it reads where they lie, since others' readers wait
    for no more than the copy; none if its sum is reduced alone, which is waited for.

    Args:
      equation: Any. wanted: What the plan says of it. layouts: In which its operands lie, by slot.
      tied: Variables whose later readers wait for it. axis_sizes: Of the mesh.
    """
    if equation.primitive.name in CONVOLUTIONS:
        return [*tied]
    if equation.primitive.name != "dot_general" or not is_partial(equation, wanted):
        return []
    if is_reduced_alone(equation, wanted, axis_sizes):
        return []
    read_as = {slot: steps[-1] for slot, steps in wanted.operands}
    in_place = {
        v
        for slot, v in enumerate(equation.invars)
        if not isinstance(v, jex.Literal) and (read_as.get(slot, layouts.get(slot)) == layouts.get(slot))
    }
    return [v for v in tied if v in in_place]
