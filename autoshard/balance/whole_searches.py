"""Places of extremes (`argmax`, `argmin`) where devices have shares: each is sought in a whole value.

A plan may have every device search its part (`execution/extreme_places.py`), which counts on parts of one size. Where
shares move, the part of one device is not where it would be in the whole, so that the value is gathered first.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from autoshard.balance.sharded_ops import stored_layouts
from autoshard.graph.equation_plan import EquationPlan
from autoshard.graph.graph import PLACES, Graph, OperationKind
from autoshard.graph.layout import SpecEntries


def searching_whole(
    graph: Graph, plans: Mapping[int, EquationPlan], arguments: Sequence[SpecEntries]
) -> dict[int, EquationPlan]:
    """What a plan says of each equation, but that places are sought in whole values.

    Args:
      graph: The program. plans: What the plan says of each equation. arguments: The layouts of its arguments.
    """
    found, stored = dict(plans), stored_layouts(graph, plans, arguments)
    for operation in graph.operations:
        (value, *_) = operation.operands or (None,)
        if operation.name not in PLACES or operation.kind is not OperationKind.EQUATION or value not in stored:
            continue
        plan = found.get(operation.equation, EquationPlan())
        steps = dict(plan.operands).get(0, (stored[value],))
        rule = operation.rule
        is_searched = [any(rule.factors[f].reduction is not None for f in dim) for dim in rule.operands[0]]
        whole = tuple(() if own else axes for own, axes in zip(is_searched, steps[-1], strict=True))
        if whole != steps[-1]:
            found[operation.equation] = dataclasses.replace(plan, operands=((0, (whole,)),))
    return found
