"""The collectives of a compiled program: kind, mesh axes, bytes on the wire, and where they come from."""

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from autoshard.cluster import CollectiveKind
from autoshard.cost.collectives import sent_share
from autoshard.errors import VerificationError
from autoshard.hlo.module import Array, Computation, HloModule, Instruction, Run
from autoshard.hlo.replica_groups import axes_of, replica_groups, source_target_pairs

_KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)
LIKE = {"ragged-all-to-all": "all-to-all", "collective-broadcast": "collective-permute"}
"""What kinds that no plan has are counted as."""
_EQUATION = re.compile(r"\beqn(\d+)\b")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_SAME = ("bitcast", "reshape", "copy", "transpose", "get-tuple-element", "convert", "copy-start", "copy-done")
"""What hands on all of its operand."""
_REACH = 4
"""How many instructions upwards the origin of what a collective moves is looked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """One array that a collective moves; the compiler joins several collectives into one.

    Attributes:
      array: What one device puts in.
      wire_bytes: Bytes that a device sends for it each time, by the ring algorithm (`cost/collectives.py`).
      equations: Numbers of the planned program's equations that it serves; empty if the compiler does not tell.
      argument: Path of the argument that it is made of, where the compiler tells that instead.
    """

    array: Array
    wire_bytes: float
    equations: tuple[int, ...]
    argument: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledCollective:
    """A collective that the compiler emitted.

    Attributes:
      kind: Its HLO opcode, without `-start`; `reduce-scatter` also for a fused all-reduce that is sliced at once.
      axes: Names of the mesh axes along which its groups extend.
      num_devices: Devices in a group.
      times: How often it runs in a step.
      pieces: What it moves.
      name: The instruction's name in the compiled program.
      only_sliced: Whether all that reads its result are slices, so that most of it was moved in vain.
      groups: The positions in the mesh (row-major) that take part together, int [groups, devices in each]; of a
        permutation, who sends to whom.
    """

    kind: str
    axes: tuple[str, ...]
    num_devices: int
    times: float
    pieces: tuple[Piece, ...]
    name: str
    only_sliced: bool = False
    groups: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 2), int), compare=False, repr=False)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in one step, with all repetitions in loops."""
        return sum(p.wire_bytes for p in self.pieces) * self.times


def compiled_collectives(module: HloModule, axes: Sequence[tuple[str, int]]) -> tuple[CompiledCollective, ...]:
    """All collectives of `module`, compiled for a mesh with `axes` (name, size), major to minor."""
    found, channels = [], set()
    for run in module.runs(fused=True):
        kind = run.instruction.opcode.removesuffix("-start")
        if kind not in _KINDS or not run.times:
            continue
        if run.caller is not None and run.caller.instruction.opcode == "fusion":
            # XLA:TPU repeats an asynchronous collective in every fusion that it lies behind, under one channel
            channel = channel_of(run.instruction)
            if channel and channel in channels:
                continue
            channels.add(channel)
            if kind == "all-reduce" and _is_sliced_at_once(run.computation, run.instruction):
                kind = "reduce-scatter"
        if (collective := _read(module, run, kind, axes)) is not None:
            found.append(collective)
    return tuple(found)


def channel_of(instruction: Instruction) -> str:
    """The number of the channel that a collective uses; empty for none."""
    found = _CHANNEL.search(instruction.attributes)
    return found.group(1) if found else ""


def _read(module: HloModule, run: Run, kind: str, axes: Sequence[tuple[str, int]]) -> CompiledCollective | None:
    instruction, computation = run.instruction, run.computation
    shape = [n for _, n in axes]
    if kind == "collective-permute":
        groups = source_target_pairs(instruction.attributes)
        size = 2 if len(groups) else 1
    else:
        groups = replica_groups(instruction.attributes, int(np.prod(shape)))
        size = groups.shape[1]
    if size == 1:
        return None
    operands = [o for o in instruction.operands if o in computation.instructions]
    if len(operands) != len(instruction.operands):
        raise VerificationError(f"The operands of {instruction.name} must be instructions of {computation.name}.")
    pieces = [
        Piece(a, _sent_bytes(kind, size, a.size_bytes), *_origin(module, run, made))
        for o in operands
        for made in _parts(module, run.operand(o) or Run(computation, computation.instructions[o], run.times, None))
        for a in made.instruction.result
    ]
    if kind == "all-to-all" and len(pieces) > 1:  # its operands are the parts of one array, one for each device
        whole = Array(pieces[0].array.dtype, (len(pieces), *pieces[0].array.dims))
        pieces = [dataclasses.replace(pieces[0], array=whole, wire_bytes=sum(p.wire_bytes for p in pieces))]
    return CompiledCollective(
        kind,
        tuple(axes[a][0] for a in axes_of(groups, shape)),
        size,
        run.times,
        tuple(pieces),
        instruction.name,
        kind == "all-gather" and _only_sliced(module, computation, instruction.name),
        groups,
    )


