"""Rows that are normalized and kept for the gradient of their scale, though every reader could normalize them again.

The gradient of a scale sums the columns of the normalized rows times another gradient. XLA:GPU first joins what saves
most time (`PriorityFusion`): either the normalized rows are put into their readers, or that product into its sum. A
kernel that sums columns cannot hold one of Triton's, which sums rows, so that rows are stored if the product comes
first. Both save one array written and read; what decides is the arithmetic of making rows again. It is dear where rows
are summed twice in turn, for their mean and then for the variance of what is less of it (`x.var`): not in norms by the
square alone, nor in those by the means of rows and of their squares. And it is dear for short rows: each takes a root.
"""

import math
from collections.abc import Iterator

import numpy as np

from autoshard.compiler.analysis import ProgramAnalysis
from autoshard.compiler.buffer_uses import BufferKind, BufferUse, Choices
from autoshard.compiler.def_use import DefUse
from autoshard.compiler.reduced_rows import reduced_row
from autoshard.graph.graph import Operation
from autoshard.graph.layout import WHOLE, shard_bytes

_MOST_ELEMENTS = {True: 192, False: 384}
"""Of a row, if a bias is added to the scaled rows, and if not, on one device. Read off programs for H100 with 10 and 38
million elements: with biases rows of 96 to 192 elements are stored, those of 224 to 2,048 are not, but for a single one
in a program now and then, as of 512 or 768; without, rows of 192 to 384 are stored, those of 512 to 1,024 are not."""

_MOST_ELEMENTS_OF_SHARES = 768
"""Where rows are shared out, so that devices add their sums: rows of 192 to 768 elements are stored, of 1,024 not."""

_NARROW_ELEMENTS = range(129, 193)
"""Of a row that is made of 2 bytes an element, with a bias or without: those of 160 and 192 are stored; those of 128,
and of 224 to 2,048 are not, of 96 one in three at most, nor, where rows are shared out, more than one of 256 or 1,024
in a program."""

_MOST_NARROW_BYTES = 50 * 2**20
"""Of the normalized rows, if they are made of 2 bytes an element: 38 MB are stored, 77 are not. An H100's L2 cache has
as much, and XLA takes reading from it to cost next to nothing."""


def normalized_rows(analysis: ProgramAnalysis, choices: Choices) -> Iterator[BufferUse]:
    """The normalized rows that are stored in some layouts; they are there beside what they are made of."""
    chains, live, values = analysis.chains, analysis.live, analysis.graph.values
    sums_in_turn: list[int] = []
    for operation in analysis.graph.operations:
        value = operation.results[0] if operation.name in ("mul", "div") else None
        stop = 0 if value is None else live.fused_stop.get(value, 0)
        if value is None or not stop or live.region[stop - 1] == live.region[operation.index]:
            continue  # no kernel behind a product needs them
        shape, column, scale = values[value].shape, choices.layouts_of(value), _scale_of_rows(chains, operation)
        if column is None or scale is None or not _is_summed_later(chains, value):
            continue
        sums_in_turn, is_narrow = sums_in_turn or _sums_in_turn(chains), _least_itemsize_bytes(chains, value) <= 2
        if sums_in_turn[scale] < 2 or (is_narrow and shape[-1] not in _NARROW_ELEMENTS):
            continue
        most_bytes = _MOST_NARROW_BYTES if is_narrow else math.inf
        most_elements = _MOST_ELEMENTS[_has_bias(chains, value)]
        kept = []
        for layout in column.layouts:
            size_bytes = shard_bytes(float(values[value].size_bytes), layout, choices.mesh_shape)
            most = max(most_elements, _MOST_ELEMENTS_OF_SHARES) if any(d != WHOLE for d in layout) else most_elements
            is_kept = size_bytes <= most_bytes and shape[-1] <= most and len(shape) - 1 not in layout
            kept.append(size_bytes if is_kept else 0.0)
        if any(kept):
            yield BufferUse(BufferKind.VALUE, value, operation.index, stop, np.array(kept)[column.of_choice])


def _scale_of_rows(chains: DefUse, operation: Operation) -> int | None:
    """What has one number for each row that an operation multiplies or divides by it."""
    values, value = chains.graph.values, operation.results[0]
    operands = [o for o in operation.operands if o is not None]
    if value is None or len(operands) != 2 or not values[value].shape:
        return None
    num_rows = math.prod(values[value].shape[:-1])
    return next((o for o in operands if math.prod(values[o].shape) == num_rows), None)


def _sums_in_turn(chains: DefUse) -> list[int]:
    """For each value, how many sums of rows it takes, one made of the other, behind the last heavy kernel."""
    counts = [0] * len(chains.graph.values)
    for operation in chains.graph.operations:
        if not operation.rule.is_heavy:
            before = max([counts[o] for o in operation.operands if o is not None], default=0)
            for value in operation.results:
                if value is not None:
                    counts[value] = before + bool(reduced_row(operation))
    return counts


def _has_bias(chains: DefUse, value: int) -> bool:
    """Whether something is added to what is multiplied with a value before the next heavy kernel."""
    at = chains.region[chains.made_by(value).index]
    products = [c.results[0] for c, _ in chains.consumers[value] if c.name == "mul" and chains.region[c.index] == at]
    return any(c.name == "add" for p in products if p is not None for c, _ in chains.consumers[p])


def _is_summed_later(chains: DefUse, value: int) -> bool:
    """Whether columns of what is multiplied with a value behind a heavy kernel are summed."""
    at = chains.region[chains.made_by(value).index]
    products = [c.results[0] for c, _ in chains.consumers[value] if c.name == "mul" and chains.region[c.index] > at]
    return any(_sums_columns(c) for p in products if p is not None for c, _ in chains.consumers[p])


def _sums_columns(operation: Operation) -> bool:
    """Whether an operation sums over all dimensions but the last."""
    if operation.name != "reduce_sum":
        return False
    is_summed = [any(operation.rule.factors[f].reduction for f in dim) for dim in operation.rule.operands[0]]
    return not is_summed[-1] and all(is_summed[:-1]) and any(is_summed)


def _least_itemsize_bytes(chains: DefUse, value: int) -> int:
    """The fewest bytes of an element of what a value is made of, element by element, behind the last heavy kernel."""
    values, front, seen = chains.graph.values, [value], {value}
    while front:
        by = chains.producer[front.pop()]
        if by is not None and not by.rule.is_heavy:
            alike = {o for o in by.operands if o is not None and values[o].shape == values[value].shape} - seen
            front += alike
            seen |= alike
    return min(values[v].itemsize_bytes for v in seen)
