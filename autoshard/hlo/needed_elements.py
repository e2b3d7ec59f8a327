"""How many elements of each value in a fusion are needed: XLA:GPU computes only those that its results are made of.

So a fusion that takes rows of a table, or a slice of an array, reads no more of it, whatever it does to the elements
on the way: a table in float32 that is rounded and then looked up is read at the rows that are looked up.
"""

import collections
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from autoshard.hlo.module import Computation, Instruction

_WINDOW = re.compile(r"\bwindow=\{size=([\dx]+)")
SLICES = ("dynamic-slice", "slice", "gather")
"""What takes elements of its first operand at other places than those of its own."""
UPDATES = ("dynamic-update-slice", "scatter")
"""What changes elements of its first operand, in place where that is returned."""
_ELEMENT_FOR_ELEMENT = frozenset(
    "abs add and atan2 bitcast bitcast-convert broadcast cbrt ceil clamp compare complex convert copy cosine "
    "divide erf exponential exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum "
    "multiply negate not or pad popcnt power real reduce-precision remainder reshape reverse round-nearest-afz "
    "round-nearest-even rsqrt select shift-left shift-right-arithmetic shift-right-logical sign sine sqrt "
    "subtract tan tanh transpose xor".split()
)
"""What needs an element of each operand, or the only one, for an element of its own."""


def returned_by(body: Computation) -> list[Instruction]:
    """What a fusion returns."""
    root = body.instructions[body.root]
    return [body.instructions[o] for o in root.operands] if root.opcode == "tuple" else [root]


def size_of(instruction: Instruction) -> int:
    """Elements of all arrays of the result."""
    return sum(math.prod(a.dims) for a in instruction.result)


def needed_elements(body: Computation, roots: Sequence[Instruction]) -> Mapping[str, float]:
    """By name, how many elements of each value are needed for what a fusion returns.

    What several slices take of a value adds up; what is computed of its elements in several ways needs them once.

    Args:
      body: The computation. roots: What it returns; an update among them is done in place.
    """
    sliced: dict[str, float] = collections.defaultdict(float)
    whole: dict[str, float] = collections.defaultdict(float)
    needed: dict[str, float] = {}
    returned = {r.name for r in roots}
    for instruction in reversed(tuple(body.instructions.values())):
        own = size_of(instruction)
        count = min(own, sliced[instruction.name] + whole[instruction.name])
        is_update = instruction.opcode in UPDATES and instruction.name in returned
        needed[instruction.name] = count = own if instruction.name in returned else count
        for slot, (operand, elements) in enumerate(_of_operands(body, instruction, count)):
            if is_update and slot == 0:
                continue
            if slot == 0 and instruction.opcode in SLICES:
                sliced[operand.name] += elements
            else:
                whole[operand.name] = max(whole[operand.name], elements)
    return needed


def _of_operands(body: Computation, instruction: Instruction, count: float) -> Iterator[tuple[Instruction, float]]:
    """Each operand, and how many of its elements `count` elements of the result need."""
    share = count / max(size_of(instruction), 1)
    for slot, name in enumerate(instruction.operands):
        operand = body.instructions.get(name)
        if operand is None:
            continue
        size = size_of(operand)
        if instruction.opcode in _ELEMENT_FOR_ELEMENT or (slot == 0 and instruction.opcode in (*SLICES, *UPDATES)):
            yield operand, min(size, count)
        elif instruction.opcode in ("reduce", "concatenate"):
            yield operand, size * share
        else:
            yield operand, size if count else 0.0


def evaluations(body: Computation, roots: Sequence[Instruction]) -> Mapping[str, float]:
    """By name, how many elements of each value a native kernel computes: again for every window that one is in, but
    once for all readers of the same place.
    """
    counts: dict[str, float] = collections.defaultdict(float)
    for root in roots:
        counts[root.name] = size_of(root)
    for instruction in reversed(tuple(body.instructions.values())):
        count, of_window = counts[instruction.name], window_size(instruction)
        for operand, elements in _of_operands(body, instruction, count):
            again = elements if instruction.opcode in ("reduce", "concatenate") else count * of_window
            counts[operand.name] = max(counts[operand.name], again)
    return counts


def window_size(instruction: Instruction) -> int:
    """Elements of the window of a windowed reduction; 1 for anything else."""
    found = _WINDOW.search(instruction.attributes) if instruction.opcode == "reduce-window" else None
    return math.prod(map(int, found.group(1).split("x"))) if found else 1
