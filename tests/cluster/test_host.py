"""Hosts of nodes: in files, in what is printed, of this machine."""

import pathlib

import psutil
import pytest
import yaml

from autoshard.cluster import Cluster, Host
from autoshard.errors import ClusterError, FileFormatError

CLUSTERS = pathlib.Path(__file__).parents[2] / "configs" / "clusters"
WITH_HOST = CLUSTERS / "h100x8_cpu.yaml"


def test_a_file_tells_the_host_and_is_written_back(tmp_path):
    cluster = Cluster.from_file(WITH_HOST)
    (group,) = cluster.groups
    assert (group.host.num_cpus, group.host.memory_bytes) == (112, 2 * 10**12)
    assert group.host.memory_bandwidth_bytes_per_s == 2 * 8 * 8 * 4.8e9
    assert group.host.flops_per_s == pytest.approx(112 * 2.0e9 * 2 * 16 * 2, rel=0.01)
    assert group.host.to_device.bandwidth_bytes_per_s == 64e9
    cluster.to_file(tmp_path / "again.yaml")
    assert Cluster.from_file(tmp_path / "again.yaml") == cluster and cluster.to_dict()["version"] == 4
    assert "each with 112 CPUs, 2000 GB" in str(cluster)


def test_plans_of_devices_do_not_depend_on_the_host():
    (with_host,), (without,) = (Cluster.from_file(f).slices() for f in (WITH_HOST, CLUSTERS / "h100x8.yaml"))
    assert with_host == without


def test_the_host_of_this_machine_is_told():
    for group in Cluster.detect().groups:
        assert group.host.memory_bytes == psutil.virtual_memory().total and 1 <= group.host.num_cpus
        assert group.host.to_device is None  # not known, and not invented


HOST = {"num_cpus": 2, "memory_bytes": 10**9, "flops_per_s": 1e9, "to_device": "PCIe5-x16", "source": "a test"}


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"num_cpus": 0}, ClusterError, "num_cpus"),
        ({"memory_bytes": -1}, ClusterError, "memory_bytes"),
        ({"flops_per_s": 0.0}, ClusterError, "flops_per_s"),
        ({"cpus": 112}, FileFormatError, "Did you mean 'num_cpus'"),
        ({"to_device": "PCIe5"}, ClusterError, "Did you mean 'PCIe5-x16'"),
    ],
)
def test_wrong_hosts_are_refused(change, error, told, tmp_path):
    data = Cluster.from_file(CLUSTERS / "h100x8.yaml").to_dict() | {"version": 4}
    for host, path in ((HOST, tmp_path / "right.yaml"), (HOST | change, tmp_path / "wrong.yaml")):
        data["groups"][0]["host"] = host
        path.write_text(yaml.safe_dump(data))
    assert Cluster.from_file(tmp_path / "right.yaml").groups[0].host.num_cpus == 2
    with pytest.raises(error, match=told):
        Cluster.from_file(tmp_path / "wrong.yaml")


def test_an_unknown_host_is_refused_by_name(tmp_path):
    (tmp_path / "wrong.yaml").write_text(WITH_HOST.read_text().replace("DGX-H100\n", "DGX-H10\n"))
    with pytest.raises(ClusterError, match="Did you mean 'DGX-H100'"):
        Cluster.from_file(tmp_path / "wrong.yaml")


def test_a_host_has_a_source():
    with pytest.raises(ClusterError, match="source"):
        Host(1, 1, "")
