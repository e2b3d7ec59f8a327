"""The order of the devices: against all permutations, never worse than as listed, and the same for a cluster by any
name."""

import dataclasses
import functools
import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from autoshard.cluster import (
    Cluster,
    CollectiveKind,
    DeviceType,
    Link,
    LogicalMesh,
    MeshAxis,
    NodeGroup,
    PairSpeeds,
    Tier,
    Torus,
)
from autoshard.cost.collectives import all_gather
from autoshard.placement.candidates import candidate_meshes, is_plain
from autoshard.placement.flows import Flow, flow_of, joined_flows, total_s
from autoshard.placement.level_bytes import level_bytes
from autoshard.placement.place import listed_mesh, place, placements

CHIP = DeviceType("Chip", {"float32": 1e12}, 32e9, 1e12, 4e-6, "example")
INTRA = Link(0.0, 400e9, 0, "example")
INTER = Link(0.0, 50e9, 1, "example")
SPINE = Link(0.0, 10e9, 2, "example")
KINDS = list(CollectiveKind)


def slice_of(num_nodes, devices_per_node, **how):
    group = NodeGroup("group", CHIP, num_nodes, devices_per_node, INTRA, INTER, **how)
    return Cluster("example", (group,)).slices()[0]


def spines(*part_of_node, devices_per_node=2):
    return slice_of(len(part_of_node), devices_per_node, tiers=(Tier("spine", part_of_node, SPINE),))


def mesh_of(part, **axes):
    return listed_mesh(part, tuple(axes), tuple(axes.values()))


def flows_for(names, seed):
    """Some traffic along each axis, and along all of them together."""
    random = np.random.default_rng(seed)
    own = [Flow(KINDS[random.integers(5)], (name,), float(random.integers(1, 9)) * 1e9, 0.0) for name in names]
    return (*own, Flow(CollectiveKind.ALL_REDUCE, tuple(names), 1e8, 0.0))


class AnyOrder:
    """What traffic takes with the devices of a slice in any order: each axis has the levels of its slowest group."""

    def __init__(self, part, names, sizes, flows):
        self.part, self.names, self.sizes, self.flows = part, names, sizes, flows
        self.levels = functools.cache(part.levels_between)

    def seconds(self, order):
        grid = np.array(order).reshape(self.sizes)
        axes = []
        for axis, (name, size) in enumerate(zip(self.names, self.sizes, strict=True)):
            lines = {tuple(sorted(line)) for line in np.moveaxis(grid, axis, -1).reshape(-1, size).tolist()}
            every = [MeshAxis(name, size, self.levels(line)) for line in lines]
            axes.append(max(every, key=lambda own: all_gather([own], 1e9).time_s))
        return total_s(self.flows, axes)


@pytest.mark.parametrize("part_of_node", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)])
@pytest.mark.parametrize("seed", range(3))
def test_no_permutation_of_six_or_eight_devices_is_better(part_of_node, seed):
    """Brute force over every order of the devices, those that tear nodes apart included."""
    part = spines(*part_of_node, devices_per_node=2)
    names, sizes = ("data", "tensor"), (2, 4)
    flows = flows_for(names, seed)
    found = place(part, mesh_of(part, data=2, tensor=4), flows)
    seen, any_order = {}, AnyOrder(part, names, sizes, flows)
    for order in itertools.permutations(range(8)):
        if order[0] != 0 or order[1] > order[2] or order[2] > order[3]:
            continue  # renumbered along an axis
        groups = (
            frozenset(frozenset(order[k : k + 4]) for k in (0, 4)),
            frozenset(frozenset(order[k::4]) for k in range(4)),
        )
        if groups not in seen:
            seen[groups] = any_order.seconds(order)
    assert found.is_exact
    assert found.comm_s == pytest.approx(min(seen.values()))
    assert found.bound_s <= found.comm_s * (1 + 1e-9)
    assert found.comm_s == pytest.approx(AnyOrder(part, names, sizes, flows).seconds(found.mesh.device_numbers))


def random_pairs(seed, count):
    random = np.random.default_rng(seed)
    rates = random.choice([50e9, 20e9, 8e9], (count, count))
    as_tuples = lambda matrix: tuple(map(tuple, matrix.tolist()))
    return PairSpeeds(as_tuples(rates), as_tuples(np.zeros((count, count))), "example")


@pytest.mark.parametrize("seed", range(4))
def test_pairs_of_nodes_are_placed_exactly(seed):
    """Six nodes with random speeds between pairs, against every order of the nodes."""
    part = slice_of(6, 1, pairs=random_pairs(seed, 6))
    names, sizes = ("data", "tensor"), (2, 3)
    flows = flows_for(names, seed)
    found = place(part, mesh_of(part, data=2, tensor=3), flows)
    best = min(map(AnyOrder(part, names, sizes, flows).seconds, itertools.permutations(range(6))))
    assert found.is_exact
    assert found.comm_s == pytest.approx(best)
    assert found.bound_s <= best * (1 + 1e-9)


