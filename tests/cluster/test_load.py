"""Cluster files: every shipped one, round trips, and mutated ones, which load or raise an AutoshardError."""

import copy
import dataclasses
import pathlib
import re

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.cluster import Cluster, CollectiveKind, DeviceType, KernelForms, Link, NodeGroup
from autoshard.cluster.catalogue import catalogue
from autoshard.errors import AutoshardError, ClusterError, FileFormatError
from autoshard.files import read_yaml, yaml_text

FOLDER = pathlib.Path(__file__).parents[2] / "configs" / "clusters"
SHIPPED = sorted(FOLDER.glob("*.yaml"))

VALID = {
    "format": "autoshard-cluster",
    "version": 1,
    "name": "mine",
    "groups": [
        {
            "name": "a",
            "device_type": "H100-SXM",
            "num_nodes": 2,
            "devices_per_node": 8,
            "intra_node": "NVLink4",
            "inter_node": "My-Link",
        },
        {
            "name": "b",
            "device_type": "My-Chip",
            "num_nodes": 1,
            "devices_per_node": 6,
            "intra_node": {"latency_s": 1e-6, "bandwidth_bytes_per_s": 1e9, "level": 0, "source": "mine"},
        },
    ],
    "between_groups": {"latency_s": 0, "bandwidth_bytes_per_s": 1e9, "source": "mine"},
    "device_types": {
        "My-Chip": {
            "peak_flops_per_s": {"float32": 1e13, "bfloat16": 1e14},
            "memory_bytes": 32e9,
            "memory_bandwidth_bytes_per_s": 1e12,
            "launch_overhead_s": 4e-6,
            "source": "mine",
        }
    },
    "links": {"My-Link": {"latency_s": 1e-5, "bandwidth_bytes_per_s": 25e9, "source": "mine"}},
}


def load(tmp_path, data):
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml_text(data))
    return Cluster.from_file(path)


def changed(keys, value):
    """`VALID` with the value at the path `keys` replaced, or removed if `value` is `...`."""
    data = copy.deepcopy(VALID)
    holder = data
    for key in keys[:-1]:
        holder = holder[key]
    if value is ...:
        del holder[keys[-1]]
    else:
        holder[keys[-1]] = value
    return data


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_clusters(path, tmp_path):
    cluster = Cluster.from_file(path)
    assert cluster.name == path.stem
    # The number of devices is the sum of the numbers after the x's of the name, or the product of the shape it tells.
    number = {"cpu4x2": 8, "tpu-v4-4x4x8": 128}.get(path.stem)
    assert cluster.num_devices == (number or sum(int(x) for x in re.findall(r"x(\d+)", path.stem)))
    cluster.to_file(tmp_path / "copy.yaml")
    assert Cluster.from_file(tmp_path / "copy.yaml") == cluster
    assert all(part.logical_meshes() for part in cluster.slices())
    assert cluster.is_homogeneous == ("_" not in path.stem.removesuffix("_cpu"))
    assert "://" not in path.read_text() and path.read_text().startswith("# ")


def test_every_family_is_shipped():
    names = {path.stem for path in SHIPPED}
    sizes = {"p100": (8, 16), "v100": (8, 16, 64), "t4": (8, 16), "l4": (8, 16), "cpu": (8,)}
    sizes |= {gpu: (8, 16, 64, 1024) for gpu in ("a100-40", "a100-80", "h100", "h200", "b200")}
    sizes |= {"tpu-v4-": (8, 64, 512), "tpu-v5e-": (8, 16, 64, 256), "tpu-v5p-": (8, 64, 512)}
    assert {f"{family}x{size}" for family, counts in sizes.items() for size in counts} <= names
    assert {"v100x8_p100x8", "a100x8_h100x8"} <= names


def test_h100_figures():
    cluster = Cluster.from_file(FOLDER / "h100x16.yaml")
    (group,) = cluster.groups
    assert (group.num_nodes, group.devices_per_node) == (2, 8)
    assert (group.intra_node.bandwidth_bytes_per_s, group.intra_node.latency_s) == (450e9, 3e-6)
    assert (group.inter_node.bandwidth_bytes_per_s, group.inter_node.latency_s) == (50e9, 10e-6)
    assert (group.intra_node.level, group.inter_node.level) == (0, 1)
    assert group.device_type.memory_bytes == 80_000_000_000
    assert group.device_type.flops_per_s("bfloat16") == 989.4e12
    assert group.device_type.matmul_flops_per_s("float32") == 494.7e12 * 0.78
    assert group.device_type.convolution_flops_per_s("float32") == 494.7e12 * 0.5
    assert group.device_type.memory_bandwidth_bytes_per_s == 3350e9
    assert group.device_type.memory_bytes_per_s == 3350e9 * 0.9


