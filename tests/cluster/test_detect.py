"""Describing live devices: the CPU devices of this process, and lists of device kinds as other machines give them."""

import dataclasses
import itertools
import pathlib

import jax
import pytest

from autoshard.cluster import Cluster, Host
from autoshard.cluster.catalogue import catalogue
from autoshard.cluster.detect import SeenDevice, cluster_from_seen
from autoshard.cluster.wiring import Torus
from autoshard.errors import ClusterError

CLUSTERS = pathlib.Path(__file__).parents[2] / "configs" / "clusters"

H100 = "NVIDIA H100 80GB HBM3"
V100 = "Tesla V100-SXM2-32GB"


def test_the_live_devices_are_described():
    cluster = Cluster.detect()
    assert cluster.num_devices == len(jax.devices())
    if jax.default_backend() == "cpu":
        assert cluster.groups[0].device_type.name == "CPU-generic"
        assert cluster.is_homogeneous


def test_equal_nodes_form_a_group():
    (group,) = Cluster(*cluster_from_seen([SeenDevice(H100, device // 8) for device in range(24)])).groups
    assert (group.device_type.name, group.num_nodes, group.devices_per_node) == ("H100-SXM", 3, 8)
    assert group.intra_node.bandwidth_bytes_per_s == 450e9
    assert group.inter_node.bandwidth_bytes_per_s == 50e9


def test_the_link_to_the_host_is_that_of_the_device():
    """An H100 is on PCIe 5, a V100 on PCIe 3, by their data sheets; of CPUs there is none."""
    host = Host(64, 10**12, "test")
    for kind, bandwidth in ((H100, 64e9), (V100, 16e9)):
        (group,) = Cluster(*cluster_from_seen([SeenDevice(kind, 0)] * 8, host)).groups
        assert dataclasses.replace(group.host, to_device=None) == host
        assert group.host.to_device.bandwidth_bytes_per_s == bandwidth
        (group,) = Cluster(*cluster_from_seen([SeenDevice(kind, 0)] * 8)).groups
        assert group.host is None
    (group,) = Cluster(*cluster_from_seen([SeenDevice("cpu", 0)], host)).groups
    assert group.host == host


def test_unequal_nodes_form_groups():
    seen = [SeenDevice(H100, 0)] * 8 + [SeenDevice(H100, 1)] * 4 + [SeenDevice(V100, 2)] * 8
    cluster = Cluster(*cluster_from_seen(seen))
    assert [(group.device_type.name, group.num_devices) for group in cluster.groups] == [
        ("H100-SXM", 8),
        ("H100-SXM", 4),
        ("V100-SXM2-32GB", 8),
    ]
    assert cluster.between_groups.bandwidth_bytes_per_s == 6.25e9  # the V100's share of its node's ports


def test_two_kinds_in_one_node_are_joined_by_the_slower_link_inside():
    cluster = Cluster(*cluster_from_seen([SeenDevice(H100, 0), SeenDevice(V100, 0)]))
    assert cluster.between_groups.bandwidth_bytes_per_s == 150e9


def test_a_tpu_slice_is_a_node():
    (group,) = Cluster(*cluster_from_seen([SeenDevice("TPU v5 lite", device // 16) for device in range(32)])).groups
    assert (group.device_type.name, group.num_nodes, group.devices_per_node) == ("TPU-v5e", 2, 16)


def chips(kind, *shape, node=0):
    """As JAX lists them: the first coordinate changes fastest; there are always three."""
    places = itertools.product(*(range(n) for n in reversed((*shape, *(1 for _ in range(3 - len(shape)))))))
    return [SeenDevice(kind, node, place[::-1]) for place in places]


@pytest.mark.parametrize(
    "kind, shape, wraps",
    [
        ("TPU v4", (4, 4, 8), (True, True, True)),
        ("TPU v4", (2, 4, 4), (False, False, False)),  # no whole cube
        ("TPU v5p", (2, 2), (False, False)),
        ("TPU v5 lite", (8, 16), (False, True)),
        ("TPU v5 lite", (4, 4), (False, False)),
    ],
)
def test_chips_that_fill_a_grid_are_its_torus(kind, shape, wraps):
    (group,) = Cluster(*cluster_from_seen(chips(kind, *shape) + chips(kind, *shape, node=1))).groups
    assert group.num_nodes == 2 and group.torus == Torus(shape, wraps)
    assert "torus" in catalogue().known_device(kind).torus.link


def test_a_detected_slice_is_the_one_of_the_cluster_file():
    (detected,) = Cluster(*cluster_from_seen(chips("TPU v4", 4, 4, 8))).groups
    (written,) = Cluster.from_file(CLUSTERS / "tpu-v4-4x4x8.yaml").groups
    assert dataclasses.replace(detected, name=written.name) == written


@pytest.mark.parametrize("left_out", [0, 5, 31])
def test_chips_that_fill_no_grid_are_a_node_without_torus(left_out):
    seen = chips("TPU v5 lite", 4, 8)
    del seen[left_out]
    (group,) = Cluster(*cluster_from_seen(seen)).groups
    assert group.torus is None and group.devices_per_node == 31
    assert group.intra_node == catalogue().link("ICI-v5e-line", level=0)


def test_two_cores_of_a_chip_are_no_torus():
    (group,) = Cluster(*cluster_from_seen([d for d in chips("TPU v4", 2, 2) for _ in range(2)])).groups
    assert group.torus is None and group.devices_per_node == 8


@pytest.mark.parametrize("kind", ["NVIDIA H100 PCIe", "NVIDIA GB300", "", "TPU v99"])
def test_unknown_kinds_are_refused(kind):
    with pytest.raises(ClusterError, match="Write a cluster file"):
        cluster_from_seen([SeenDevice(H100, 0), SeenDevice(kind, 0)])


def test_no_device_is_refused():
    with pytest.raises(ClusterError, match="at least one"):
        Cluster(*cluster_from_seen([]))
