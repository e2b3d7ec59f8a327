"""What one instruction of a compiled program takes on a GPU, by the cost model's own formulas (`cost/compute.py`).

Products take their arithmetic, everything else the bytes that it moves: those that a kernel reads and writes, a slice
of an operand where it reads no more, and the slice that it writes where it updates in place. The workspace that a
library's product is given does not count: how much of it is used is not known, and most products use none.
"""

import math

from autoshard.cluster import DeviceType
from autoshard.cost import compute
from autoshard.hlo.flops import (
    flops_of,
    is_convolution,
    is_kernel_gradient,
    is_library_product,
    least_dim,
    products_within,
)
from autoshard.hlo.module import Computation, HloModule, Instruction, Run, dtype_name

_NO_KERNEL = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier add-dependency "
    "domain iota async-start async-update async-done copy-start copy-done".split()
)
"""What takes no kernel of its own on the stream of kernels."""
_SLICES = ("dynamic-slice", "slice", "gather")
_NAMES = ("bitcast", "reshape", "copy", "convert")
"""What hands on an operand inside a fusion."""


def kernel_s(device: DeviceType, module: HloModule, computation: Computation, instruction: Instruction) -> float:
    """Seconds of one instruction on `device`; 0 for what takes no kernel."""
    if instruction.opcode in _NO_KERNEL:
        return 0.0
    run = Run(computation, instruction, 1.0, None)
    arithmetic_s = math.fsum(_product_s(device, product) for product in products_within(module, run))
    return compute.kernel_s(device, arithmetic_s, kernel_bytes(module, computation, instruction), 1)


def _product_s(device: DeviceType, run: Run) -> float:
    """Arithmetic of a product or a convolution, by the rate for the type of its first operand."""
    dtype = dtype_name(run.computation.instructions[run.instruction.operands[0]].result[0].dtype)
    work = compute.Work.PRODUCT
    if is_convolution(run):
        work = compute.Work.KERNEL_GRADIENT if is_kernel_gradient(run) else compute.Work.CONVOLUTION
    return compute.flops_s(device, flops_of(run), dtype, work, least_dim=least_dim(run))


def kernel_bytes(module: HloModule, computation: Computation, instruction: Instruction) -> float:
    """Bytes that a kernel reads and writes in device memory."""
    known = [computation.instructions[o] for o in instruction.operands if o in computation.instructions]
    if instruction.opcode == "dynamic-update-slice":
        return 2 * known[1].result_bytes
    if instruction.opcode in _SLICES:
        return 2 * instruction.result_bytes
    if instruction.opcode != "fusion":
        results = instruction.result[:1] if is_library_product(instruction) else instruction.result
        return sum(r.size_bytes for r in results) + sum(o.result_bytes for o in known)
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