def test_mixed_cluster():
    cluster = Cluster.from_file(FOLDER / "v100x8_p100x8.yaml")
    assert [(part.device_type.name, part.num_devices) for part in cluster.slices()] == [
        ("V100-SXM2-32GB", 8),
        ("P100-SXM2", 8),
    ]
    assert cluster.between_groups.level == 2
    assert cluster.between_groups.bandwidth_bytes_per_s * 8 * 8 == 50e9  # 50 Gb/s for eight GPUs


@pytest.mark.parametrize("known", catalogue().devices, ids=lambda known: known.device_type.name)
def test_every_figure_of_a_device_type_has_a_source(known):
    source = known.device_type.source
    for figure in ("Peaks", "Memory", "Launch"):
        assert re.search(rf"\b{figure}\b[^:]*:", source)
    assert "https://" in source or "not measured" in source
    has_efficiencies = known.device_type.matmul_efficiency < 1 or known.device_type.memory_efficiency < 1
    assert has_efficiencies == ("efficiencies" in source)
    assert known.device_kinds
    assert catalogue().link(known.intra_node, 0).bandwidth_bytes_per_s > 0
    assert catalogue().link(known.inter_node, 1).bandwidth_bytes_per_s > 0
    assert catalogue().known_device(known.device_kinds[0].upper()) == known


@pytest.mark.parametrize(("name", "link"), catalogue().links)
def test_every_figure_of_a_link_has_a_source(name, link):
    for figure in ("Bandwidth", "Latency"):
        assert re.search(rf"\b{figure}\b[^:]*:", link.source)
    assert any(word in link.source for word in ("https://", "not measured", "estimate"))


def test_device_kinds_are_told_apart():
    kinds = [kind for known in catalogue().devices for kind in known.device_kinds]
    assert len(set(kinds)) == len(kinds)
    assert catalogue().known_device("NVIDIA H100 PCIe") is None


def test_own_parts_and_catalogue_parts_mix(tmp_path):
    cluster = load(tmp_path, VALID)
    h100, mine = cluster.groups
    assert h100.device_type == catalogue().device_type("H100-SXM")
    assert h100.inter_node == Link(1e-5, 25e9, 1, "mine")
    assert mine.device_type == DeviceType("My-Chip", {"float32": 1e13, "bfloat16": 1e14}, 32e9, 1e12, 4e-6, "mine")
    assert mine.inter_node is None
    assert cluster.between_groups == Link(0, 1e9, 2, "mine")
    assert load(tmp_path, cluster.to_dict()) == cluster


def test_own_parts_hide_the_catalogue(tmp_path):
    data = changed(["device_types", "H100-SXM"], VALID["device_types"]["My-Chip"])
    assert load(tmp_path, data).groups[0].device_type.memory_bytes == 32e9


MEASURED = {
    "calibrated": {"date": "2026-01-31", "jax": "0.10.2", "device_kind": "mine", "spread": 0.05},
    "product_flops_per_s": {"float32": [[1e4, 1e9], [1e8, 5e10]]},
    "narrow_share": [[8, 0.5], [128, 1.0]],
    "memory_bytes_per_s": [[1e4, 2e10]],
    "elementwise_per_s": 1e10,
    "function_per_s": 2e8,
    "transposed_bytes_per_s": [[1e5, 2e9], [1e6, 5e8]],
}


def measured(keys=(), value=None):
    """`VALID` with measured figures, as version 2, and the one at the path `keys` replaced."""
    data = changed(["version"], 2)
    data["device_types"]["My-Chip"]["measured"] = copy.deepcopy(MEASURED)
    data["links"]["My-Link"]["collectives"] = [
        {"kind": "all-gather", "size": n, "latency_s": n * 1e-6, "bandwidth_bytes_per_s": 1e9} for n in (2, 8)
    ]
    data["links"]["My-Link"]["collectives"][1]["inner_bytes_per_s"] = 4e9
    holder = data
    for key in keys[:-1]:
        holder = holder[key]
    if keys:
        holder[keys[-1]] = value
    return data


