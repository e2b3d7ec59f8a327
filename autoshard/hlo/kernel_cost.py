"""What one instruction of a compiled program takes on a GPU, by the cost model's own formulas (`cost/compute.py`).

Products take their arithmetic, everything else the bytes that it moves: those that a kernel reads and writes, a slice
of an operand where it reads no more, and the slice that it writes where it updates in place. The workspace that a
library's product is given does not count: how much of it is used is not known, and most products use none.
"""

import math

from autoshard.cluster import DeviceType
from autoshard.cost import compute
from autoshard.hlo.flops import (
    attention_of,
    flops_of,
    is_convolution,
    is_kernel_gradient,
    is_library_product,
    least_dim,
    products_within,
    rows_in_memory,
)
from autoshard.hlo.kernel_forms import column_steps, row_passes, stores_short_rows
from autoshard.hlo.module import Computation, HloModule, Instruction, Run, dtype_name
from autoshard.hlo.needed_elements import SLICES, UPDATES, needed_elements, returned_by, size_of

_NO_KERNEL = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier add-dependency "
    "domain iota async-start async-update async-done copy-start copy-done".split()
)
"""What takes no kernel of its own on the stream of kernels."""
_NAMES = ("bitcast", "reshape", "copy", "convert")
"""What hands on an operand inside a fusion."""


def kernel_s(device: DeviceType, module: HloModule, computation: Computation, instruction: Instruction) -> float:
    """Seconds of one instruction on `device`; 0 for what takes no kernel."""
    if instruction.opcode in _NO_KERNEL:
        return 0.0
    run = Run(computation, instruction, 1.0, None)
    arithmetic_s = math.fsum(_product_s(device, product) for product in products_within(module, run))
    moved_bytes = kernel_bytes(module, computation, instruction)
    if device.kernel_forms is not None and stores_short_rows(module, instruction):
        moved_bytes *= device.kernel_forms.short_rows_factor
    passes, columns = row_passes(module, instruction), column_steps(module, instruction)
    columns_s = 0.0
    if columns is not None:
        columns_s = compute.columns_s(device, columns.steps, columns.is_storing, columns.window_additions)
    return compute.kernel_s(device, arithmetic_s, moved_bytes, 1, passes, columns_s)


def _product_s(device: DeviceType, run: Run) -> float:
    """Arithmetic of a product or a convolution, by the rate for the type of its first operand."""
    dtype = dtype_name(run.computation.instructions[run.instruction.operands[0]].result[0].dtype)
    work = compute.Work.PRODUCT
    if is_convolution(run):
        work = compute.Work.KERNEL_GRADIENT if is_kernel_gradient(run) else compute.Work.CONVOLUTION
    elif (attention := attention_of(run.instruction)) is not None:
        work = compute.attention_work(attention)
    prolonged = compute.unaligned_factor(device, dtype, rows_in_memory(run))
    return prolonged * compute.flops_s(device, flops_of(run), dtype, work, least_dim=least_dim(run))


def kernel_bytes(module: HloModule, computation: Computation, instruction: Instruction) -> float:
    """Bytes that a kernel reads and writes in device memory."""
    known = [computation.instructions[o] for o in instruction.operands if o in computation.instructions]
    if instruction.opcode == "dynamic-update-slice":
        return 2 * known[1].result_bytes
    if instruction.opcode == "scatter":
        return sum(o.result_bytes for o in known[len(instruction.result) :]) + 2 * _updates_bytes(
            computation, instruction
        )
    if instruction.opcode in SLICES:
        return 2 * instruction.result_bytes
    if instruction.opcode != "fusion":
        results = instruction.result[:1] if is_library_product(instruction) else instruction.result
        return sum(r.size_bytes for r in results) + sum(o.result_bytes for o in known)
    body = module.computations[instruction.called[0]]
    roots = _roots(body)
    needed = needed_elements(body, roots)
    read_bytes = (
        inner.result_bytes * needed[inner.name] / max(size_of(inner), 1)
        for inner in body.instructions.values()
        if inner.opcode == "parameter"
    )
    return math.fsum(read_bytes) + math.fsum(_written_bytes(body, result) for result in roots)


def _roots(body: Computation) -> list[Instruction]:
    """What a fusion returns; an update in place where only its name in another form is returned."""
    found = []
    for one in returned_by(body):
        inner = body.instructions.get(one.operands[0]) if one.opcode in _NAMES else None
        found.append(inner if inner is not None and inner.opcode in UPDATES else one)
    return found


def _written_bytes(body: Computation, result: Instruction) -> float:
    """What a fusion writes of a result: only what it changes, where it updates in place; a scatter reads that first."""
    if result.opcode == "scatter":
        return 2 * _updates_bytes(body, result)
    if result.opcode == "dynamic-update-slice" and result.operands[1] in body.instructions:
        return body.instructions[result.operands[1]].result_bytes
    return result.result_bytes


def _updates_bytes(computation: Computation, scatter: Instruction) -> float:
    """Of the elements that a scatter changes: its operands are tables, ids, and as many updates as tables."""
    updates = scatter.operands[len(scatter.result) + 1 :]
    return math.fsum(computation.instructions[o].result_bytes for o in updates if o in computation.instructions)
