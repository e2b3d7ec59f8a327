"""What a scan is given of what it slices.

XLA's partitioner moves each slice inside the loop. But what the loop carries has no layout of its own: it gets the axes
over which the slices are split, as far as they are free, and each device makes its piece of all slices before the loop
begins. That is there until the loop ends, beside what it was made of.

What is only gathered, as it is split over the scanned dimension, execution gathers before the loop
(`execution/nested.py`): the partitioner may gather all slices in each iteration, to take one.
"""

from collections.abc import Sequence

import numpy as np

from autoshard.graph.layout import WHOLE, Layout, shard_bytes

SCANNED_DIM = 0
"""The dimension that a scan slices."""


def refined(own: Layout, read_as: Layout) -> Layout:
    """The layout in which a loop carries a value that lies as `own` and whose slices are read as `read_as`, both of the
    whole value: a dimension is split further over the first of its axes that split no other one. What is gathered over
    the scanned dimension alone is carried so."""
    if SCANNED_DIM in own and read_as == tuple(WHOLE if d == SCANNED_DIM else d for d in own):
        return read_as
    found = list(own)
    for dim in {*read_as} - {WHOLE}:
        axes = [a for a, d in enumerate(read_as) if d == dim]
        if any(d == dim and a not in axes for a, d in enumerate(own)):
            continue  # it is split over other axes
        for a in axes:
            if own[a] not in (WHOLE, dim):
                break
            found[a] = dim
    return tuple(found)


def given_bytes(
    sources: Sequence[Layout], targets: Sequence[Layout], size_bytes: float, axis_sizes: Sequence[int]
) -> np.ndarray:
    """[sources, targets] bytes of one device's copy of a value that a scan slices, made before it begins; 0 where it is
    given the value itself."""

    def of(own: Layout, read_as: Layout) -> float:
        layout = refined(own, read_as)
        return 0.0 if layout == own else shard_bytes(size_bytes, layout, axis_sizes)

    return np.array([[of(own, read_as) for read_as in targets] for own in sources])
