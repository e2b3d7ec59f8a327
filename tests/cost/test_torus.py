"""Collectives over several axes of a torus: the closed form against a linear program over all orders of the axes."""

import itertools
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from scipy.optimize import linprog

from autoshard.cluster import AxisLevel, Cluster, DeviceType, Link, MeshAxis, NodeGroup, Torus, Wires
from autoshard.cluster.wiring import joined_parts, part_of_level
from autoshard.cost.collectives import all_gather, all_reduce, all_to_all
from autoshard.cost.torus import as_one_ring
from autoshard.placement.place import placements

ICI = Link(1e-6, 100e9, 0, "example")


def level(size, bandwidth_bytes_per_s):
    return AxisLevel(size, Link(1e-6, bandwidth_bytes_per_s, 0, "example", wires=Wires.CLOSED))


@settings(deadline=None, max_examples=60)
@given(
    axes=st.lists(
        st.tuples(st.sampled_from([2, 3, 4, 8]), st.sampled_from([25e9, 50e9, 100e9])), min_size=2, max_size=3
    )
)
def test_no_mix_of_orders_is_faster(axes):
    """Each order of the axes takes a share of the bytes; the axis that is busy longest decides, and shares are free."""
    loads = []
    for order in itertools.permutations(range(len(axes))):
        load, whole = [0.0] * len(axes), 1.0
        for axis in order:
            n, w = axes[axis]
            load[axis] = whole * (n - 1) / n / w
            whole /= n
        loads.append(load)
    by_axis = np.array(loads).T * 1e9
    count = by_axis.shape[1]
    found = linprog(
        [*[0.0] * count, 1.0],
        A_ub=np.hstack([by_axis, -np.ones((len(axes), 1))]),
        b_ub=np.zeros(len(axes)),
        A_eq=[[*[1.0] * count, 0.0]],
        b_eq=[1.0],
    )
    ring = as_one_ring([level(*axis) for axis in axes])
    n = math.prod(size for size, _ in axes)
    assert ring.size == n
    assert (n - 1) / n * 1e9 / ring.link.bandwidth_bytes_per_s == pytest.approx(found.fun, rel=1e-6)


def only_slice(torus):
    device = DeviceType("Chip", {"float32": 1e12}, 32e9, 1e12, 4e-6, "example")
    group = NodeGroup("chips", device, 1, math.prod(torus.shape), ICI, torus=torus)
    return Cluster("example", (group,)).slices()[0]


def axis(name, levels):
    return MeshAxis(name, math.prod(part.size for part in levels), tuple(levels))


def test_two_axes_of_a_torus_have_twice_the_bandwidth_of_one():
    """1.6 GB over 4 x 4: 15/16 of it through four wires (200 GB/s) and 3 + 3 hops; the same as one axis or two."""
    levels = Torus((4, 4), (True, True)).levels(ICI)
    for axes in ([axis("both", levels)], [axis("x", levels[1:]), axis("y", levels[:1])]):
        assert all_gather(axes, 1.6e9).time_s == pytest.approx(1.5e9 / 200e9 + 6e-6)
        assert all_reduce(axes, 1.6e9).time_s == pytest.approx(2 * (1.5e9 / 200e9 + 6e-6))
        assert all_gather(axes, 1.6e9).wire_bytes == pytest.approx(1.5e9)


def test_all_chips_together_have_all_wires_however_axes_share_them():
    """4 x 8 chips: whatever two axes take of it, both together go round both rings."""
    part = only_slice(Torus((4, 8), (True, True)))
    for sizes in ((16, 2), (8, 4), (2, 16), (4, 8)):
        for mesh in placements(part, ("data", "tensor"), sizes):
            assert all_gather(mesh.axes, 3.2e9).time_s == pytest.approx(3.1e9 / 200e9 + 10e-6)
            exchanged = all_to_all(mesh.axes, 1e9)
            assert exchanged.time_s - exchanged.fixed_s == pytest.approx(2e9 / 100e9)


def test_parts_that_go_on_from_each_other_are_one():
    """Of a ring of 8: neighbours by two, every second by two, and the two halves. The first two together are a line."""
    (ring,) = Torus((8,), (True,)).levels(ICI)
    near, next_, far = (part_of_level(ring, stride, 2) for stride in (1, 2, 4))
    assert joined_parts([far, near, next_]) == [ring]
    assert joined_parts([next_, near]) == [part_of_level(ring, 1, 4)]
    assert joined_parts([far, near]) == [near, far]
    assert part_of_level(part_of_level(ring, 2, 4), 2, 2) == far


def test_an_exchange_goes_a_quarter_of_the_way_round():
    """1 GB on each of 4 x 8 chips: the longer axis carries 8 / 4 GB a chip at 100 GB/s."""
    levels = Torus((4, 8), (True, True)).levels(ICI)
    found = all_to_all([axis("both", levels)], 1e9)
    assert found.time_s - found.fixed_s == pytest.approx(8 / 4 * 1e9 / 100e9)
    assert found.wire_bytes == pytest.approx(31 / 32 * 1e9)


def test_a_torus_and_the_network_around_it_are_two_levels():
    torus = Torus((2, 4), (True, True)).levels(ICI)
    network = AxisLevel(2, Link(1e-4, 10e9, 1, "example"))
    found = all_gather([axis("all", (*torus, network))], 1.6e9)
    inside = all_gather([axis("inside", torus)], 1.6e9).time_s
    assert found.time_s == pytest.approx(inside + 1e-4 + 0.5 * 0.2e9 / 10e9)
