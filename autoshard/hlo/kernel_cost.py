"""What one instruction of a compiled program takes on a GPU: launch + max(FLOPs / product rate, bytes / memory rate).

The roofline of `cost/compute.py`, on what the compiler made: bytes are those that a kernel reads and writes, a slice of
an operand where it reads no more, and the slice that it writes where it updates in place.
"""

import dataclasses

from autoshard.hlo.flops import flops_of
from autoshard.hlo.module import Computation, HloModule, Instruction, Run

_NO_KERNEL = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier add-dependency "
    "domain iota async-start async-update async-done copy-start copy-done".split()
)
"""What takes no kernel of its own on the stream of kernels."""
_SLICES = ("dynamic-slice", "slice", "gather")
_NAMES = ("bitcast", "reshape", "copy", "convert")
"""What hands on an operand inside a fusion."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """What kernels of a device reach.

    Attributes:
      product_flops_per_s: Of matrix products and convolutions. memory_bytes_per_s: Of device memory.
      launch_s: Of one kernel.
    """

    product_flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float

    def kernel_s(self, module: HloModule, computation: Computation, instruction: Instruction) -> float:
        """Seconds of one instruction; 0 for what takes no kernel."""
        if instruction.opcode in _NO_KERNEL:
            return 0.0
        flops = _flops(module, Run(computation, instruction, 1.0, None))
        moved_bytes = kernel_bytes(module, computation, instruction)
        return self.launch_s + max(flops / self.product_flops_per_s, moved_bytes / self.memory_bytes_per_s)


def _flops(module: HloModule, run: Run) -> float:
    """Of the products in a kernel, those inside a fusion included."""
    if run.instruction.opcode != "fusion":
        return flops_of(run)
    bodies = [module.computations[name] for name in run.instruction.called]
    return sum(_flops(module, Run(body, i, 1.0, run)) for body in bodies for i in body.instructions.values())


def kernel_bytes(module: HloModule, computation: Computation, instruction: Instruction) -> float:
    """Bytes that a kernel reads and writes in device memory."""
    known = [computation.instructions[o] for o in instruction.operands if o in computation.instructions]
    if instruction.opcode == "dynamic-update-slice":
        return 2 * known[1].result_bytes
    if instruction.opcode in _SLICES:
        return 2 * instruction.result_bytes
    if instruction.opcode != "fusion":
        return instruction.result_bytes + sum(o.result_bytes for o in known)
    body = module.computations[instruction.called[0]]
    total_bytes = 0.0
    for result in _roots(body):
        is_update = result.opcode == "dynamic-update-slice" and result.operands[1] in body.instructions
        total_bytes += body.instructions[result.operands[1]].result_bytes if is_update else result.result_bytes
    for inner in body.instructions.values():
        if inner.opcode == "parameter":
            total_bytes += _read_bytes(body, inner)
    return total_bytes


def _roots(body: Computation) -> list[Instruction]:
    """What a fusion returns; an update in place where only its name in another form is returned."""
    root = body.instructions[body.root]
    roots = [body.instructions[o] for o in root.operands] if root.opcode == "tuple" else [root]
    found = []
    for one in roots:
        inner = body.instructions.get(one.operands[0]) if one.opcode in _NAMES else None
        found.append(inner if inner is not None and inner.opcode == "dynamic-update-slice" else one)
    return found


def _read_bytes(body: Computation, parameter: Instruction) -> float:
    """What a fusion reads of an operand: the slices, if it reads no more; nothing of what it only updates in place."""
    front, read_bytes = [parameter.name], 0.0
    for name in front:
        for user in body.users.get(name, ()):
            if user.opcode in _SLICES and user.operands[0] == name:
                read_bytes += user.result_bytes
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                continue
            elif user.opcode in ("bitcast", "reshape"):
                front.append(user.name)
            else:
                return parameter.result_bytes
    return min(read_bytes, parameter.result_bytes)
