"""The prices of collectives against figures derived by hand, and their laws."""

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from autoshard.cluster import AxisLevel, Link, MeasuredCollective, MeshAxis
from autoshard.cost.collectives import (
    CollectiveKind,
    Joining,
    all_gather,
    all_reduce,
    all_to_all,
    joined,
    permute,
    reduce_scatter,
)

FAST = Link(latency_s=1e-6, bandwidth_bytes_per_s=100e9, level=0, source="test")
SLOW = Link(latency_s=10e-6, bandwidth_bytes_per_s=10e9, level=1, source="test")
INSIDE = MeshAxis("inside", 4, (AxisLevel(4, FAST),))
ACROSS = MeshAxis("across", 2, (AxisLevel(2, SLOW),))
BOTH = MeshAxis("both", 8, (AxisLevel(4, FAST), AxisLevel(2, SLOW)))


def test_all_gather_on_one_level():
    """800 kB over 4: each device sends 3 pieces of 200 kB; 3 hops of 1 us and 600 kB at 100 GB/s (6 us)."""
    found = all_gather([INSIDE], 800e3)
    assert (found.kind, found.axes, found.wire_bytes) == (CollectiveKind.ALL_GATHER, ("inside",), 600e3)
    assert found.time_s == pytest.approx(3e-6 + 6e-6)


def test_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    whole, half = all_reduce([BOTH], 800e3), reduce_scatter([BOTH], 800e3)
    assert whole.time_s == pytest.approx(half.time_s + all_gather([BOTH], 800e3).time_s)
    assert whole.wire_bytes == pytest.approx(2 * half.wire_bytes)


@pytest.mark.parametrize("axes", [[BOTH], [INSIDE, ACROSS], [ACROSS, INSIDE]])
def test_only_a_share_crosses_the_slow_level(axes):
    """800 kB over 4 x 2. Between nodes: half of the 200 kB that each device is left with, 100 kB at 10 GB/s and one
    hop, 10 + 10 us. Inside: 600 kB at 100 GB/s and three hops, 6 + 3 us. The order of the axes does not matter."""
    found = reduce_scatter(axes, 800e3)
    assert found.time_s == pytest.approx(20e-6 + 9e-6)
    assert found.wire_bytes == pytest.approx(700e3)


def test_all_to_all_on_two_levels():
    """800 kB in 8 parts: 3 stay inside the node (300 kB, 3 us, 3 hops), 4 cross (400 kB, 40 us, one hop)."""
    assert all_to_all([INSIDE], 800e3).time_s == pytest.approx(3e-6 + 6e-6)
    for axes in ([BOTH], [ACROSS, INSIDE], [INSIDE, ACROSS]):
        found = all_to_all(axes, 800e3)
        assert found.time_s == pytest.approx(3e-6 + 3e-6 + 10e-6 + 40e-6)
        assert found.wire_bytes == pytest.approx(700e3)


NODES = MeshAxis("nodes", 16, (AxisLevel(16, SLOW),))
"""In a ring, a sum takes 2 x 15 hops of 10 us and sends 2 x 15/16 of its bytes at 10 GB/s; in trees it takes 2 x 4 hops
of 20 us and sends 2 x its bytes at 9 GB/s. Both take as long for 140 us / (2/9 - 1.875/10) ns = 4.032 MB."""


@pytest.mark.parametrize(
    ("size_bytes", "time_s"),
    [(9e3, 160e-6 + 2e-6), (4.032e6, 300e-6 + 756e-6), (4.032e6, 160e-6 + 896e-6), (80e6, 300e-6 + 15e-3)],
)
def test_small_sums_among_many_nodes_run_in_trees(size_bytes, time_s):
    found = all_reduce([NODES], size_bytes)
    assert found.time_s == pytest.approx(time_s)
    assert found.wire_bytes == pytest.approx(2 * 15 / 16 * size_bytes)


def test_what_is_joined_with_others_runs_as_is_best_for_all():
    """A megabyte alone goes through trees (160 + 222 us; in a ring 300 + 187.5); 256 of them, joined, through rings, in
    which each pays a 31.46th of the hops, as 30 MiB (31.46 MB) hold so many."""
    alone = all_reduce([NODES], 1e6)
    assert alone.time_s == pytest.approx(160e-6 + 2e-3 / 9)
    assert joined(alone, Joining(256)).time_s == pytest.approx(300e-6 / 31.45728 + 187.5e-6)


