"""What a scan is given of what it slices.

XLA's partitioner moves each slice inside the loop. But what the loop carries has no layout of its own: it gets the axes
over which the slices are split, as far as they are free, and each device makes its piece of all slices before the loop
begins. That is there until the loop ends, beside what it was made of.

What is only gathered, as it is split over the scanned dimension, execution gathers before the loop
(`execution/nested.py`): the partitioner may gather all slices in each iteration, to take one.
"""

from collections.abc import Sequence

import numpy as np

from autoshard.graph.layout import WHOLE, Layout

SCANNED_DIM = 0
"""The dimension that a scan slices."""


def refined(sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
    """The layouts in which a loop carries a value that lies as one of `sources` and whose slices are read as one of
    `targets`, all of the whole value: a dimension is split further over the first of its axes that split no other one.
    What is gathered over the scanned dimension alone is carried so.

    Returns:
      int64 [sources, targets, axes]: of each axis the dimension that it splits, or `WHOLE`.
    """
    own, read_as = np.array(sources)[:, None, :], np.array(targets)[None, :, :]
    is_split, is_free = read_as != WHOLE, (own == WHOLE) | (own == read_as)
    found = np.broadcast_to(own, np.broadcast_shapes(own.shape, read_as.shape)).copy()
    for a in range(found.shape[2]):
        dim = read_as[:, :, a : a + 1]
        is_elsewhere = ((own == dim) & (read_as != dim)).any(axis=2)  # it is split over other axes
        is_held = ((read_as == dim) & ~is_free)[:, :, : a + 1].any(axis=2)  # this axis, or one before it, by another
        found[:, :, a] = np.where(is_split[:, :, a] & ~is_elsewhere & ~is_held, read_as[:, :, a], found[:, :, a])
    is_gathered = (own == SCANNED_DIM).any(axis=2) & (read_as == np.where(own == SCANNED_DIM, WHOLE, own)).all(axis=2)
    return np.where(is_gathered[:, :, None], read_as, found)


def given_bytes(
    sources: Sequence[Layout], targets: Sequence[Layout], size_bytes: float, axis_sizes: Sequence[int]
) -> np.ndarray:
    """[sources, targets] bytes of one device's copy of a value that a scan slices, made before it begins; 0 where it is
    given the value itself."""
    carried = refined(sources, targets)
    parts = np.where(carried == WHOLE, 1, np.array(axis_sizes)).prod(axis=2)
    return np.where((carried == np.array(sources)[:, None, :]).all(axis=2), 0.0, size_bytes / parts)
