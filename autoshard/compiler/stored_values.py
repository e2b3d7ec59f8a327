"""Stored values under all choices: each takes memory over its live ranges, or, from the host, while it is used."""

from collections.abc import Iterator

import numpy as np

from autoshard.compiler.analysis import ProgramAnalysis
from autoshard.compiler.buffer_uses import BufferKind, BufferUse, Choices


def stored_values(analysis: ProgramAnalysis, choices: Choices, hides: bool = False) -> Iterator[BufferUse]:
    """The buffers of all stored values, and the copies of those that lie in the memory of the host.

    `hides`: Whether XLA:GPU runs collectives behind kernels.
    """
    values, sizes, live = analysis.graph.values, choices.mesh_shape, analysis.live
    apart = live.hiding_apart_stop if hides and analysis.adds_apart else {}
    cache: dict[tuple[int, int], np.ndarray] = {}
    for life in live.hiding_ranges if hides else live.ranges:
        size_bytes = values[life.value].size_bytes
        column = choices.layouts_of(life.value)
        if column is None or size_bytes == 0:
            continue
        key = size_bytes, id(column)
        if key not in cache:
            cache[key] = column.shard_bytes(float(size_bytes), sizes)
        there, whole = choices.in_host.get(life.value), cache[key]
        stop = min(life.stop, apart.get(life.value, life.stop))
        if there is None:
            yield BufferUse(BufferKind.VALUE, life.value, life.start, stop, whole)
            continue
        yield BufferUse(BufferKind.VALUE, life.value, life.start, stop, np.where(there.is_in_host, 0.0, whole))
        copied = np.where(there.is_in_host, whole, 0.0)
        yield BufferUse(BufferKind.HOST_COPY, life.value, there.start, there.stop, copied)
