"""Shares of a batch against all others that there are."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from autoshard.balance.batch_shares import batch_shares


def test_a_replica_of_half_the_speed_gets_half_as_much():
    assert batch_shares(14, (1.0, 1.0, 2.0, 1.0)) == (4, 4, 2, 4)


def test_what_a_replica_does_besides_counts():
    """With two parts' time besides, the slow one ends at 2 (2 + 2) = 8 as the other does at 2 + 6."""
    assert batch_shares(8, (1.0, 2.0), fixed=2.0) == (6, 2)


@given(
    num_parts=st.integers(0, 9),
    slowness=st.lists(st.floats(1, 8), min_size=1, max_size=4),
    fixed=st.floats(0, 3),
)
def test_no_other_shares_end_sooner(num_parts, slowness, fixed):
    found = batch_shares(num_parts, slowness, fixed)
    assert sum(found) == num_parts and min(found) >= 0
    every = itertools.product(range(num_parts + 1), repeat=len(slowness))
    if num_parts:
        best = min(
            max((w * (fixed + n) for w, n in zip(slowness, c, strict=True) if n), default=0)
            for c in every
            if sum(c) == num_parts
        )
        took = max(w * (fixed + n) for w, n in zip(slowness, found, strict=True) if n)
        assert took <= best * (1 + 1e-9)
