"""What a scan is given of what it slices, derived by hand."""

import pytest

from autoshard.compiler.scanned_inputs import given_bytes, refined
from autoshard.graph.layout import WHOLE


@pytest.mark.parametrize(
    ("own", "read_as", "expected"),
    [
        ((WHOLE, WHOLE), (2, WHOLE), (2, WHOLE)),
        ((WHOLE, 1), (2, 2), (2, 1)),
        ((1, WHOLE), (2, 2), (1, WHOLE)),
        ((3, WHOLE), (2, WHOLE), (3, WHOLE)),
        ((WHOLE, 2), (2, WHOLE), (WHOLE, 2)),
        ((2, WHOLE), (WHOLE, WHOLE), (2, WHOLE)),
        ((2, WHOLE), (2, 3), (2, 3)),
        ((0, 2), (WHOLE, 2), (WHOLE, 2)),
        ((0, WHOLE), (1, WHOLE), (0, WHOLE)),
    ],
    ids=[
        "a slice of it",
        "the axis that is free",
        "not the second axis without the first",
        "the axis splits another dimension",
        "another axis splits the dimension",
        "what is gathered stays as it is",
        "one more dimension",
        "what is split over the scanned dimension is gathered",
        "what lies otherwise is left as it is",
    ],
)
def test_free_axes_split_what_the_loop_carries(own, read_as, expected):
    assert refined([own], [read_as]).tolist() == [[list(expected)]]


def test_only_what_is_split_further_is_a_copy():
    """Of 4 kB on a mesh of 2 x 4: read over the first axis it is 2 kB; what lies so already is given as it is."""
    lies, read = (WHOLE, WHOLE), (1, WHOLE)
    assert given_bytes([lies, read], [lies, read], 4096.0, (2, 4)).tolist() == [[0.0, 2048.0], [0.0, 0.0]]
