"""Device types, links, node groups and clusters: what they refuse, and what they derive."""

import dataclasses
import math

import pytest

from autoshard.cluster import AxisLevel, Cluster, DeviceType, KernelForms, Link, NodeGroup
from autoshard.errors import ClusterError

CHIP = DeviceType("Chip", {"float32": 1e12, "bfloat16": 8e12}, 32e9, 1e12, 4e-6, "example")
INTRA = Link(3e-6, 300e9, 0, "example")
INTER = Link(10e-6, 25e9, 1, "example")
FAR = Link(50e-6, 3e9, 2, "example")
OTHER_CHIP = DeviceType("Other-Chip", {"float32": 2e12}, 16e9, 1e12, 4e-6, "example")


def one_group(num_nodes, devices_per_node):
    return Cluster("example", (NodeGroup("group", CHIP, num_nodes, devices_per_node, INTRA, INTER),))


def test_peaks_are_sorted_and_may_come_as_a_mapping():
    assert CHIP.peak_flops_per_s == (("bfloat16", 8e12), ("float32", 1e12))
    assert dataclasses.replace(CHIP, peak_flops_per_s=(("float32", 1e12), ("bfloat16", 8e12))) == CHIP
    assert CHIP.memory_bytes == 32_000_000_000 and isinstance(CHIP.memory_bytes, int)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", 1e12),
        ("bfloat16", 8e12),
        ("float16", 1e12),
        ("float64", 1e12),
        ("int32", 1e12),
        ("bool", 1e12),
        ("complex64", 1e12),
        ("float8_e4m3fn", 16e12),
        ("float4_e2m1fn", 1e12),
        ("key<fry>", 1e12),
    ],
)
def test_rates_fall_back(dtype, expected):
    chip = dataclasses.replace(CHIP, peak_flops_per_s={"float32": 1e12, "bfloat16": 8e12, "float8": 16e12})
    assert chip.flops_per_s(dtype) == expected


def test_matmuls_use_tensorfloat32_and_the_efficiency():
    chip = DeviceType("c", {"float32": 1e12, "tensorfloat32": 4e12}, 1e9, 1e9, 0, "s", matmul_efficiency=0.5)
    assert chip.flops_per_s("float32") == 1e12
    assert chip.matmul_flops_per_s("float32") == 2e12
    assert chip.matmul_flops_per_s("float64") == 0.5e12
    assert chip.convolution_flops_per_s("float32") == 2e12  # as products, where nothing is said of them
    own = dataclasses.replace(chip, convolution_efficiency=0.25)
    assert own.convolution_flops_per_s("float32") == 1e12
    assert own.matmul_flops_per_s("float32") == 2e12


def test_kernels_reach_a_share_of_the_memory_s_rate():
    chip = DeviceType("c", {"float32": 1e12}, 1e9, 1e9, 0, "s", memory_efficiency=0.75)
    assert chip.memory_bandwidth_bytes_per_s == 1e9 and chip.memory_bytes_per_s == 0.75e9


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(KernelForms)])
def test_forms_of_kernels_refuse(field):
    forms = KernelForms(1.5, 1e-7, 1e-6, 1e-8)
    for value in (-1.0, math.inf, "1"):
        with pytest.raises(ClusterError):
            dataclasses.replace(forms, **{field: value})
    if field.endswith("_factor"):
        with pytest.raises(ClusterError, match=f"{field} must be at least 1"):
            dataclasses.replace(forms, **{field: 0.9})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", 3),
        ("source", " "),
        ("peak_flops_per_s", {"bfloat16": 1e12}),
        ("peak_flops_per_s", {"float32": 0}),
        ("peak_flops_per_s", {"float32": True}),
        ("peak_flops_per_s", (("float32", 1e12), ("float32", 2e12))),
        ("memory_bytes", 0),
        ("memory_bytes", 1.5),
        ("memory_bytes", 1e300),
        ("memory_bandwidth_bytes_per_s", -1.0),
        ("memory_bandwidth_bytes_per_s", math.inf),
        ("memory_bandwidth_bytes_per_s", 10**400),
        ("launch_overhead_s", math.nan),
        ("launch_overhead_s", "4e-6"),
        ("matmul_efficiency", 1.1),
        ("matmul_efficiency", 0),
        ("memory_efficiency", 1.1),
        ("memory_efficiency", 0),
        ("convolution_efficiency", 1.1),
        ("convolution_efficiency", 0),
        ("product_workspace_bytes", -1),
    ],
)
def test_device_types_refuse(field, value):
    with pytest.raises(ClusterError):
        dataclasses.replace(CHIP, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("latency_s", -1e-6), ("bandwidth_bytes_per_s", 0), ("level", -1), ("level", 0.5), ("source", "")],
)
def test_links_refuse(field, value):
    with pytest.raises(ClusterError):
        dataclasses.replace(INTRA, **{field: value})
    assert dataclasses.replace(INTRA, latency_s=0).latency_s == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"num_nodes": 0},
        {"devices_per_node": 0},
        {"devices_per_node": True},
        {"num_nodes": 1 << 20, "devices_per_node": 1 << 20},
        {"inter_node": None},
        {"inter_node": INTRA},
    ],
)
def test_node_groups_refuse(changes):
    with pytest.raises(ClusterError):
        dataclasses.replace(NodeGroup("g", CHIP, 2, 8, INTRA, INTER), **changes)


