"""Which equations must have read a weight before the next one does.

A forward pass that is computed again, only for what its result was multiplied with, has nothing that makes the backward
product with the same weight wait for it. XLA then does the backward product first and keeps what both need; and if the
weight is gathered for each of them, both copies are there at once.
"""

import collections
from collections.abc import Sequence, Set

from autoshard.compiler.planned_graph import PlannedGraph
from autoshard.graph.computations import Computation, Instruction
from autoshard.graph.layout import SpecEntries

_REACH = 256
"""How many equations after one it is looked for a second use: a layer has fewer. Farther uses are those of the forward
and the backward pass, of which the second waits for the first."""


def used_up_first(planned: PlannedGraph, computation: Computation) -> dict[int, list[int]]:
    """For equations, the operand slots that the equation must have read before the next one reads the same: whose copy
    is then made again, or with which the next one multiplies the gradient of what it was multiplied with.
    """
    latest: dict[
        tuple[int | None, SpecEntries], tuple[int, int]
    ] = {}  # a value and its layout -> who read it, in which slot
    found: dict[int, list[int]] = collections.defaultdict(list)
    for at, instruction in enumerate(computation):
        plan = planned.plan_of(instruction)
        for slot, steps in plan.operands:
            value = instruction.operands[slot]
            before = latest.get((value, steps[-1]))
            if before is not None and at - before[0] <= _REACH:
                first = computation[before[0]]
                others = {o for s, o in enumerate(instruction.operands) if s != slot and o is not None}
                if slot in plan.delayed or _is_backward(computation, before, (at, slot)):
                    if not _is_made_of(first.results, computation[before[0] + 1 : at], others):
                        found[first.equation].append(before[1])
            latest[value, steps[-1]] = at, slot
    return dict(found)


def _is_backward(computation: Computation, first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether the second of two (position, slot) is the backward product of the first, whose operand of this slot both
    have: the other operands, an activation and a gradient, are multiplied as well, for the gradient of this one.
    """
    (at, slot), (later, own) = first, second
    if any(computation[k].name != "dot_general" for k in (at, later)):
        return False
    others = computation[at].operands[1 - slot], computation[later].operands[1 - own]
    near = computation[at + 1 : later + _REACH]
    return any(i.name == "dot_general" and i.operands in (others, others[::-1]) for i in near)


def _is_made_of(sources: Sequence[int | None], instructions: Sequence[Instruction], wanted: Set[int]) -> bool:
    """Whether any of the values `wanted` is one of `sources`, or is made of one by `instructions`."""
    reached = {*sources} - {None}
    for instruction in instructions:
        if not reached.isdisjoint(instruction.operands):
            reached.update(instruction.results)
    return not reached.isdisjoint(wanted)
