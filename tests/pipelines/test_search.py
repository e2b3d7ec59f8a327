"""The stage search: never worse than what is simpler, more devices never slower, memory kept, bad input named."""

import importlib.util
import itertools
import math
import pathlib

import numpy as np
import pytest

from autoshard.errors import ConfigError, StageError
from autoshard.pipelines.cost.interval_costs import IntervalCostTable
from autoshard.pipelines.cost.layers import Layers
from autoshard.pipelines.cost.table import CostKey, CostTable
from autoshard.pipelines.schedule.peak_memory import peak_bytes
from autoshard.pipelines.schedule.simulate import step_time
from autoshard.pipelines.schedule.tasks import ScheduleKind
from autoshard.pipelines.search.arrangement import Arrangement, Pipeline, Stage, Submesh
from autoshard.pipelines.search.options import StageOptions
from autoshard.pipelines.search.search import search
from autoshard.pipelines.search.stage_memory import limits_bytes
from autoshard.pipelines.search.step_durations import step_durations
from autoshard.pipelines.search.topology import Topology
from autoshard.pipelines.search.whale import cut_by_shares, even_cut, whale_shares

_spec = importlib.util.spec_from_file_location("case", pathlib.Path(__file__).with_name("case.py"))
case = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(case)

BATCH = 12
KINDS = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE)


def durations(layers, table, cluster, arrangement):
    return step_durations(IntervalCostTable(layers, table), Topology(cluster, table), arrangement)


def fits(layers, table, cluster, arrangement, limits):
    found = durations(layers, table, cluster, arrangement)
    return all(
        peak <= limits[submesh.slice] * (1 + 1e-9)
        for pipeline, timed in zip(arrangement.pipelines, found.pipelines, strict=True)
        for submesh, peak in zip(pipeline.submeshes, peak_bytes(timed), strict=True)
    )


def simple_arrangements(layers, table, cluster):
    """One replica on each device with even shares and with Whale's; even and Whale's cuts over all orders of slices."""
    singles = {option.slice: o for o, option in enumerate(table.options) if option.num_devices == 1}
    devices = [Submesh(s, i, singles[s]) for s, part in enumerate(cluster.slices()) for i in range(part.num_devices)]
    types = [cluster.slices()[submesh.slice].device_type for submesh in devices]
    speeds, rooms = [t.flops_per_s("float32") for t in types], [t.memory_bytes for t in types]
    for shares in ([1 / len(devices)] * len(devices), whale_shares(speeds, rooms, 1.0, 1.0)):
        examples = [round(share * BATCH) for share in shares]
        if sum(examples) == BATCH and min(examples):
            whole = (Stage(0, layers.num_layers),)
            for kind in KINDS:
                yield Arrangement(
                    tuple(Pipeline((p,), whole, 1, n, kind) for p, n in zip(devices, examples, strict=True))
                )
    for order in (devices, devices[::-1]):
        num = min(len(order), layers.num_layers)
        flops = [(types[devices.index(p)].flops_per_s("float32")) for p in order[:num]]
        work = [table.costs[CostKey(k, singles[0], 1)].forward_s for k in layers.kinds]
        shares = [f / sum(flops) for f in flops]
        for cut, kind in itertools.product((even_cut(layers.num_layers, num), cut_by_shares(work, shares)), KINDS):
            for again in (False, True):
                stages = tuple(Stage(*span, again) for span in itertools.pairwise(cut))
                yield Arrangement((Pipeline(tuple(order[:num]), stages, 1, BATCH, kind),))


@pytest.mark.parametrize("seed", range(5))
def test_never_worse_than_what_is_simpler(seed):
    rng = np.random.default_rng(seed)
    cluster = case.cluster(2, 2, memory=rng.uniform(2e9, 6e9))
    layers = case.random_layers(rng, int(rng.integers(4, 7)))
    table = case.random_table(rng, cluster, sizes=(1, 2, 3))
    limits = tuple(s.device_type.memory_bytes for s in cluster.slices())
    found = search(layers, table, cluster, BATCH, StageOptions(limits_bytes=limits_bytes(cluster, 0.0)))
    assert found.arrangement.batch_size == BATCH
    assert (
        found.bound_s <= found.step_s == pytest.approx(step_time(durations(layers, table, cluster, found.arrangement)))
    )
    assert fits(layers, table, cluster, found.arrangement, limits)
    simple = [a for a in simple_arrangements(layers, table, cluster) if fits(layers, table, cluster, a, limits)]
    times_s = [step_time(durations(layers, table, cluster, a)) for a in simple]
    assert found.step_s <= min(times_s, default=math.inf) * (1 + 1e-9)
    assert found.bound_s <= min(times_s, default=math.inf)
    reported = {c.description.split(":")[0]: c.step_s for c in found.considered}
    assert found.step_s <= min(s for s in reported.values() if s is not None) * (1 + 1e-9)
    assert {"node0 alone", "node1 alone", "a replica group on each slice"} <= set(reported)


