"""Which results are stored before anything reads them.

A matrix product reads what is stored. Where what it reads is computed from a gathered copy of an operand, the compiler
stores the result for the product, computes it again from the copy for every other reader, and so keeps both. So it does
with rows that are looked up in a gathered parameter: the copy of the whole table would stay for the backward pass.
"""

from collections.abc import Mapping

from autoshard.compiler.planned_graph import PlannedGraph
from autoshard.graph.computations import Computation, Instruction
from autoshard.graph.layout import SpecEntries


def materialized(planned: PlannedGraph, computation: Computation) -> dict[int, tuple[int, ...]]:
    """For equations, the slots of the results that are made of a gathered copy, if a matrix product reads them or they
    are rows of a parameter."""
    read = {o for i in computation if i.name == "dot_general" for o in i.operands} - {None}
    made = {r: i for i in computation for r in i.results if r is not None}
    found = {}
    for instruction in computation:
        are_rows = instruction.name == "gather" and _is_of_argument(planned, made, instruction.operands[0])
        slots = tuple(slot for slot, r in enumerate(instruction.results) if r in read or are_rows)
        if slots and is_made_of_a_copy(planned, instruction):
            found[instruction.equation] = slots
    return found


def _is_of_argument(planned: PlannedGraph, made: Mapping[int, Instruction], value: int | None) -> bool:
    """Whether a value is an argument of the program or another form of one; `made`: who makes the values around it."""
    while value is not None and value in made:
        maker = made[value]
        if maker.operation is None or maker.operation.rule.is_heavy:
            return False
        operands = {o for o in maker.operands if o is not None}
        value = operands.pop() if len(operands) == 1 else None
    return any(a.value == value for a in planned.graph.arguments)


def is_made_of_a_copy(planned: PlannedGraph, instruction: Instruction) -> bool:
    """Whether an equation that nests no program and is no matrix product reads an operand that is gathered for it."""
    if instruction.operation is None or instruction.name == "dot_general":
        return False
    reads = ((planned.layout_of(instruction, slot), steps[-1]) for slot, steps in planned.plan_of(instruction).operands)
    return any(lies is not None and _axes(lies) - _axes(wanted) for lies, wanted in reads)


def _axes(entries: SpecEntries) -> set[str]:
    return {axis for dim in entries for axis in dim}
