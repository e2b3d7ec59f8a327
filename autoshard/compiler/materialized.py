"""Which results are stored before anything reads them.

A matrix product reads what is stored. Where what it reads is computed from a gathered copy of an operand, the compiler
stores the result for the product, computes it again from the copy for every other reader, and so keeps both.
"""

from autoshard.compiler.planned_graph import PlannedGraph
from autoshard.graph.computations import Computation, Instruction
from autoshard.graph.layout import SpecEntries


def materialized(planned: PlannedGraph, computation: Computation) -> dict[int, tuple[int, ...]]:
    """For equations, the slots of the results that a matrix product reads and that are made of a gathered copy."""
    read = {o for i in computation if i.name == "dot_general" for o in i.operands} - {None}
    found = {}
    for instruction in computation:
        slots = tuple(slot for slot, r in enumerate(instruction.results) if r in read)
        if slots and is_made_of_a_copy(planned, instruction):
            found[instruction.equation] = slots
    return found


def is_made_of_a_copy(planned: PlannedGraph, instruction: Instruction) -> bool:
    """Whether an equation that nests no program and is no matrix product reads an operand that is gathered for it."""
    if instruction.operation is None or instruction.name == "dot_general":
        return False
    reads = ((planned.layout_of(instruction, slot), steps[-1]) for slot, steps in planned.plan_of(instruction).operands)
    return any(lies is not None and _axes(lies) - _axes(wanted) for lies, wanted in reads)


def _axes(entries: SpecEntries) -> set[str]:
    return {axis for dim in entries for axis in dim}
