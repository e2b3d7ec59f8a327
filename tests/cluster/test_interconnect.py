"""How nodes and devices are joined: tiers, tori, rails and pairs, in files and as levels."""

import copy

import numpy as np
import pytest
import yaml

from autoshard.cluster import Cluster, DeviceType, Link, NodeGroup, PairSpeeds, Tier, Torus, Wires
from autoshard.cluster.splits import Split, all_splits, row_major
from autoshard.cluster.tiers import even_sizes, sorted_nodes
from autoshard.cluster.uneven import Uneven
from autoshard.cluster.wiring import part_of_level
from autoshard.errors import ClusterError, FileFormatError

CHIP = DeviceType("Chip", {"float32": 1e12}, 32e9, 1e12, 4e-6, "example")
INTRA = Link(1e-6, 400e9, 0, "example")
INTER = Link(10e-6, 50e9, 1, "example")
SPINE = Link(12e-6, 10e9, 2, "example")
CORE = Link(15e-6, 5e9, 3, "example")


def group(num_nodes=4, devices_per_node=2, **how):
    return NodeGroup("group", CHIP, num_nodes, devices_per_node, INTRA, INTER, **how)


def only_slice(own):
    return Cluster("example", (own,)).slices()[0]


# ---- tiers


def test_tiers_become_levels_and_nodes_of_one_part_lie_side_by_side():
    """Nodes 0 and 3 under one spine, 1 and 2 under the other."""
    part = only_slice(group(tiers=(Tier("spine", (7, 5, 5, 7), SPINE),)))
    assert [(level.size, level.link) for level in part.levels] == [(2, INTRA), (2, INTER), (2, SPINE)]
    assert part.order == (0, 1, 6, 7, 2, 3, 4, 5)
    assert part.uneven is None
    assert part.logical_mesh({"data": 2, "tensor": 4}).order == part.order


def test_parts_in_turn_need_no_order():
    part = only_slice(group(tiers=(Tier("spine", (0, 0, 1, 1), SPINE),)))
    assert part.order == () and part.logical_mesh({"data": 8}).order == ()


def test_two_tiers_nest():
    tiers = (Tier("rack", (0, 1, 2, 3, 0, 1, 2, 3), SPINE), Tier("pod", (0, 1, 0, 1, 0, 1, 0, 1), CORE))
    assert even_sizes(tiers, 8) == (2, 2, 2)
    assert sorted_nodes(tiers, 8) == (0, 4, 2, 6, 1, 5, 3, 7)
    with pytest.raises(ClusterError, match=r"nodes of one rack must be in one pod; node 4 of rack 0 is in pod 1"):
        group(8, tiers=(tiers[0], Tier("pod", (0, 1, 0, 1, 1, 1, 0, 1), CORE)))


@pytest.mark.parametrize(
    ("tiers", "text"),
    [
        ((Tier("spine", (0, 1), SPINE),), "part of each of the 4 nodes; received 2"),
        ((Tier("spine", (0, 0, 1, 1), INTER),), "level of tier 'spine' must be above .* 1; received 1"),
    ],
)
def test_tiers_that_contradict(tiers, text):
    with pytest.raises(ClusterError, match=text):
        group(tiers=tiers)


def test_uneven_tiers_are_known_pair_by_pair():
    """Three nodes under one spine and one under the other: no levels, but the slowest link everywhere."""
    part = only_slice(group(tiers=(Tier("spine", (0, 1, 0, 0), SPINE),)))
    assert [(level.size, level.link) for level in part.levels] == [(2, INTRA), (4, SPINE)]
    assert part.order == (0, 1, 4, 5, 6, 7, 2, 3)
    assert part.uneven is not None
    near, far, uneven = (
        part.uneven.levels_of([0, 2, 3]),
        part.uneven.levels_of([0, 1]),
        part.uneven.levels_of([0, 1, 2, 3]),
    )
    assert [(level.size, level.link.bandwidth_bytes_per_s) for level in near] == [(3, 50e9)]
    assert [(level.size, level.link.bandwidth_bytes_per_s) for level in far] == [(2, 10e9)]
    assert [(level.size, level.link.bandwidth_bytes_per_s) for level in uneven] == [(4, 10e9)]  # three and one


# ---- pairs


def pairs(rows, latency_s=1e-6):
    count = len(rows)
    return PairSpeeds(tuple(map(tuple, rows)), ((latency_s,) * count,) * count, "example")