def test_measured_figures_are_read_and_written(tmp_path):
    cluster = load(tmp_path, measured())
    rates = cluster.groups[1].device_type.measured
    assert rates.product_rate("bfloat16", 1e6, 8) == pytest.approx((1e9 * 5e10) ** 0.5 * 0.5)
    link = cluster.groups[0].inter_node
    figures = lambda kind, size: (link.figures(kind, size).latency_s, link.figures(kind, size).bandwidth_bytes_per_s)
    assert figures(CollectiveKind.ALL_GATHER, 4) == pytest.approx((5e-6, 1e9))
    assert figures(CollectiveKind.ALL_GATHER, 64) == pytest.approx((8e-6, 1e9))
    assert figures(CollectiveKind.ALL_REDUCE, 4) == (1e-5, 25e9)  # not measured
    inner = [link.figures(CollectiveKind.ALL_GATHER, n).inner_bytes_per_s for n in (2, 4, 8)]
    assert inner == [
        None,
        pytest.approx(8e9),
        4e9,
    ]  # seconds for each byte are linear in log n: halfway at 4 of 2 and 8
    cluster.to_file(tmp_path / "again.yaml")
    assert Cluster.from_file(tmp_path / "again.yaml") == cluster
    assert [c.to_dict()["version"] for c in (cluster, load(tmp_path, VALID))] == [2, 1]


@pytest.mark.parametrize(
    ("keys", "value", "reason"),
    [
        (("narrow_share",), [[8, 1.5]], "must not be above 1"),
        (("narrow_share",), [[8, 0.5], [4, 1.0]], "sizes must rise"),
        (("memory_bytes_per_s",), [[1e4]], "a list of a size and a figure"),
        (("product_flops_per_s",), {"bfloat16": [[1, 1]]}, "must have float32"),
        (("calibrated", "date"), "yesterday", "ISO date"),
        (("function_per_s",), 0, "above zero"),
        (("functions",), 1, "unknown key 'functions'"),
    ],
)
def test_wrong_measured_figures_are_refused(tmp_path, keys, value, reason):
    with pytest.raises(AutoshardError, match=reason):
        load(tmp_path, measured(("device_types", "My-Chip", "measured", *keys), value))


def test_wrong_measured_collectives_are_refused(tmp_path):
    own = {"kind": "all-gathr", "size": 2, "latency_s": 0, "bandwidth_bytes_per_s": 1}
    with pytest.raises(FileFormatError, match="Did you mean 'all-gather'"):
        load(tmp_path, measured(("links", "My-Link", "collectives"), [own]))
    with pytest.raises(ClusterError, match="measured once"):
        load(tmp_path, measured(("links", "My-Link", "collectives"), [{**own, "kind": "all-gather"}] * 2))


@pytest.mark.parametrize(
    ("keys", "value", "error", "reason"),
    [
        (["format"], ..., FileFormatError, "format: autoshard-cluster"),
        (["version"], 5, FileFormatError, "`version` of 1 to 4"),
        (["version"], True, FileFormatError, "`version` of 1 to 4"),
        (["name"], ..., FileFormatError, "'name', which is missing"),
        (["name"], 7, FileFormatError, "name must be text"),
        (["groups"], ..., ClusterError, "at least one node group"),
        (["groups"], {"a": 1}, FileFormatError, "groups must be a list"),
        (["groups", 0], 3, FileFormatError, r"groups\[0\] must be a mapping"),
        (["groups", 0, "num_node"], 3, FileFormatError, "unknown key 'num_node'. Did you mean 'num_nodes'"),
        (["grups"], [], FileFormatError, "Did you mean 'groups'"),
        (["groups", 0, "device_type"], "H100-SMX", ClusterError, "Did you mean 'H100-SXM'"),
        (["groups", 0, "intra_node"], "NVLink 4", ClusterError, "Did you mean 'NVLink4'"),
        (["groups", 0, "num_nodes"], "two", FileFormatError, "must be a whole number"),
        (["groups", 0, "num_nodes"], 2.5, FileFormatError, "must be a whole number"),
        (["groups", 0, "num_nodes"], 0, ClusterError, "at least 1"),
        (["groups", 0, "inter_node"], ..., ClusterError, "must have an inter_node"),
        (["between_groups"], ..., ClusterError, "must have between_groups"),
        (["between_groups", "latency_s"], -1, ClusterError, "zero or above"),
        (["between_groups", "bandwidth"], 1, FileFormatError, "Did you mean 'bandwidth_bytes_per_s'"),
        (["device_types", "My-Chip", "memory_bytes"], 0, ClusterError, "memory_bytes"),
        (["device_types", "My-Chip", "memory_gb"], 32, FileFormatError, "unknown key 'memory_gb'"),
        (["device_types", "My-Chip", "peak_flops_per_s"], {}, ClusterError, "must have float32"),
        (["device_types", "Unused"], {}, FileFormatError, "which is missing"),
        (["links", "My-Link", "level"], 1, FileFormatError, "unknown key 'level'"),
        (["links", "Unused"], {"latency_s": 1}, FileFormatError, "which is missing"),
    ],
)
def test_wrong_files_are_refused_with_the_reason(tmp_path, keys, value, error, reason):
    with pytest.raises(error, match=reason) as raised:
        load(tmp_path, changed(keys, value))
    assert "cluster.yaml" in str(raised.value)


