"""What makes a fusion of XLA:GPU slower than its bytes: rows that are reduced on the way, and columns that few threads
sum, one row after another (`cost/compute.py` prices both).
"""

import dataclasses
import math
import re
from collections.abc import Sequence

from autoshard.cost.compute import COLUMN_ROWS, LONG_ROW
from autoshard.hlo.module import Computation, HloModule, Instruction
from autoshard.hlo.needed_elements import evaluations, returned_by, size_of, window_size

_TRITON = '"__triton"'
"""The kind of fusion that XLA:GPU makes of rows and their reductions (`SoftmaxRewriterTriton`)."""
SHORT_ROW = 8
"""Elements. Of what an H100 transposed in kernels of their own, rows of 4 took 4.1 times as long as their bytes, and
rows of 64 and more 0.9 to 1.1 times (`benchmarks/results/gpu-steps.md`)."""
_NAMES = ("bitcast", "reshape", "convert", "copy")
_DIMENSIONS = re.compile(r"\bdimensions=\{([\d,]*)\}")


@dataclasses.dataclass(frozen=True, slots=True)
class ColumnSteps:
    """How a fusion sums columns.

    Attributes:
      steps: Of each thread, down the rows. is_storing: Whether something is stored for each element, too.
      window_additions: In each step, those of windowed sums that are computed inside.
    """

    steps: int
    is_storing: bool
    window_additions: float


def row_passes(module: HloModule, instruction: Instruction) -> int:
    """How many reductions of long rows wait for each other in a kernel that takes exponentials of them; else 0."""
    if instruction.opcode != "fusion" or _TRITON not in instruction.attributes:
        return 0
    body = module.computations[instruction.called[0]]
    passes: dict[str, int] = {}
    rows: set[int] = set()
    for inner in body.instructions.values():
        passes[inner.name] = max((passes[o] for o in inner.operands if o in passes), default=0)
        if inner.opcode == "reduce" and _row_length(body, inner) > LONG_ROW:
            passes[inner.name] += 1
            rows.add(size_of(body.instructions[inner.operands[0]]))
    takes_exponentials = any(i.opcode == "exponential" and size_of(i) in rows for i in body.instructions.values())
    return passes[body.root] if takes_exponentials else 0


def column_steps(module: HloModule, instruction: Instruction) -> ColumnSteps | None:
    """How a fusion sums columns; None for one that does not."""
    if instruction.opcode != "fusion":
        return None
    body = module.computations[instruction.called[0]]
    roots = [_behind_names(body, r) for r in returned_by(body)]
    columns = [r for r in roots if r.opcode == "reduce" and _summed_rows(body, r) > COLUMN_ROWS]
    if not columns:
        return None
    longest = max(columns, key=lambda r: _summed_rows(body, r))
    elements = size_of(body.instructions[longest.operands[0]])
    window_additions = math.fsum(
        count * window_size(body.instructions[name])
        for name, count in evaluations(body, roots).items()
        if body.instructions[name].opcode == "reduce-window"
    )
    return ColumnSteps(
        math.ceil(_summed_rows(body, longest) / COLUMN_ROWS),
        any(size_of(r) >= elements for r in roots),
        window_additions / elements,
    )


def stores_short_rows(module: HloModule, instruction: Instruction) -> bool:
    """Whether a fusion stores rows of fewer than `SHORT_ROW` elements of what lies in another order of dimensions.

    XLA:GPU transposes longer ones tile by tile (`kInput` fusions), and these element by element.
    """
    if instruction.opcode != "fusion" or "kind=kLoop" not in instruction.attributes:
        return False
    body = module.computations[instruction.called[0]]
    return any(_has_short_rows(body, _behind_names(body, root)) for root in returned_by(body))


def _has_short_rows(body: Computation, root: Instruction) -> bool:
    """Whether an instruction makes other rows than it reads, short ones, by a transposition."""
    if root.opcode != "transpose" or root.operands[0] not in body.instructions:
        return False
    (made,), (read, *_) = root.result, body.instructions[root.operands[0]].result
    order = _DIMENSIONS.search(root.attributes)
    before = [int(d) for d in order.group(1).split(",") if d] if order else []
    if not before or made.dims[made.innermost] >= SHORT_ROW:
        return False
    return before[made.innermost] != read.innermost % len(read.dims)


def _behind_names(body: Computation, instruction: Instruction) -> Instruction:
    """What an instruction gives another name or type to."""
    while instruction.opcode in _NAMES and instruction.operands[0] in body.instructions:
        instruction = body.instructions[instruction.operands[0]]
    return instruction


def _reduced(body: Computation, reduce: Instruction) -> tuple[Sequence[int], Sequence[int]]:
    """The extents above 1 of a reduction's operand, and which of these it reduces."""
    dims = body.instructions[reduce.operands[0]].result[0].dims
    found = _DIMENSIONS.search(reduce.attributes)
    listed = {int(d) for d in found.group(1).split(",") if d} if found else set()
    kept = [d for d, size in enumerate(dims) if size > 1]
    return [dims[d] for d in kept], [n for n, d in enumerate(kept) if d in listed]


def _row_length(body: Computation, reduce: Instruction) -> int:
    """Of a reduction of the last dimensions, and no others, how many elements it reduces to one; else 0."""
    dims, reduced = _reduced(body, reduce)
    is_of_rows = bool(reduced) and list(reduced) == list(range(len(dims) - len(reduced), len(dims)))
    return math.prod(dims[d] for d in reduced) if is_of_rows else 0


def _summed_rows(body: Computation, reduce: Instruction) -> int:
    """Of a reduction that keeps the last dimension, how many elements it reduces to one; else 0."""
    dims, reduced = _reduced(body, reduce)
    return math.prod(dims[d] for d in reduced) if reduced and len(dims) - 1 not in reduced else 0