def test_pairs_of_about_one_speed_are_one_tier():
    """Two pairs at 50 and 45 GB/s, all others at 10 to 12: a group of four is two levels, each at its slowest pair."""
    rows = [[0, 50e9, 11e9, 10e9], [50e9, 0, 12e9, 11e9], [11e9, 12e9, 0, 45e9], [10e9, 11e9, 45e9, 0]]
    uneven = Uneven.of_pairs((), pairs(rows), 0)
    assert uneven.tier_of_pair == ((0, 0, 1, 1), (0, 0, 1, 1), (1, 1, 0, 0), (1, 1, 0, 0))
    levels = uneven.levels_of([0, 1, 2, 3])
    assert [(level.size, level.link.bandwidth_bytes_per_s, level.link.level) for level in levels] == [
        (2, 45e9, 0),
        (2, 10e9, 1),
    ]
    assert [level.size for level in uneven.levels_of([0, 2])] == [2]


def test_of_two_ways_the_slower_counts():
    own = PairSpeeds(((0, 5e9), (4e9, 0)), ((0, 1e-6), (3e-6, 0)), "example")
    assert own.bandwidth_bytes_per_s == ((0, 4e9), (4e9, 0)) and own.latency_s == ((0, 3e-6), (3e-6, 0))
    assert own.slowest == (3e-6, 4e9)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"pairs": pairs([[1e9] * 3] * 3)}, "its 4 nodes or 8 devices; received 3 rows"),
        ({"pairs": pairs([[1e9] * 4] * 4), "rails": INTER}, "give pairs alone"),
        ({"torus": Torus((2, 2), (True, True))}, r"must hold the devices of a node; received \(2, 2\) for 2"),
    ],
)
def test_groups_that_contradict(how, text):
    with pytest.raises(ClusterError, match=text):
        group(**how)


def test_pairs_need_figures():
    with pytest.raises(ClusterError, match=r"pairs\[0\]\[1\].* above zero; received 0"):
        pairs([[0, 0], [1e9, 0]])
    with pytest.raises(ClusterError, match="as many rows and columns"):
        pairs([[0, 1e9], [1e9]])


# ---- tori


def wires_used(size, closes, stride, members):
    """The most groups that use one wire in one direction, when each sends around its members both ways."""
    used = {}
    for first in range(size):
        if first % (stride * members) >= stride:
            continue
        own = [first + stride * k for k in range(members)]
        goes_round = closes and stride * members == size
        hops = [(a, b) for a, b in zip(own, own[1:] + own[:1], strict=True)]
        for a, b in hops if goes_round else hops[:-1]:
            for step in range((b - a) % size):
                for wire in ((a + step) % size, "up"), ((a + step) % size, "down"):
                    used[wire] = used.get(wire, 0) + 1
    return max(used.values())


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize(("stride", "members"), [(1, 8), (1, 4), (2, 4), (4, 2), (1, 2), (2, 2)])
def test_a_part_of_a_torus_axis_has_its_share_of_the_wires(closes, stride, members):
    """Counted wire by wire: a ring that goes round uses both ways at once, a line only one at a time."""
    level = Torus((8,), (closes,)).levels(INTRA)[0]
    part = part_of_level(level, stride, members)
    goes_round = closes and stride * members == 8 and members > 2
    both_ways = 2 if goes_round else 1
    wire = INTRA.bandwidth_bytes_per_s / 2
    assert part.link.bandwidth_bytes_per_s == both_ways * wire / wires_used(8, closes, stride, members)
    assert part.link.wires is (Wires.CLOSED if goes_round else Wires.OPEN)


def test_axes_of_a_torus_are_levels():
    levels = Torus((4, 1, 2, 8), (True, True, True, False)).levels(INTRA)
    assert [(level.size, level.link.wires) for level in levels] == [
        (8, Wires.OPEN),
        (2, Wires.OPEN),  # two chips have one wire
        (4, Wires.CLOSED),
    ]


def test_a_group_of_chips_is_seen_as_what_it_takes_of_each_axis():
    part = only_slice(NodeGroup("chips", CHIP, 1, 32, INTRA, torus=Torus((4, 8), (True, True))))
    number = np.arange(32).reshape(4, 8)
    found = lambda chips: [(level.size, level.link.bandwidth_bytes_per_s / 1e9) for level in part.levels_between(chips)]
    assert found(number[:, 0]) == [(4, 400)]
    assert found(number[0, ::2]) == [(4, 200)]
    assert found(number[0, :4]) == [(4, 200)]
    assert found(number[:2, :2].reshape(-1)) == [(2, 200), (2, 200)]
    assert found([0, 1, 3]) == [(3, 400)]  # no grid


# ---- splits