def test_clusters_refuse():
    group = NodeGroup("a", CHIP, 2, 8, INTRA, INTER)
    other = dataclasses.replace(group, name="b")
    with pytest.raises(ClusterError, match="at least one"):
        Cluster("c", ())
    with pytest.raises(ClusterError, match="distinct names"):
        Cluster("c", (group, group), FAR)
    with pytest.raises(ClusterError, match="must have between_groups"):
        Cluster("c", (group, other))
    with pytest.raises(ClusterError, match="must not be below"):
        Cluster("c", (group, other), INTRA)
    same_name = dataclasses.replace(OTHER_CHIP, name=CHIP.name)
    with pytest.raises(ClusterError, match="stands for two"):
        Cluster("c", (group, dataclasses.replace(other, device_type=same_name)), FAR)


def test_a_homogeneous_cluster_is_one_slice():
    cluster = one_group(3, 6)
    (part,) = cluster.slices()
    assert cluster.num_devices == part.num_devices == 18
    assert cluster.is_homogeneous
    assert part.levels == (AxisLevel(6, INTRA), AxisLevel(3, INTER))


def test_levels_of_size_one_are_left_out():
    assert one_group(1, 8).slices()[0].levels == (AxisLevel(8, INTRA),)
    assert one_group(4, 1).slices()[0].levels == (AxisLevel(4, INTER),)
    assert one_group(1, 1).slices()[0].levels == ()
    assert one_group(1, 1).slices()[0].num_devices == 1


def test_adjacent_equal_groups_are_one_slice_with_a_further_level():
    a = NodeGroup("a", CHIP, 2, 8, INTRA, INTER)
    b = dataclasses.replace(a, name="b")
    c = NodeGroup("c", OTHER_CHIP, 1, 4, INTRA)
    d = dataclasses.replace(a, name="d")
    cluster = Cluster("mixed", (a, b, c, d), FAR)
    slices = cluster.slices()
    assert [part.name for part in slices] == ["a+b", "c", "d"]
    assert [part.num_devices for part in slices] == [32, 4, 16]
    assert slices[0].levels == (AxisLevel(8, INTRA), AxisLevel(2, INTER), AxisLevel(2, FAR))
    assert cluster.num_devices == 52
    assert not cluster.is_homogeneous


def test_equal_groups_behind_the_same_link_fold_into_one_level():
    a = NodeGroup("a", CHIP, 2, 8, INTRA, INTER)
    cluster = Cluster("c", (a, dataclasses.replace(a, name="b")), INTER)
    assert cluster.slices()[0].levels == (AxisLevel(8, INTRA), AxisLevel(4, INTER))


def test_everything_is_hashable_and_prints():
    cluster = one_group(2, 8)
    assert hash(cluster) == hash(one_group(2, 8))
    assert str(cluster) == "example (16 devices): group: 2 nodes of 8 x Chip"
    assert str(cluster.slices()[0]) == "group: 16 x Chip (8 at level 0 x 2 at level 1)"
    assert isinstance(Link(0, 1, 0, "s").bandwidth_bytes_per_s, float)
