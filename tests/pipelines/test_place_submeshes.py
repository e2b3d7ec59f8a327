"""Which blocks of devices submeshes take: against all permutations, and where links are uneven or have rails."""

import dataclasses
import importlib.util
import itertools
import pathlib

import pytest

from autoshard.cluster import Cluster, Link, NodeGroup, PairSpeeds, Tier
from autoshard.pipelines.schedule.tasks import ScheduleKind
from autoshard.pipelines.search.arrangement import Arrangement, Pipeline, Stage, Submesh
from autoshard.pipelines.search.place_submeshes import placed_submeshes
from autoshard.pipelines.search.replica_group import arrangement_step_s
from autoshard.pipelines.search.topology import Topology

_spec = importlib.util.spec_from_file_location("case", pathlib.Path(__file__).with_name("case.py"))
case = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(case)

SPINE = Link(5e-6, 1e9, 2, "made up")
DEVICE = case.cluster(8).groups[0].device_type


def nodes(count, per_node=1, **how):
    return Cluster("nodes", (NodeGroup("nodes", DEVICE, count, per_node, case.INSIDE, case.BETWEEN, **how),))


def two_by_two(first_devices, option=0):
    """Two replicas of two stages, each on one device."""
    stages = Stage(0, 1), Stage(1, 2)
    rows = first_devices[:2], first_devices[2:]
    return Arrangement(
        tuple(Pipeline(tuple(Submesh(0, n, option) for n in row), stages, 1, 2, ScheduleKind.GPIPE) for row in rows)
    )


def step_s(context, order):
    return arrangement_step_s(context, two_by_two(order))


@pytest.mark.parametrize(("weight", "example_bytes"), [(1e9, 1e3), (1e3, 1e9), (2e8, 2e8)])
@pytest.mark.parametrize("spine_of_node", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1)])
def test_no_other_places_are_better(weight, example_bytes, spine_of_node):
    """Stages that send much to each other go under one spine; replicas of one stage, if weights are what is sent."""
    cluster = nodes(4, tiers=(Tier("spine", spine_of_node, SPINE),))
    table = case.plain_table(cluster, 1, (1,), weight=weight)
    context = case.context(case.chain([0, 0], example_bytes), table, cluster, 1e12)
    found = placed_submeshes(context, two_by_two((0, 1, 2, 3)))
    best = min(step_s(context, order) for order in itertools.permutations(range(4)))
    assert arrangement_step_s(context, found) == pytest.approx(best)
    assert sorted(s.first_device for p in found.pipelines for s in p.submeshes) == [0, 1, 2, 3]


def test_replicas_that_add_large_gradients_are_brought_together():
    cluster = nodes(4, tiers=(Tier("spine", (0, 0, 1, 1), SPINE),))
    table = case.plain_table(cluster, 1, (1,), weight=1e9)
    context = case.context(case.chain([0, 0], 1e3), table, cluster, 1e12)
    arrangement = two_by_two((0, 1, 2, 3))
    found = placed_submeshes(context, arrangement)
    assert arrangement_step_s(context, found) < arrangement_step_s(context, arrangement)
    (one, other) = ([s.first_device // 2 for s in p.submeshes] for p in found.pipelines)
    assert one == other and len(set(one)) == 2


def test_equal_links_change_nothing():
    cluster = nodes(4)
    table = case.plain_table(cluster, 1, (1,), weight=1e9)
    context = case.context(case.chain([0, 0], 1e6), table, cluster, 1e12)
    arrangement = two_by_two((0, 1, 2, 3))
    assert placed_submeshes(context, arrangement) is arrangement


def test_uneven_pairs_are_as_fast_as_the_slowest_that_is_crossed():
    rates = ((0, 8e9, 2e9), (8e9, 0, 1e9), (2e9, 1e9, 0))
    pairs = PairSpeeds(rates, ((1e-6,) * 3,) * 3, "made up")
    cluster = nodes(3, 2, pairs=pairs)
    topology = Topology(cluster, case.plain_table(cluster, 1, (1,), counts=(1, 2)))
    order = cluster.slices()[0].order or tuple(range(6))
    at = lambda node: order.index(2 * node)
    speed = lambda a, b, option: topology.speed(Submesh(0, a, option), Submesh(0, b, option)).bandwidth_bytes_per_s
    for one, other in itertools.combinations(range(3), 2):
        assert speed(at(one), at(other), 1) == rates[one][other]
    assert speed(at(0), at(0) + 1, 0) == case.INSIDE.bandwidth_bytes_per_s
    least = topology.near_s_per_byte(1)
    assert least.tolist() == pytest.approx([0, 1 / 16e9, 2 / 16e9])  # no submesh has better neighbours


def test_rails_join_equal_numbers():
    """Two nodes of four: devices 0 and 1 of one node are on the rails of 0 and 1 of the other, not of 2 and 3."""
    slower = dataclasses.replace(case.BETWEEN, bandwidth_bytes_per_s=3e9)
    cluster = nodes(2, 4, rails=slower)
    topology = Topology(cluster, case.plain_table(cluster, 1, (1,), counts=(2, 4)))
    speed = lambda a, b, option: topology.speed(Submesh(0, a, option), Submesh(0, b, option)).bandwidth_bytes_per_s
    assert speed(0, 4, 0) == case.BETWEEN.bandwidth_bytes_per_s
    assert speed(0, 6, 0) == 3e9
    assert speed(0, 2, 0) == case.INSIDE.bandwidth_bytes_per_s
    assert speed(0, 4, 1) == case.BETWEEN.bandwidth_bytes_per_s