def regular_arrangements(layers, table, cluster):
    """What the settings of Megatron-LM express: meshes, stages, replicas, interleaved stages, all cut evenly."""
    [part] = cluster.slices()
    for option, size in itertools.product(range(len(table.options)), (1, 2, 3)):
        width = table.options[option].num_devices
        for num_submeshes, chunks in itertools.product(range(1, part.num_devices // width + 1), (1, 2, 3)):
            replicas = part.num_devices // width // num_submeshes
            if (
                num_submeshes * chunks > layers.num_layers
                or BATCH % (replicas * size)
                or (chunks > 1) == (num_submeshes == 1)
            ):
                continue
            for kind in KINDS if chunks == 1 else (ScheduleKind.INTERLEAVED,):
                for again in (False, True):
                    cut = even_cut(layers.num_layers, num_submeshes * chunks)
                    stages = tuple(Stage(*span, again) for span in itertools.pairwise(cut))
                    places = [
                        [Submesh(0, (r * num_submeshes + k) * width, option) for k in range(num_submeshes)]
                        for r in range(replicas)
                    ]
                    yield Arrangement(
                        tuple(Pipeline(tuple(p), stages, size, BATCH // replicas // size, kind) for p in places)
                    )


@pytest.mark.parametrize("seed", range(4))
def test_never_worse_than_what_is_regular(seed):
    rng = np.random.default_rng(seed)
    cluster = case.cluster(8, memory=rng.uniform(1.5e9, 3e9))
    layers = case.random_layers(rng, int(rng.integers(5, 9)))
    table = case.random_table(rng, cluster, sizes=(1, 2, 3), counts=(1, 2, 4))
    limits = limits_bytes(cluster, 0.0)
    found = search(layers, table, cluster, BATCH, StageOptions(limits_bytes=limits))
    regular = [a for a in regular_arrangements(layers, table, cluster) if fits(layers, table, cluster, a, limits)]
    times_s = [step_time(durations(layers, table, cluster, a)) for a in regular]
    assert len(times_s) > 5
    assert found.bound_s <= found.step_s <= min(times_s) * (1 + 1e-9)


def test_more_devices_are_never_slower():
    rng = np.random.default_rng(3)
    layers = case.random_layers(rng, 5)
    times_s = []
    for sizes in ((1, 1), (2, 1), (2, 2), (3, 3), (4, 4)):
        cluster = case.cluster(*sizes)
        table = case.random_table(np.random.default_rng(5), case.cluster(4, 4))
        table = CostTable(case.options(case.cluster(4, 4), (1, 2)), table.costs)
        allowed = {o for o, x in enumerate(table.options) if x.num_devices <= sizes[x.slice]}
        table = CostTable(table.options, {k: c for k, c in table.costs.items() if k.option in allowed})
        times_s.append(search(layers, table, cluster, BATCH).step_s)
    assert times_s == sorted(times_s, reverse=True)
    assert times_s[-1] < times_s[0] / 2


def test_shares_in_proportion_to_speed():
    """One layer, so nothing can be cut: of 12 examples the device that is twice as fast takes 8."""
    cluster = case.cluster(1, 1)
    found = search(case.chain([0]), case.plain_table(cluster, 1, (1,)), cluster, BATCH)
    assert sorted(p.num_examples for p in found.arrangement.pipelines) == [4, 8]
    assert found.step_s == pytest.approx(8 * 1.5e-3)
    assert found.bound_s == pytest.approx(found.step_s)


def test_teams_whose_sizes_add_up():
    """What each device does fastest by itself does not add up to 34 examples; 22 and 12, as 2 x 11 and 2 x 6, do."""
    cluster = case.cluster(1, 1)
    table = case.plain_table(cluster, 1, (6, 11, 18, 19, 21, 24, 27, 31))
    found = search(case.chain([0]), table, cluster, 34)
    assert sorted(p.num_examples for p in found.arrangement.pipelines) == [12, 22]
    assert found.step_s == pytest.approx(12 * 3e-3)


def test_a_slice_behind_a_slow_link_is_left_out():
    slow = case.Link(10.0, 1e3, 1, "made up")
    cluster = case.cluster(2, 2, between=slow)
    layers = case.chain([0] * 4, example_bytes=1e3)
    found = search(layers, case.plain_table(cluster, 1, (1, 2), weight=1e3), cluster, BATCH)
    assert {submesh.slice for p in found.arrangement.pipelines for submesh in p.submeshes} == {0}
    assert next(c.step_s for c in found.considered if c.description.startswith("node0 alone")) == found.step_s


def test_what_is_fixed_is_kept():
    cluster = case.cluster(4, 4)
    table = case.plain_table(cluster, 2, (1, 2), counts=(1, 2), weight=1e6)
    options = StageOptions(
        num_stages=4, num_micro_batches=3, schedules=(ScheduleKind.INTERLEAVED,), most_devices_per_stage=1
    )
    told = []
    layers = case.chain([0, 1, 0, 0, 1, 0])
    found = search(layers, table, cluster, BATCH, options, lambda text, done, total: told.append((done, total)))
    for pipeline in found.arrangement.pipelines:
        assert len(pipeline.stages) == 4
        assert len(pipeline.submeshes) == 2
        assert pipeline.schedule is ScheduleKind.INTERLEAVED
        assert all(table.options[submesh.option].num_devices == 1 for submesh in pipeline.submeshes)
    assert max(p.num_micro_batches for p in found.arrangement.pipelines) == 3
    assert [done for done, _ in told] == list(range(len(told)))
    assert told[-1][0] == told[-1][1]


def test_orders_are_known_by_name():
    layers, cluster = case.chain([0] * 3), case.cluster(1, 1)
    table = case.plain_table(cluster, 1, (1,))
    named = search(layers, table, cluster, BATCH, StageOptions(schedules=("gpipe",)))
    assert {p.schedule for p in named.arrangement.pipelines} == {ScheduleKind.GPIPE}
    assert StageOptions(schedules=[k.value for k in ScheduleKind]).schedule_kinds == tuple(ScheduleKind)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_stages": 0}, r"num_stages is a whole number from 1 on, or None for any; received 0"),
        ({"num_micro_batches": 2.5}, r"num_micro_batches is .*received 2\.5"),
        ({"num_pipelines": True}, r"num_pipelines is .*received True"),
        ({"most_devices_per_stage": -1}, r"most_devices_per_stage is .*received -1"),
        ({"most_chunks": 0}, r"most_chunks is .*received 0"),
        ({"micro_batch_sizes": 4}, r"received 4\. Write \(4,\)"),
        ({"micro_batch_sizes": ()}, r"received \(\)"),
        ({"micro_batch_sizes": (2, 0)}, r"received \(2, 0\)"),
        ({"schedules": "1f1b"}, r"'gpipe', '1f1b', 'interleaved', 'zb-h1'; received '1f1b'\. Write \('1f1b',\)"),
        ({"schedules": ("eager",)}, r"received \('eager',\)"),
        ({"schedules": ()}, r"received \(\)"),
    ],
)
def test_options_that_no_arrangement_can_have_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        StageOptions(**given)


def test_three_slices():
    cluster = case.cluster(2, 1, 1, speeds=(2e12, 1e12, 1e12))
    found = search(case.chain([0] * 4), case.plain_table(cluster, 1, (1,)), cluster, BATCH)
    assert found.arrangement.batch_size == BATCH
    assert found.step_s == pytest.approx(BATCH * 4 * 3e-3 / 6, rel=0.35)  # all six TFLOP/s, and something for waiting
    assert any("across" in c.description for c in found.considered)


@pytest.mark.parametrize(
    ("batch_size", "sizes", "options", "message"),
    [
        (8, (1,), StageOptions(num_stages=4), r"num_stages=4 for a model of 3 layers"),
        (8, (3,), StageOptions(), r"batch of 8 examples cannot be made of micro-batches of 3\. Choose a multiple of 3"),
        (2, (4,), StageOptions(), r"batch of 2 examples cannot be shared out: the cost table has micro-batches of 4"),
        (0, (1,), StageOptions(), r"at least one example; received 0"),
        (8, (1,), StageOptions(limits_bytes=(1e9,)), r"one entry for each of the 2 slices; received 1"),
        (
            8,
            (1,),
            StageOptions(limits_bytes=(4e9, 3e9)),
            r"'node0' \(type0\) is too small.*4 GB.*needs 8\.1 GB.*'node1'",
        ),
        (
            8,
            (1,),
            StageOptions(limits_bytes=(9e9, 9e9)),
            r"and no arrangement does: .* times as much, .* GB instead of 9 GB",
        ),
    ],
    ids=["stages", "indivisible", "small batch", "no batch", "limits", "slice", "model"],
)
def test_bad_input_is_named(batch_size, sizes, options, message):
    cluster = case.cluster(1, 1)
    table = case.plain_table(cluster, 1, sizes, weight=2e9, residual=1e8)
    with pytest.raises(StageError, match=message):
        search(case.chain([0] * 3), table, cluster, batch_size, options)


def test_a_table_for_no_layer_is_named():
    cluster = case.cluster(1)
    table = case.plain_table(cluster, 1, (1,))
    with pytest.raises(StageError, match="the cost table has nothing that runs on slice 'node0'"):
        search(Layers((7,), ("odd",), ()), table, cluster, 4)