@settings(deadline=None, max_examples=25)
@given(
    parts=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    seed=st.integers(0, 99),
    sizes=st.sampled_from([(16,), (4, 4), (2, 8), (8, 2), (4, 2, 2)]),
)
def test_never_worse_than_as_listed_and_never_below_the_bound(parts, seed, sizes):
    part = spines(*parts)
    names = ("data", "fsdp", "tensor")[: len(sizes)]
    flows = flows_for(names, seed)
    listed = listed_mesh(part, names, sizes)
    found = place(part, listed, flows)
    assert found.listed_s == pytest.approx(total_s(flows, listed.axes))
    assert found.bound_s * (1 - 1e-9) <= found.comm_s <= found.listed_s * (1 + 1e-9)
    assert sorted(found.mesh.device_numbers) == list(range(16))
    assert found.comm_s == pytest.approx(AnyOrder(part, names, sizes, flows).seconds(found.mesh.device_numbers))


@settings(deadline=None, max_examples=20)
@given(parts=st.permutations([0, 0, 0, 0, 1, 1, 1, 1]), seed=st.integers(0, 99))
def test_a_cluster_whose_nodes_are_listed_otherwise_costs_the_same(parts, seed):
    flows = flows_for(("data", "tensor"), seed)
    one, other = spines(0, 0, 0, 0, 1, 1, 1, 1), spines(*parts)
    costs = [place(part, mesh_of(part, data=4, tensor=4), flows).comm_s for part in (one, other)]
    assert costs[0] == pytest.approx(costs[1])


@pytest.mark.parametrize("parts", [(0, 0, 0, 1, 1, 1, 1, 1), (1, 0, 1, 1, 0, 1, 0, 1), (0, 1, 1, 1, 1, 0, 0, 1)])
def test_an_uneven_cluster_whose_nodes_are_listed_otherwise_costs_the_same(parts):
    flows = flows_for(("data", "tensor"), 7)
    found = place(spines(*parts), mesh_of(spines(*parts), data=4, tensor=4), flows)
    same = place(spines(0, 0, 0, 1, 1, 1, 1, 1), mesh_of(spines(*parts), data=4, tensor=4), flows)
    assert found.is_exact and same.is_exact
    assert found.comm_s == pytest.approx(same.comm_s)


def test_nodes_of_two_spines_in_turn():
    """Eight nodes of two, under two spines in turn. The axis that sends goes inside a spine, where listed order has it
    cross: 0.8 GB over 8 devices, 400 MB in the node at 400 GB/s, and three quarters of the other 400 at 50 GB/s.
    """
    part = spines(0, 1, 0, 1, 0, 1, 0, 1)
    flows = (Flow(CollectiveKind.ALL_GATHER, ("tensor",), 0.8e9, 0.0),)
    found = place(part, mesh_of(part, data=2, tensor=8), flows)
    assert found.comm_s == pytest.approx(0.4e9 / 400e9 + 0.3e9 / 50e9)
    # listed: two nodes of each spine, so half of 400 MB at 50 GB/s and half of 200 MB at 10 GB/s
    assert found.listed_s == pytest.approx(0.4e9 / 400e9 + 0.2e9 / 50e9 + 0.1e9 / 10e9)
    assert found.bound_s == pytest.approx(found.comm_s)
    groups = np.array(found.mesh.device_numbers).reshape(2, 8) // 2 % 2
    assert (groups == groups[:, :1]).all()


def test_a_torus_gives_the_busy_axis_more_wires():
    """4 x 4 x 8 chips. As listed, an axis of 16 takes a ring of 8 and half of one of 4, which is three wires of a chip
    at 50 GB/s; no order gives it more than four.
    """
    ici = Link(0.0, 100e9, 0, "example")
    group = NodeGroup("chips", CHIP, 1, 128, ici, torus=Torus((4, 4, 8), (True, True, True)))
    part = Cluster("example", (group,)).slices()[0]
    flows = (Flow(CollectiveKind.ALL_GATHER, ("tensor",), 1.6e9, 0.0),)
    found = place(part, mesh_of(part, data=8, tensor=16), flows)
    assert found.listed_s == pytest.approx(1.5e9 / 150e9)
    assert found.comm_s == pytest.approx(1.5e9 / 200e9) == pytest.approx(found.bound_s)
    assert found.comm_s == pytest.approx(
        AnyOrder(part, ("data", "tensor"), (8, 16), flows).seconds(found.mesh.device_numbers)
    )


