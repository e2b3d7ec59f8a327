"""PaddlePaddle's cluster JSON: hand-derived links and groups, and mutated files, which load or raise."""

import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError, ClusterError, FileFormatError

V100 = {"type": "GPU", "model": "Tesla V100-SXM2-32GB", "memory": 32}
V100 |= {"sp_gflops": 15700, "dp_gflops": 7800, "hp_gflops": 31400}
P100 = {"type": "GPU", "model": "P100 of mine", "memory": 16, "sp_gflops": 10600, "dp_gflops": 0}
CPU = {"type": "CPU", "arch": "x86_64", "vendor": "GenuineIntel", "model": "Xeon 6271C", "memory": 503}
CPU |= {"sp_gflops": 150, "dp_gflops": 75}
NIC = {"type": "NIC"}


def machine(number, first_id, devices, links=()):
    return {
        "hostname": f"host_{number}",
        "addr": "127.0.0.1",
        "port": 60009,
        "devices": [{"global_id": first_id + i, "local_id": i, **device} for i, device in enumerate(devices)],
        "links": [
            {
                "source_global_id": s,
                "target_global_id": t,
                "type": kind,
                "bandwidth": bandwidth,
                "latency": 0,
                "hop": hop,
            }
            for s, t, kind, bandwidth, hop in links
        ],
    }


def two_machines():
    """Two machines of two V100s, a CPU and a NIC each; NVLink inside, one of four network pairs slower."""
    across = [(s, t, "NET", 10 if (s, t) == (1, 5) else 12.5, 1) for s in (0, 1) for t in (4, 5)]
    return {
        "alpha_latency": {
            "base": {"ring": 8.4, "tree": 0.0},
            "intra": {"ring": "NVL", "tree": 28},
            "inter": {"ring": 9.0, "tree": "NET"},
            "switch": 20.0,
        },
        "machines": [
            machine(0, 0, [V100, V100, CPU, NIC], [(0, 1, "NVL", 235, 0), (0, 2, "SYS", 1, 0), *across]),
            machine(1, 4, [V100, V100, CPU, NIC], [(4, 5, "NVL", 235, 0), (5, 4, "NVL", 235, 0)]),
        ],
    }


def load(tmp_path, data):
    path = tmp_path / "paddle.json"
    path.write_text(json.dumps(data))
    return Cluster.from_paddle_json(path)


def test_two_equal_machines(tmp_path):
    cluster = load(tmp_path, two_machines())
    (group,) = cluster.groups
    assert cluster.name == "paddle"
    assert (group.num_nodes, group.devices_per_node) == (2, 2)
    assert group.device_type.name == "Tesla V100-SXM2-32GB"
    assert group.device_type.peak_flops_per_s == (
        ("bfloat16", 31.4e12),
        ("float16", 31.4e12),
        ("float32", 15.7e12),
        ("float64", 7.8e12),
    )
    assert group.device_type.memory_bytes == 32e9
    assert group.device_type.memory_bandwidth_bytes_per_s == 900e9  # from the catalogue, which knows the model
    assert group.intra_node.bandwidth_bytes_per_s == 235e9
    assert group.intra_node.latency_s == pytest.approx(3.4e-6)
    assert group.inter_node.bandwidth_bytes_per_s == 10e9  # the slowest pair rules
    assert group.inter_node.latency_s == pytest.approx((9.0 + 1 * 20.0) * 1e-6)
    assert cluster.between_groups is None


def test_missing_links_and_latencies_have_paddles_defaults(tmp_path):
    data = two_machines()
    del data["alpha_latency"]
    for entry in data["machines"]:
        entry["links"] = []
    (group,) = load(tmp_path, data).groups
    assert group.intra_node.bandwidth_bytes_per_s == group.inter_node.bandwidth_bytes_per_s == 24e9
    assert group.intra_node.latency_s == pytest.approx(5.7e-6)
    assert group.inter_node.latency_s == pytest.approx((9.6 + 1 * 10.0) * 1e-6)


def test_one_missing_pair_is_enough_for_the_default(tmp_path):
    data = two_machines()
    data["machines"][0]["links"] = [
        link for link in data["machines"][0]["links"] if (link["source_global_id"], link["target_global_id"]) != (1, 5)
    ]
    (group,) = load(tmp_path, data).groups
    assert group.inter_node.bandwidth_bytes_per_s == 12.5e9  # the default, 24e9, is faster than the three others
    data["machines"][0]["links"] = data["machines"][0]["links"][:1]
    (group,) = load(tmp_path, data).groups
    assert group.inter_node.bandwidth_bytes_per_s == 24e9


