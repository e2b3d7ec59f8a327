"""Exponentials of a softmax that are stored, though what reads them could compute them again.

XLA:GPU makes the maxima of rows, the differences to them and their exponentials in one kernel, one of Triton's
(`SoftmaxRewriterTriton`), and puts this kernel into all that need the exponentials, unless something that rules it out
saves more time and so comes first (`PriorityFusion`). Such is the padding of what a product reads, whose dimensions
must be multiples of eight (`CublasPadForGemms`): Triton's kernels cannot pad, and one that does reads the exponentials.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autoshard.compiler.analysis import ProgramAnalysis
from autoshard.compiler.buffer_uses import BufferKind, BufferUse, Choices
from autoshard.compiler.row_maximum import row_maximum
from autoshard.graph.graph import Graph, Operation
from autoshard.graph.layout import WHOLE, Layout

_PADDED_TO = 8
"""cuBLAS's products of 2-byte elements have dimensions that are multiples of it."""

_CACHED_BYTES = 132 * 2048
"""What XLA takes for the L1 caches of an H100, 2 KiB in each multiprocessor (`GpuPerformanceModelBase`). What a kernel
reads for every element of a row costs little if it fits, such as the rows' sums."""

_LEAST_TILE = {True: 7 / 6, False: 3 / 2}
"""How many times a row its tile, a power of two, must be for the padding of products to save more time: if the rows'
sums fit into L1 caches, and if not. Softmaxes compiled alone for an H100 store their exponentials with 256 x 196 rows
of 196 elements (1.31), not with 512 x 196; of such few rows with 220 elements (1.16), not with 228 (1.12), and of many
rows with 332 (1.54), not with 172 (1.49).
"""


def stored_exponentials(analysis: ProgramAnalysis, choices: Choices) -> Iterator[BufferUse]:
    """The exponentials that are stored in some layouts.

    They take the place of what they are made of, which need not be there any more: what they take beyond that counts.
    """
    graph, live = analysis.graph, analysis.live
    producer = analysis.chains.producer
    stops = {life.value: life.stop for life in live.ranges}
    for operation in graph.operations:
        value = operation.results[0] if operation.name == "exp" else None
        if (
            value is None
            or not (stop := live.fused_stop.get(value))
            or live.region[stop - 1] == live.region[operation.index]
        ):
            continue  # no kernel behind a product needs them
        source, column = _scores(graph, producer, operation, stops), choices.layouts_of(value)
        if source is None or column is None or stops[source] > stop:
            continue
        tensor = graph.values[value]
        added_bytes = tensor.itemsize_bytes - graph.values[source].itemsize_bytes
        sizes_bytes = [
            float(math.prod(local) * added_bytes) if _is_stored(local, tensor.itemsize_bytes) else 0.0
            for local in (_local(tensor.shape, layout, choices.mesh_shape) for layout in column.layouts)
        ]
        if any(sizes_bytes):
            own = np.array(sizes_bytes)[column.of_choice]
            yield BufferUse(BufferKind.VALUE, value, operation.index, stop, own)


def _scores(
    graph: Graph, producer: Sequence[Operation | None], operation: Operation, stops: Mapping[int, int]
) -> int | None:
    """The stored 2-byte value that `operation` makes the exponentials of a softmax over the last dimension of."""
    made_by = lambda value: None if value is None else producer[value]
    less = made_by(operation.operands[0])
    if less is None or less.name != "sub" or None in less.operands:
        return None
    scores, most = less.operands
    rank = len(graph.values[scores].shape)
    by = row_maximum(producer, most)
    if by is None or len(by.rule.operands[0]) != rank:
        return None
    if [d for d, dim in enumerate(by.rule.operands[0]) if any(by.rule.factors[f].reduction for f in dim)] != [rank - 1]:
        return None
    while scores not in stops:
        by = made_by(scores)
        alike = [] if by is None else [o for o in by.operands if o is not None and len(graph.values[o].shape) == rank]
        if len(alike) != 1:
            return None
        scores = alike[0]
    source = graph.values[scores]
    is_alike = source.shape == graph.values[operation.operand(0)].shape
    return scores if is_alike and source.itemsize_bytes == 2 else None


def _local(shape: Sequence[int], layout: Layout, axis_sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of one device's piece."""
    ways = [1] * len(shape)
    for n, dim in zip(axis_sizes, layout, strict=True):
        if dim != WHOLE:
            ways[dim] *= n
    return tuple(extent // n for extent, n in zip(shape, ways, strict=True))


def _is_stored(shape: Sequence[int], itemsize_bytes: int) -> bool:
    """Whether exponentials over the last dimension of `shape` are stored on a device."""
    *rows, row = shape
    tile = 1 << (row - 1).bit_length()
    fits = math.prod(rows) * itemsize_bytes < _CACHED_BYTES
    return row % _PADDED_TO != 0 and tile >= _LEAST_TILE[fits] * row