@pytest.mark.parametrize("content", ["", "[]", "a", "1: 2", "{}"])
def test_other_documents_are_refused(tmp_path, content):
    (tmp_path / "c.yaml").write_text(content)
    with pytest.raises(FileFormatError):
        Cluster.from_file(tmp_path / "c.yaml")


def paths_in(data):
    """The key paths of everything inside plain data."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield [key]
        yield from ([key, *rest] for rest in paths_in(value))


ODD = (
    st.sampled_from(
        [..., None, True, 0, -1, 1, 3, 1.5, 1e300, 2**53, "", "NVLink4", "H100-SXM", "My-Link", [], {}, "\x85"]
    )
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.sampled_from(list(paths_in(VALID))), ODD), min_size=1, max_size=3))
def test_mutated_files_load_or_are_refused(tmp_path, changes):
    data = copy.deepcopy(VALID)
    for keys, value in changes:
        holder = data
        try:
            for key in keys[:-1]:
                holder = holder[key]
            if value is ...:
                del holder[keys[-1]]
            else:
                holder[keys[-1]] = copy.deepcopy(value)
        except (KeyError, IndexError, TypeError):
            pass  # an earlier change took the place away
    try:
        cluster = load(tmp_path, data)
    except AutoshardError as error:
        assert str(error)
    else:
        assert load(tmp_path, cluster.to_dict()) == cluster
        assert str(cluster)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 2000), count=st.integers(0, 5), new=st.binary(max_size=5))
def test_damaged_bytes_load_or_are_refused(tmp_path, position, count, new):
    content = (FOLDER / "h100x16.yaml").read_bytes()
    position %= len(content)
    path = tmp_path / "c.yaml"
    path.write_bytes(content[:position] + new + content[position + count :])
    try:
        cluster = Cluster.from_file(path)
    except AutoshardError:
        return
    assert cluster.num_devices >= 1


NUMBER = st.floats(1e-12, 1e18)
FACTOR = st.floats(1.0, 9.0)
NAME = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(lambda text: text.strip())
LINKS = st.builds(Link, latency_s=NUMBER, bandwidth_bytes_per_s=NUMBER, level=st.just(0), source=NAME)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=NAME,
    device_type=st.builds(
        DeviceType,
        name=NAME,
        peak_flops_per_s=st.dictionaries(NAME, NUMBER, max_size=3).map(lambda peaks: {**peaks, "float32": 1e12}),
        memory_bytes=st.integers(1, 2**50),
        memory_bandwidth_bytes_per_s=NUMBER,
        launch_overhead_s=NUMBER,
        source=NAME,
        matmul_efficiency=st.floats(0.01, 1.0),
        memory_efficiency=st.floats(0.01, 1.0),
        convolution_efficiency=st.none() | st.floats(0.01, 1.0),
        kernel_forms=st.none()
        | st.builds(KernelForms, FACTOR, NUMBER, NUMBER, NUMBER, st.none() | NUMBER, FACTOR, FACTOR, FACTOR),
        product_workspace_bytes=st.integers(0, 2**30),
    ),
    counts=st.tuples(st.integers(1, 1000), st.integers(1, 1000)),
    links=st.tuples(LINKS, LINKS, LINKS),
    num_groups=st.integers(1, 3),
)
def test_any_cluster_survives_a_round_trip(tmp_path, name, device_type, counts, links, num_groups):
    inter, far = dataclasses.replace(links[1], level=1), dataclasses.replace(links[2], level=2)
    groups = tuple(NodeGroup(f"{name}{i}", device_type, *counts, links[0], inter) for i in range(num_groups))
    cluster = Cluster(name, groups, far)
    path = tmp_path / "c.yaml"
    cluster.to_file(path)
    assert Cluster.from_file(path) == cluster
    assert yaml.safe_load(path.read_text()) == read_yaml(path)  # a reader that knows YAML 1.1 only agrees