def test_mixed_machines(tmp_path):
    across = [(s, t, "NET", 5, 1) for s in (0, 1, 2, 3) for t in (4, 5, 6)]
    data = {
        "machines": [
            machine(0, 0, [V100, V100], [(0, 1, "NVL", 235, 0)]),
            machine(1, 2, [V100, V100], [(3, 2, "NVL", 235, 0)]),
            machine(2, 4, [P100] * 3, [(4, 5, "PHB", 24, 0), (5, 6, "PHB", 24, 0), (4, 6, "SYS", 12, 0), *across]),
        ]
    }
    cluster = load(tmp_path, data)
    v100, p100 = cluster.groups
    assert (v100.num_nodes, v100.devices_per_node) == (2, 2)
    assert (p100.num_nodes, p100.devices_per_node) == (1, 3)
    assert p100.intra_node.bandwidth_bytes_per_s == 12e9
    assert p100.inter_node is None
    assert p100.device_type.memory_bandwidth_bytes_per_s == 144e9  # the catalogue does not know the model
    assert p100.device_type.peak_flops_per_s == (("float32", 10.6e12),)
    assert cluster.between_groups.bandwidth_bytes_per_s == 5e9
    assert cluster.between_groups.latency_s == pytest.approx(19.6e-6)
    assert [part.num_devices for part in cluster.slices()] == [4, 3]


def test_machines_with_other_links_form_another_group(tmp_path):
    data = two_machines()
    data["machines"][1]["links"] = [
        {"source_global_id": 4, "target_global_id": 5, "type": "PHB", "bandwidth": 16, "latency": 0.001, "hop": 0}
    ]
    cluster = load(tmp_path, data)
    assert [group.intra_node.bandwidth_bytes_per_s for group in cluster.groups] == [235e9, 16e9]
    assert cluster.groups[1].intra_node.latency_s == pytest.approx(1e-6 + 3.4e-6)  # the file says NVL for all
    assert cluster.between_groups.bandwidth_bytes_per_s == 10e9


def test_two_models_in_one_machine(tmp_path):
    cluster = load(tmp_path, {"machines": [machine(0, 0, [V100, P100, V100], [(0, 2, "NVL", 235, 0)])]})
    assert [(group.device_type.name, group.num_devices) for group in cluster.groups] == [
        ("Tesla V100-SXM2-32GB", 2),
        ("P100 of mine", 1),
    ]
    assert cluster.between_groups.latency_s == pytest.approx(5.7e-6)  # no link listed, but the same machine


def test_one_model_with_two_sets_of_figures(tmp_path):
    slow = {**V100, "sp_gflops": 7000}
    cluster = load(tmp_path, {"machines": [machine(0, 0, [V100, slow, V100, slow])]})
    assert [(group.device_type.name, group.num_devices) for group in cluster.groups] == [
        ("Tesla V100-SXM2-32GB", 2),
        ("Tesla V100-SXM2-32GB #2", 2),
    ]


def test_cpus_count_where_there_is_no_accelerator(tmp_path):
    cluster = load(tmp_path, {"machines": [machine(0, 0, [CPU, NIC]), machine(1, 2, [CPU, NIC])]})
    (group,) = cluster.groups
    assert (group.num_nodes, group.devices_per_node, group.device_type.name) == (2, 1, "Xeon 6271C")
    assert group.device_type.flops_per_s("float32") == 150e9


def test_the_result_survives_a_round_trip(tmp_path):
    cluster = load(tmp_path, two_machines())
    cluster.to_file(tmp_path / "c.yaml")
    assert Cluster.from_file(tmp_path / "c.yaml") == cluster


