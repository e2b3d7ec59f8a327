"""Kernels of convolutions that are turned round only when they lie as the convolution reads them.

The gradient of a convolution's image is a convolution with the kernel turned round. cuDNN makes it from the kernel as
it is, and steps over the zeros between the elements of a strided one's gradient; XLA:GPU asks it for that only where
nothing is between the turning and the convolution. With a gather in between it stores the turned kernel, fills the
gradient up with zeros, and multiplies these as well: four times the operations at a stride of two, which is not priced.
"""

import dataclasses

from autoshard.compiler.planned_graph import PlannedGraph
from autoshard.graph.computations import Computation, Instruction
from autoshard.graph.equation_plan import EquationPlan
from autoshard.graph.layout import SpecEntries


def turned_where_read(planned: PlannedGraph, computation: Computation) -> dict[int, EquationPlan]:
    """What a plan then says of the turning of such kernels and of the convolutions, by equation: moved is what the
    turned kernel is made of, on the way that another reader has it moved to the same layout, if there is one.

    Nothing where others read the turned kernel, or where it is not moved.

    `computation`: One of the graph's.
    """
    readers: dict[int | None, list[tuple[Instruction, int]]] = {}
    for instruction in computation:
        for slot, o in enumerate(instruction.operands):
            readers.setdefault(o, []).append((instruction, slot))
    found: dict[int, EquationPlan] = {}
    for turning in computation:
        reading = readers.get(turning.results[0], []) if turning.name == "rev" else []
        if len(reading) != 1 or reading[0][0].name != "conv_general_dilated":
            continue
        (convolution, slot), plan = reading[0], planned.plan_of(turning)
        own = found.get(convolution.equation, planned.plan_of(convolution))
        steps = dict(own.operands).get(slot)
        if steps is None or steps[-1] == dict(plan.results).get(0) or _splits_turned(turning, steps):
            continue
        ways = [dict(planned.plan_of(r).operands).get(s, ()) for r, s in readers[turning.operand(0)]]
        known = next((way for way in ways if way and way[-1] == steps[-1]), None)
        path = known or (*dict(plan.operands).get(0, ()), *steps)
        found[turning.equation] = dataclasses.replace(plan, operands=((0, path),), results=((0, steps[-1]),))
        found[convolution.equation] = dataclasses.replace(
            own,
            operands=tuple((s, (path[-1],) if s == slot else to) for s, to in own.operands),
            delayed=tuple(s for s in own.delayed if s != slot),
        )
    return found


def _splits_turned(turning: Instruction, steps: tuple[SpecEntries, ...]) -> bool:
    """Whether a dimension that is turned round is split on the way; these alone have no factors."""
    whole = [d for d, dim in enumerate(turning.leaf.rule.results[0]) if not dim]
    return any(entries[d] for entries in steps for d in whole)
