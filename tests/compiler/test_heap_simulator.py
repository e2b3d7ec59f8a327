"""Places of buffers: none overlap, the rule of the smallest gap, and gaps worked out by hand."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.compiler.heap_simulator import ALIGNMENT_BYTES, offsets, packed_bytes

BUFFERS = st.lists(
    st.tuples(st.integers(0, 10), st.integers(1, 8), st.integers(1, 6)).map(lambda b: (b[0], b[0] + b[1], b[2])),
    min_size=1,
    max_size=14,
)


def columns(buffers) -> list[np.ndarray]:
    """Starts, stops and sizes."""
    return [np.array(column, np.int64) for column in zip(*buffers, strict=True)]


def together(one, other) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def smallest_gap(placed: list[tuple[int, int]], size: int) -> int:
    """Where `size` goes among (offset, size) of what is there: every offset is tried, every byte looked at."""
    top = max((low + s for low, s in placed), default=0)
    taken = [any(low <= byte < low + s for low, s in placed) for byte in range(top)] + [True]
    gaps, begin = [], 0
    for byte, is_taken in enumerate(taken):
        if is_taken:
            gaps.append((byte - begin, begin))
            begin = byte + 1
    return min([gap for gap in gaps if gap[0] >= size], default=(0, top))[1]


@given(BUFFERS, st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_buffers_alive_together_share_nothing_and_go_into_the_smallest_gap(buffers, random):
    order = random.sample(range(len(buffers)), len(buffers))
    starts, stops, sizes = columns(buffers)
    found = offsets(starts, stops, sizes, np.array(order)).tolist()
    for n, k in enumerate(order):
        there = [(found[j], buffers[j][2]) for j in order[:n] if together(buffers[j], buffers[k])]
        assert all(low + size <= found[k] or found[k] + buffers[k][2] <= low for low, size in there)
        assert found[k] == smallest_gap(there, buffers[k][2])


@given(BUFFERS)
@settings(max_examples=200, deadline=None)
def test_never_less_than_what_is_alive_at_once(buffers):
    starts, stops, sizes = columns(buffers)
    live = max(sum(size for start, stop, size in buffers if start <= t < stop) for t in range(20))
    found = packed_bytes(starts, stops, sizes * ALIGNMENT_BYTES) / ALIGNMENT_BYTES
    assert live <= found <= sizes.sum()
    assert packed_bytes(starts, stops, sizes * ALIGNMENT_BYTES - 1.0) == found * ALIGNMENT_BYTES, "multiples of 256"


def test_a_gap_by_hand():
    """Never more than four alive. Largest first: 3 at 0, another 3 at 0, 1 above them at 3, and 1 that meets both at 4.
    Longest first: 1 at 0, 1 beside it at 1, 3 over the first at 1, and 3 over the second at 2.
    """
    starts, stops, sizes = columns([(0, 3, 3), (2, 4, 1), (3, 5, 1), (4, 5, 3)])
    assert offsets(starts, stops, sizes, np.array([0, 3, 1, 2])).tolist() == [0, 3, 4, 0]
    assert offsets(starts, stops, sizes, np.array([1, 2, 0, 3])).tolist() == [1, 0, 1, 2]
    assert packed_bytes(starts, stops, sizes * ALIGNMENT_BYTES) == 5 * ALIGNMENT_BYTES
