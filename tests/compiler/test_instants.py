"""Instants that matter: none too many, none too few."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.compiler.instants import instants_that_matter

INTERVALS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)).map(lambda p: (p[0], p[0] + p[1])), max_size=10)


def alive(intervals, instants) -> set[frozenset[int]]:
    return {frozenset(i for i, (s, e) in enumerate(intervals) if s <= t < e) for t in instants}


@given(INTERVALS)
@settings(max_examples=400, deadline=None)
def test_instants_that_matter_are_the_maximal_sets(intervals):
    """Nothing but the inclusion-maximal sets of intervals alive together is left, each of them once."""
    before = alive(intervals, range(20)) - {frozenset()}
    maximal = {s for s in before if not any(s < other for other in before)}
    starts, stops = (np.array([interval[k] for interval in intervals], np.int64) for k in (0, 1))
    instants = instants_that_matter(starts, stops)
    assert alive(intervals, instants) == maximal
    assert len(instants) == len(maximal)
