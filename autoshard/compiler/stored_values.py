"""Stored values under all choices: each takes memory over its live ranges, or, from the host, while it is used."""

from collections.abc import Iterator

import numpy as np

from autoshard.compiler.analysis import ProgramAnalysis
from autoshard.compiler.buffer_uses import BufferKind, BufferUse, Choices


def stored_values(analysis: ProgramAnalysis, choices: Choices) -> Iterator[BufferUse]:
    """The buffers of all stored values, and the copies of those that lie in the memory of the host."""
    values, sizes = analysis.graph.values, choices.mesh_shape
    cache: dict[tuple[int, int], np.ndarray] = {}
    for live in analysis.live.ranges:
        size_bytes = values[live.value].size_bytes
        column = choices.layouts_of(live.value)
        if column is None or size_bytes == 0:
            continue
        key = size_bytes, id(column)
        if key not in cache:
            cache[key] = column.shard_bytes(float(size_bytes), sizes)
        there, whole = choices.in_host.get(live.value), cache[key]
        if there is None:
            yield BufferUse(BufferKind.VALUE, live.value, live.start, live.stop, whole)
            continue
        yield BufferUse(BufferKind.VALUE, live.value, live.start, live.stop, np.where(there.is_in_host, 0.0, whole))
        copied = np.where(there.is_in_host, whole, 0.0)
        yield BufferUse(BufferKind.HOST_COPY, live.value, there.start, there.stop, copied)
