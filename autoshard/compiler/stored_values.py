"""Stored values under all choices: each takes memory over its live ranges."""

from collections.abc import Iterator

import numpy as np

from autoshard.compiler.analysis import ProgramAnalysis
from autoshard.compiler.buffer_uses import BufferKind, BufferUse, Choices


def stored_values(analysis: ProgramAnalysis, choices: Choices) -> Iterator[BufferUse]:
    """The buffers of all stored values."""
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
        yield BufferUse(BufferKind.VALUE, live.value, live.start, live.stop, cache[key])