def test_row_major_is_the_split_that_counts_in_turn():
    split = row_major([8, 2], [4, 2, 2])
    assert split is not None and split.places([4, 2, 2]).tolist() == list(range(16))
    assert split.parts == (((2, 2), (1, 2), (0, 2)), ((0, 2),))
    assert row_major([6, 3], [2, 9]) is None


def test_all_splits_are_different_orders_of_all_places():
    every = list(all_splits([4, 2], [4, 2], [False, False]))
    assert {split.parts for split in every} == {
        (((0, 4),), ((1, 2),)),
        (((1, 2), (0, 2)), ((0, 2),)),
    }
    torus = list(all_splits([4, 4], [4, 4], [True, True]))
    places = [tuple(split.places([4, 4]).tolist()) for split in torus]
    assert len(set(places)) == len(places) == 2 + 4  # one axis each, or two by two in either order on both
    assert all(sorted(own) == list(range(16)) for own in places)
    assert Split((((0, 4),), ((1, 4),))).places([4, 4]).reshape(4, 4)[:, 0].tolist() == [0, 1, 2, 3]


# ---- files

FILE = {
    "format": "autoshard-cluster",
    "version": 3,
    "name": "example",
    "groups": [
        {
            "name": "h100",
            "device_type": "H100-SXM",
            "num_nodes": 8,
            "devices_per_node": 8,
            "intra_node": "NVLink4",
            "inter_node": "InfiniBand-NDR",
            "rails": "InfiniBand-NDR",
            "tiers": [
                {"name": "rack", "nodes_each": 2, "oversubscription": 2},
                {"name": "spine", "part_of_node": [0, 0, 1, 1, 0, 0, 1, 1], "oversubscription": 4},
            ],
        }
    ],
}
TORUS = {
    "name": "chips",
    "device_type": "TPU-v4",
    "num_nodes": 1,
    "devices_per_node": 128,
    "intra_node": "ICI-v4-torus",
}


def read(tmp_path, data):
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(data))
    return Cluster.from_file(path)


def with_group(**changes):
    data = copy.deepcopy(FILE)
    data["groups"][0] |= changes
    return data


def test_a_file_with_tiers(tmp_path):
    (own,) = read(tmp_path, FILE).groups
    assert [tier.part_of_node for tier in own.tiers] == [(0, 0, 1, 1, 2, 2, 3, 3), (0, 0, 1, 1, 0, 0, 1, 1)]
    rates = [level.link.bandwidth_bytes_per_s for level in own.levels]
    assert rates[2:] == [rates[1] / 2, rates[1] / 8]
    assert [level.link.level for level in own.levels] == [0, 1, 2, 3]
    assert [level.size for level in own.levels] == [8, 2, 2, 2]
    assert "Oversubscribed 4 to one" in own.tiers[1].link.source


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tiers": [{"name": "spine", "part_of_node": [0, 0, 0, 1, 1, 1, 1, 1], "link": "InfiniBand-NDR"}]},
        {
            "tiers": [],
            "rails": None,
            "pairs": {"bandwidth_bytes_per_s": [[0, 2e9], [1e9, 0]], "source": "s"},
            "num_nodes": 2,
        },
        TORUS
        | {"tiers": [], "rails": None, "inter_node": None, "torus": {"shape": [4, 4, 8], "wraps": [True, True, False]}},
    ],
)
def test_files_come_back_as_they_were(tmp_path, change):
    cluster = read(tmp_path, with_group(**change))
    assert cluster.to_dict()["version"] == 3
    cluster.to_file(tmp_path / "written.yaml")
    assert Cluster.from_file(tmp_path / "written.yaml") == cluster
    assert Cluster.from_file(tmp_path / "written.yaml").slices() == cluster.slices()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tiers": [{"name": "rack", "oversubscription": 2}]}, "either nodes_each or part_of_node"),
        ({"tiers": [{"name": "rack", "nodes_each": 2}]}, "either link or oversubscription"),
        ({"tiers": [{"name": "rack", "nodes_each": 2, "oversubscription": 0.5}]}, "oversubscription of at least 1"),
        ({"tiers": [{"name": "rack", "nodes_each": 0, "oversubscription": 2}]}, "nodes_each of at least 1"),
        ({"tiers": [{"name": "rack", "nodes_of": 2}]}, "unknown key 'nodes_of'"),
        ({"inter_node": None, "num_nodes": 1, "rails": None}, "has tiers and so must have an inter_node"),
        ({"torus": {"shape": [8], "wraps": [True, False]}}, "a size and a `wraps` for each axis"),
    ],
)
def test_what_a_file_must_say(tmp_path, change, text):
    with pytest.raises((ClusterError, FileFormatError), match=text):
        read(tmp_path, with_group(**change))