def test_every_placement_of_an_even_slice_is_one_of_its_levels():
    part = slice_of(2, 4)
    every = list(placements(part, ("data", "tensor"), (4, 2)))
    assert {tuple(tuple(level.size for level in axis.levels) for axis in mesh.axes) for mesh in every} == {
        ((4,), (2,)),
        ((2, 2), (2,)),
    }


def test_plain_clusters_are_searched_as_before():
    part = slice_of(2, 8)
    assert is_plain(part) and candidate_meshes(part, 3) == part.logical_meshes(3)


def test_candidates_suit_each_axis_in_turn():
    """On a torus of 4 x 8 an axis of 4 may be the ring of 4 or half a ring of 8."""
    group = NodeGroup("chips", CHIP, 1, 32, INTRA, torus=Torus((4, 8), (True, True)))
    part = Cluster("example", (group,)).slices()[0]
    found = candidate_meshes(part, 2)
    sizes = [mesh.shape for mesh in found]
    assert sizes[0] == (32,) and {(16, 2), (8, 4)} <= set(sizes)
    assert all(list(shape) == sorted(shape, reverse=True) for shape in sizes)
    assert len({mesh.axes for mesh in found}) == len(found) <= 8
    eight_four = [mesh for mesh in found if mesh.shape == (8, 4)]
    assert any(all(len(axis.levels) == 1 for axis in mesh.axes) for mesh in eight_four)


# ---- flows


def test_a_flow_takes_as_long_as_its_collectives():
    part = slice_of(2, 4)
    mesh = part.logical_mesh({"data": 4, "tensor": 2})
    own = flow_of(CollectiveKind.ALL_REDUCE, ("data",), 3e9, 0.05, 12, mesh)
    assert own.size_bytes == pytest.approx(2e9)
    slow = dataclasses.replace(INTER, latency_s=1e-5)
    late = LogicalMesh(
        tuple(
            dataclasses.replace(axis, levels=tuple(dataclasses.replace(l, link=slow) for l in axis.levels))
            for axis in mesh.axes
        ),
        CHIP,
    )
    bare = Flow(CollectiveKind.ALL_REDUCE, ("data",), 2e9, 0.0).seconds(late.axes)
    paid = flow_of(CollectiveKind.ALL_REDUCE, ("data",), 3e9, bare + 5e-5, 12, late)
    assert paid.seconds(late.axes) == pytest.approx(bare + 5e-5)


def test_joined_flows_take_what_their_parts_take():
    one = Flow(CollectiveKind.ALL_GATHER, ("data",), 1e9, 3.0)
    found = joined_flows([one, one, Flow(CollectiveKind.ALL_GATHER, ("tensor",), 0.0, 1.0)])
    assert found == (Flow(CollectiveKind.ALL_GATHER, ("data",), 2e9, 6.0),)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_levels_add_up_to_what_is_sent(kind):
    part = spines(0, 0, 1, 1)
    mesh = part.logical_mesh({"data": 8})
    flow = Flow(kind, ("data",), 8e9, 0.0)
    found = level_bytes([flow], mesh.axes)
    shares = {"all-gather": 7 / 8, "reduce-scatter": 7 / 8, "all-reduce": 7 / 4, "all-to-all": 7 / 8}
    assert sum(level.sent_bytes for level in found) == pytest.approx(8e9 * shares.get(kind.value, 1.0))
    assert sum(l.sent_bytes / l.bandwidth_bytes_per_s for l in found) == pytest.approx(flow.seconds(mesh.axes))


def test_axes_that_cross_the_same_spines_cross_them_once_together():
    """Four nodes of two under two spines, listed so that both axes cross the spines. All devices together have two
    spines of two nodes of two, whatever the order.
    """
    part = spines(0, 1, 1, 0)
    together = Flow(CollectiveKind.ALL_GATHER, ("data", "tensor"), 8e9, 0.0)
    listed = mesh_of(part, data=2, tensor=4)
    assert [[level.link.level for level in axis.levels] for axis in listed.axes] == [[2], [0, 2]]
    wanted = together.seconds(part.logical_mesh({"data": 2, "tensor": 4}).axes)
    assert wanted == pytest.approx(8e9 * (1 / 2 / 400e9 + 1 / 4 / 50e9 + 1 / 8 / 10e9))
    assert together.seconds(listed.axes) >= wanted
    full = mesh_of(spines(0, 1, 0, 1, 1, 0, 1, 0), data=4, tensor=4)
    assert [[level.link.level for level in axis.levels] for axis in full.axes] == [[1, 2], [0, 2]]
    best = spines(0, 1, 0, 1, 1, 0, 1, 0).logical_mesh({"data": 4, "tensor": 4})
    assert together.seconds(full.axes) == pytest.approx(together.seconds(best.axes))
