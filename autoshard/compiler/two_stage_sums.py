"""Which sums of columns are made in two stages, so that many threads share a long one.

XLA:GPU sums a column by one block, whose warps each take every 32nd row, one after another; the last dimension is the
only one that blocks share (`ColumnReductionFusion`). Only columns of more than `MOST_ROWS` rows are split. Where such a
sum is one kernel with what makes or shares its operand, as of a bias or of a norm's scale in the backward pass, a
thread does the work of all its rows: on an H100, 128 steps took 63 to 110 us where the bytes of the kernel take 13 to
20 (`benchmarks/results/gpu-steps.md`, `KernelForms.stored_column_step_s`).

In two stages the first sums `FIRST_ROWS` rows at most, with as many more blocks, and the second the few sums that are
left. The compiler would make one sum of both again, were there no barrier between them.
"""

import math

from autoshard.compiler.planned_graph import PlannedGraph
from autoshard.cost.compute import MOST_ROWS
from autoshard.graph.computations import Computation, Instruction
from autoshard.graph.equation_plan import SumStage

FIRST_ROWS = 256
"""What the first stage sums at most: eight steps of 32 rows take less than the bytes of what they are made of."""

_LEAST_ROWS = 1024
"""Shorter columns are summed at once: a second kernel would cost what it gains."""


def is_in_stages(num_rows: float) -> bool:
    """Whether columns of so many rows are summed in two stages."""
    return _LEAST_ROWS <= num_rows <= MOST_ROWS


def two_stage_sums(planned: PlannedGraph, computation: Computation) -> dict[int, tuple[SumStage, ...]]:
    """For sums of long columns, by equation, what is summed first."""
    found = {}
    for instruction in computation:
        if instruction.name == "reduce_sum" and instruction.operation is not None:
            first = _first_stage(planned, instruction)
            if first:
                found[instruction.equation] = first
    return found


def _first_stage(planned: PlannedGraph, instruction: Instruction) -> tuple[SumStage, ...]:
    """What of a sum is summed first: of the dimensions that it sums, the minor ones; nothing if it is made at once."""
    operation = instruction.leaf
    read_as = {slot: steps[-1] for slot, steps in planned.plan_of(instruction).operands}
    entries = read_as.get(0, planned.layout_of(instruction, 0))
    if entries is None or not operation.rule.operands:
        return ()
    factors, sizes = operation.rule.factors, planned.axis_sizes
    shape = planned.graph.values[instruction.operand(0)].shape
    local = [size // math.prod(sizes[a] for a in axes) for size, axes in zip(shape, entries, strict=True)]
    dims = operation.rule.operands[0]
    summed = [bool(dim) and all(factors[f].reduction is not None for f in dim) for dim in dims]
    extended = [d for d, size in enumerate(shape) if size > 1]
    rows = [d for d in extended if summed[d]]
    if not rows or summed[extended[-1]] or not is_in_stages(math.prod(local[d] for d in rows)):
        return ()
    stages, room = [], FIRST_ROWS
    for d in reversed(rows):
        num_first = max(n for n in range(1, min(room, local[d]) + 1) if local[d] % n == 0)
        if num_first > 1:
            stages.append(SumStage(d, num_first))
        room //= num_first
        if num_first < local[d]:
            break
    return tuple(stages[::-1])