def test_trees_are_for_sums_between_nodes_that_nobody_has_measured():
    inside = MeshAxis("inside", 16, (AxisLevel(16, FAST),))
    assert all_reduce([inside], 0.0).time_s == pytest.approx(30e-6), "a ring"
    measured = dataclasses.replace(SLOW, collectives=(MeasuredCollective(CollectiveKind.ALL_REDUCE, 16, 10e-6, 10e9),))
    assert all_reduce([MeshAxis("nodes", 16, (AxisLevel(16, measured),))], 0.0).time_s == pytest.approx(300e-6)
    assert all_gather([NODES], 0.0).time_s == pytest.approx(150e-6)


def test_what_is_left_inside_a_node_is_summed_in_trees_across():
    """72 kB over 4 x 16: 3 hops and 54 kB each way inside (2 x 3.54 us), 18 kB in trees across (160 + 4 us)."""
    across = MeshAxis("all", 64, (AxisLevel(4, FAST), AxisLevel(16, SLOW)))
    assert all_reduce([across], 72e3).time_s == pytest.approx(2 * 3.54e-6 + 164e-6)


def test_permute_goes_at_the_pace_of_the_slowest_link():
    assert permute([INSIDE], 1e6).time_s == pytest.approx(1e-6 + 10e-6)
    assert permute([INSIDE, ACROSS], 1e6).time_s == permute([BOTH], 1e6).time_s == pytest.approx(10e-6 + 100e-6)
    assert permute([BOTH], 1e6).wire_bytes == 1e6


def test_an_axis_of_one_device_costs_nothing():
    single = MeshAxis("single", 1, ())
    assert all_gather([single], 1e9).time_s == all_reduce([single], 1e9).time_s == all_to_all([single], 1e9).time_s == 0
    assert all_gather([single, INSIDE], 1e6).time_s == all_gather([INSIDE], 1e6).time_s


AXES = st.lists(
    st.builds(
        lambda n, levels: MeshAxis(f"a{n}", 2 ** len(levels), tuple(AxisLevel(2, l) for l in levels)),
        st.integers(0, 99),
        st.lists(st.sampled_from([FAST, SLOW]), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=2,
    unique_by=lambda axis: axis.name,
)
PRICES = [all_gather, reduce_scatter, all_reduce, permute, all_to_all]


@given(AXES, st.sampled_from(PRICES), st.floats(1, 1e12), st.floats(1.0, 1e3))
@settings(max_examples=100, deadline=None)
def test_prices_grow_with_bytes_and_stay_above_what_must_be_sent(axes, price, size_bytes, scale):
    small, large = price(axes, size_bytes), price(axes, size_bytes * scale)
    assert 0 < small.time_s <= large.time_s
    assert small.wire_bytes <= large.wire_bytes
    assert large.wire_bytes == pytest.approx(scale * small.wire_bytes)
    fastest = max(l.link.bandwidth_bytes_per_s for axis in axes for l in axis.levels)
    assert small.time_s >= 0.999 * small.wire_bytes / fastest


@given(AXES, st.floats(1, 1e12))
@settings(max_examples=60, deadline=None)
def test_a_ring_sends_what_each_device_lacks(axes, size_bytes):
    """Over n devices in all, (n-1)/n of the result comes from others, however the levels lie."""
    n = 1
    for axis in axes:
        n *= axis.size
    assert all_gather(axes, size_bytes).wire_bytes == pytest.approx((n - 1) / n * size_bytes)


@given(AXES, st.sampled_from(PRICES), st.floats(1, 1e9), st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_what_is_joined_pays_its_share_of_what_is_paid_once(axes, price, size_bytes, count):
    """As many as are joined pay together for one, or for each 30 MiB; above 30 MiB nothing changes."""
    c, small = price(axes, size_bytes), price(axes, 1e-9)
    assert c.fixed_s == pytest.approx(small.time_s), "what is left of an empty one"
    assert joined(c, Joining(1)).time_s == pytest.approx(c.time_s), "one alone pays in full"
    assert count * joined(small, Joining(count)).time_s == pytest.approx(small.time_s)
    if size_bytes <= 30 * 2**20:
        sending_s = c.time_s - c.fixed_s
        share = max(1 / count, size_bytes / (30 * 2**20))
        assert joined(c, Joining(count)).time_s == pytest.approx(sending_s + share * c.fixed_s)
    else:
        assert joined(c, Joining(count)) == c
