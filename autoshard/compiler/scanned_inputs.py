"""What a scan is given of what it slices.

XLA's partitioner moves each slice inside the loop. But what the loop carries has no layout of its own: it gets the axes
over which the slices are split, as far as they are free, and each device makes its piece of all slices before the loop
begins. That is there until the loop ends, beside what it was made of.
"""

from collections.abc import Sequence

import numpy as np

from autoshard.graph.layout import WHOLE, Layout, shard_bytes


def refined(own: Layout, read_as: Layout) -> Layout:
    """The layout in which a loop carries a value that lies as `own` and whose slices are read as `read_as`, both of the
    whole value: a dimension is split further over the first of its axes that split no other one."""
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