def _parts(module: HloModule, made: Run) -> list[Run]:
    """What a collective's operand is put together from; itself if it is one piece.

    The compiler joins collectives by moving several arrays, or one that is made of them end to end.
    """
    whole = made
    for _ in range(_REACH):
        instruction = made.instruction
        if instruction.opcode == "fusion":
            body = module.computations[instruction.called[0]]
            made = Run(body, body.instructions[body.root], made.times, made)
        elif instruction.opcode in _SAME and instruction.opcode != "get-tuple-element":
            inner = made.operand(instruction.operands[0])
            if inner is None:
                break
            made = inner
        else:
            break
    parts = [made.operand(o) for o in made.instruction.operands] if made.instruction.opcode == "concatenate" else []
    known = [p for p in parts if p is not None]
    return known if known and len(known) == len(parts) else [whole]


def _is_sliced_at_once(computation: Computation, instruction: Instruction) -> bool:
    """Whether the root of a fusion is a slice of an all-reduce, perhaps in another shape, or one of each of its parts:
    XLA:TPU's reduce-scatter, of one array or of several that it joins.
    """
    root = computation.instructions[computation.root]
    slices = [computation.instructions[o] for o in root.operands] if root.opcode == "tuple" else [root]
    return all([_is_slice_made_of(computation, one, instruction) for one in slices])


def _is_slice_made_of(computation: Computation, one: Instruction, source: Instruction) -> bool:
    """Whether an instruction is a slice of what `source` makes."""
    if one.opcode not in ("dynamic-slice", "slice"):
        return False
    made = computation.instructions[one.operands[0]]
    while made.opcode in _SAME:
        made = computation.instructions[made.operands[0]]
    return made.name == source.name


def _only_sliced(module: HloModule, computation: Computation, name: str) -> bool:
    """Whether slices are all that reads the result `name`; fusions are looked into."""
    front, slices = [name], 0
    for name in front:
        for user in computation.users.get(name, ()):
            if user.opcode in _SAME or user.opcode.endswith("-done"):
                front.append(user.name)
            elif user.opcode == "dynamic-slice" and user.operands[0] == name:
                slices += 1
            elif user.opcode == "fusion" and _is_slice_of(module.computations[user.called[0]], user, name):
                slices += 1
            else:
                return False
    return slices > 0


def _is_slice_of(body: Computation, fusion: Instruction, name: str) -> bool:
    """Whether a fusion reads its operand `name` only to slice it."""
    given = {str(k) for k, o in enumerate(fusion.operands) if o == name}
    front = [i.name for i in body.instructions.values() if i.opcode == "parameter" and i.literal in given]
    users = [u for name in front for u in body.users.get(name, ())]
    return bool(users) and all(u.opcode == "dynamic-slice" and u.operands[0] in front for u in users)


def _sent_bytes(kind: str, num_devices: int, operand_bytes: float) -> float:
    """Bytes that each device sends, as predictions count them, given those it puts in."""
    whole_bytes = num_devices * operand_bytes if kind == "all-gather" else operand_bytes
    return sent_share(CollectiveKind(LIKE.get(kind, kind)), num_devices) * whole_bytes


def _origin(module: HloModule, run: Run, made: Run) -> tuple[tuple[int, ...], str]:
    """The equations that a collective serves by moving what `made` makes, and the argument that this is made of.

    They are the collective's own if it moves nothing else; else those that make what it moves.
    """
    own = _named(module, run.instruction)
    if own and [made.instruction.name] == list(run.instruction.operands):
        return own, ""
    found: dict[int, None] = {}
    argument = ""
    front = [made]
    for _ in range(_REACH):
        unknown = []
        for one in front:
            numbers = _named(module, one.instruction)
            found.update(dict.fromkeys(numbers))
            if not numbers and one.instruction.opcode == "parameter":
                argument = argument or one.instruction.op_name
            elif not numbers:
                unknown += [o for o in map(one.operand, one.instruction.operands) if o is not None]
        front = unknown
    return tuple(found) or own or _read_by(module, run), "" if found else argument


def _read_by(module: HloModule, run: Run) -> tuple[int, ...]:
    """The equations of what reads a collective's result first."""
    front = [run.instruction.name]
    for _ in range(_REACH):
        users = [u for name in front for u in run.computation.users.get(name, ())]
        numbers = dict.fromkeys(n for u in users for n in _named(module, u))
        if numbers:
            return tuple(numbers)
        front = [u.name for u in users]
    return ()


def _named(module: HloModule, instruction: Instruction) -> tuple[int, ...]:
    """The equations that the names of an instruction, or of the roots of what it calls, tell."""
    names = [instruction.op_name]
    if instruction.opcode == "fusion":
        for callee in instruction.called:
            body = module.computations[callee]
            names += [body.instructions[body.root].op_name] if body.root else []
    return tuple(dict.fromkeys(number for name in names for number in equations_in(name)))


def equations_in(op_name: str) -> tuple[int, ...]:
    """The equation that a path of names tells: the innermost."""
    numbers = _EQUATION.findall(op_name)
    return (int(numbers[-1]),) if numbers else ()