@pytest.mark.parametrize(
    ("keys", "value", "error", "reason"),
    [
        (["machines"], [], ClusterError, "at least one node group"),
        (["machines", 0, "devices", 0, "sp_gflops"], 0, ClusterError, "sp_gflops"),
        (["machines", 0, "devices", 0, "type"], "GPUS", FileFormatError, "Did you mean 'GPU'"),
        (["machines", 0, "devices", 1, "global_id"], 0, FileFormatError, "given twice"),
        (["machines", 0, "devices", 0, "memory"], "32G", FileFormatError, "must be a number"),
        (["machines", 0, "links", 0, "bandwidth"], 0, ClusterError, "above zero"),
        (["machines", 0, "links", 0, "target_global_id"], 99, FileFormatError, "global_id 99"),
        (["machines", 0, "links", 0, "type"], "NVLINK", FileFormatError, "must be one of"),
        (["alpha_latency", "inter", "ring"], "ETH", FileFormatError, "must be one of"),
        (["alpha_latency", "swich"], 3, FileFormatError, None),
    ],
)
def test_wrong_files_are_refused_with_the_reason(tmp_path, keys, value, error, reason):
    data = two_machines()
    if keys[-1] == "swich":
        del data["alpha_latency"]["switch"]
    holder = data
    for key in keys[:-1]:
        holder = holder[key]
    holder[keys[-1]] = value
    with pytest.raises(error, match=reason) as raised:
        load(tmp_path, data)
    assert "paddle.json" in str(raised.value)


def test_required_keys(tmp_path):
    with pytest.raises(FileFormatError, match="'machines', which is missing"):
        load(tmp_path, {})
    data = two_machines()
    link = data["machines"][0]["links"][0]
    link["bandwith"] = link.pop("bandwidth")
    with pytest.raises(FileFormatError, match="Did you mean 'bandwidth'"):
        load(tmp_path, data)


def paths_in(data):
    """The key paths of everything inside plain data."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield [key]
        yield from ([key, *rest] for rest in paths_in(value))


ODD = (
    st.sampled_from([..., None, True, 0, -1, 1, 5, 1.5, 1e300, 1e308, 10**400, "", "NVL", "CPU", [], {}, "#2"])
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.sampled_from(list(paths_in(two_machines()))), ODD), min_size=1, max_size=4))
def test_mutated_files_load_or_are_refused(tmp_path, changes):
    data = copy.deepcopy(two_machines())
    for keys, value in changes:
        holder = data
        try:
            for key in keys[:-1]:
                holder = holder[key]
            if value is ...:
                del holder[keys[-1]]
            else:
                holder[keys[-1]] = copy.deepcopy(value)  # the odd {} and [] may be changed in turn
        except (KeyError, IndexError, TypeError):
            pass  # an earlier change took the place away
    try:
        cluster = load(tmp_path, data)
    except AutoshardError as error:
        assert str(error)
    else:
        assert cluster.num_devices <= 8
        cluster.to_file(tmp_path / "c.yaml")
        assert Cluster.from_file(tmp_path / "c.yaml") == cluster


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=4), speeds=st.data())
def test_links_are_the_worst_of_their_pairs(tmp_path, shape, speeds):
    """Brute force over all pairs, each with a link of its own or none."""
    machines, owner, first = [], {}, 0
    for number, (count, is_v100) in enumerate(shape):
        machines.append(machine(number, first, [V100 if is_v100 else P100] * count))
        owner |= {first + i: (number, count, is_v100) for i in range(count)}
        first += count
    bandwidth = {}
    for s in range(first):
        for t in range(s + 1, first):
            given_speed = speeds.draw(st.sampled_from([None, 10, 20, 30]))
            bandwidth[s, t] = (given_speed or 24) * 1e9
            if given_speed:
                entry = {"source_global_id": t, "target_global_id": s, "type": "NET", "bandwidth": given_speed}
                machines[owner[t][0]]["links"].append(entry)
    # With one latency for all pairs inside machines, only bandwidths tell machines apart.
    cluster = load(tmp_path, {"alpha_latency": {"intra": {"ring": 5.7}}, "machines": machines})
    inside = {
        number: min([v for (s, t), v in bandwidth.items() if owner[s][0] == owner[t][0] == number], default=24e9)
        for number in range(len(shape))
    }
    kind = {i: (count, is_v100, inside[number]) for i, (number, count, is_v100) in owner.items()}
    assert len(cluster.groups) == len(set(kind.values()))
    for group, key in zip(cluster.groups, dict.fromkeys(kind.values()), strict=True):
        ours = [i for i in kind if kind[i] == key]
        assert group.num_devices == len(ours)
        if group.devices_per_node > 1:
            assert group.intra_node.bandwidth_bytes_per_s == key[2]
        across = [v for (s, t), v in bandwidth.items() if {s, t} <= set(ours) and owner[s][0] != owner[t][0]]
        assert (group.inter_node.bandwidth_bytes_per_s if group.inter_node else None) == min(across, default=None)
    between = [v for (s, t), v in bandwidth.items() if kind[s] != kind[t]]
    assert (cluster.between_groups.bandwidth_bytes_per_s if between else None) == min(between, default=None)
