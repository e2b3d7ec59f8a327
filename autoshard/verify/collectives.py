"""The collectives of a compiled program: kind, mesh axes, bytes on the wire, and where in the program they come from."""

import dataclasses
import re
from collections.abc import Iterator, Sequence

import numpy as np

from autoshard.errors import VerificationError
from autoshard.verify.hlo import Array, Computation, HloModule, Instruction
from autoshard.verify.replica_groups import axes_of, replica_groups, source_target_pairs

_KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)
_EQUATION = re.compile(r"\beqn(\d+)\b")
_SCHEDULED = 4
"""How many instructions a collective's origin is looked for, upwards and downwards."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledCollective:
    """A collective that the compiler emitted.

    Attributes:
      kind: Its HLO opcode, without `-start`.
      axes: Names of the mesh axes along which its groups extend.
      num_devices: Devices in a group.
      wire_bytes: Bytes that a device sends in one step, by the ring algorithm (see `cost/collectives.py`), with all
        repetitions in loops.
      times: How often it runs in a step.
      arrays: What one device puts in.
      equations: Numbers of the planned program's equations that it serves; empty if the compiler does not tell.
      name: The instruction's name in the compiled program.
    """

    kind: str
    axes: tuple[str, ...]
    num_devices: int
    wire_bytes: float
    times: float
    arrays: tuple[Array, ...]
    equations: tuple[int, ...]
    name: str


def compiled_collectives(module: HloModule, axes: Sequence[tuple[str, int]]) -> tuple[CompiledCollective, ...]:
    """All collectives of `module`, compiled for a mesh with `axes` (name, size), major to minor."""
    return tuple(
        c for computation, instruction, times in module.runs() for c in _read(module, computation, instruction, times, axes)
    )


def _read(
    module: HloModule, computation: Computation, instruction: Instruction, times: float, axes: Sequence[tuple[str, int]]
) -> Iterator[CompiledCollective]:
    kind = instruction.opcode.removesuffix("-start")
    if kind not in _KINDS or instruction.opcode.endswith("-done"):
        return
    shape = [n for _, n in axes]
    if kind == "collective-permute":
        groups = source_target_pairs(instruction.attributes)
        size = 2 if len(groups) else 1
    else:
        groups = replica_groups(instruction.attributes, int(np.prod(shape)))
        size = groups.shape[1]
    if size == 1:
        return
    operands = [o for o in instruction.operands if o in computation.instructions]
    if len(operands) != len(instruction.operands):
        raise VerificationError(f"The operands of {instruction.name} must be instructions of {computation.name}.")
    arrays = tuple(a for o in operands for a in computation.instructions[o].result)
    own_bytes = sum(a.size_bytes for a in arrays)
    yield CompiledCollective(
        kind,
        tuple(axes[a][0] for a in axes_of(groups, shape)),
        size,
        sent_bytes(kind, size, own_bytes) * times,
        times,
        arrays,
        _equations(module, computation, instruction),
        instruction.name,
    )


def sent_bytes(kind: str, num_devices: int, operand_bytes: float) -> float:
    """Bytes that each device sends, as the ring algorithms of `cost/collectives.py` do, given those it puts in."""
    match kind:
        case "all-gather":
            return (num_devices - 1) * operand_bytes
        case "all-reduce":
            return 2 * (num_devices - 1) / num_devices * operand_bytes
        case "collective-permute" | "collective-broadcast":
            return operand_bytes
        case _:
            return (num_devices - 1) / num_devices * operand_bytes


def _equations(module: HloModule, computation: Computation, instruction: Instruction) -> tuple[int, ...]:
    """The equations that a collective serves: its own, or else those that make what it moves, or read its result."""
    if own := _named(module, instruction):
        return own
    found: dict[int, None] = {}
    front = [computation.instructions[o] for o in instruction.operands]
    for _ in range(_SCHEDULED):
        unknown = []
        for producer in front:
            numbers = _named(module, producer)
            found.update(dict.fromkeys(numbers))
            if not numbers:
                unknown += [computation.instructions[o] for o in producer.operands if o in computation.instructions]
        front = unknown
    return tuple(found)


def _named(module: HloModule, instruction: Instruction) -> tuple[int, ...]:
    """The equations that the names of an instruction, or of the roots of what it calls, tell."""
    names = [instruction.op_name]
    if instruction.opcode == "fusion":
        for callee in instruction.called:
            body = module.computations[callee]
            names += [body.instructions[body.root].op_name] if body.root else []
    numbers = (_EQUATION.findall(name) for name in names)
    return tuple(dict.fromkeys(int(n[-1]) for n in numbers if n))
