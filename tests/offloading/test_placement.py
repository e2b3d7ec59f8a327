"""Where tables live: prices by hand, the search against every placement there is, limits, and what is told."""

import dataclasses
import itertools
import math
import pathlib

import numpy as np
import pytest

from autoshard.cluster import Cluster
from autoshard.cost.id_distribution import IdDistribution
from autoshard.errors import ClusterError, ConfigError, MemoryBudgetError
from autoshard.host_tables.options import Execution
from autoshard.offloading.choices import (
    Place,
    by_column,
    by_row,
    choices_of,
    exchange_fixed_s,
    hot_rows,
    layers,
    on_host,
    pooled,
    whole,
)
from autoshard.offloading.compare import with_cut
from autoshard.offloading.placement import placement_of
from autoshard.offloading.search import SearchOptions, outcome, search, with_best_workers, worker_counts
from autoshard.offloading.situation import DenseWork, HostCut, HostRates, Situation, TableUse, situation
from autoshard.printing import seconds

CLUSTERS = pathlib.Path(__file__).parents[2] / "configs" / "clusters"
CLUSTER = Cluster.from_file(CLUSTERS / "h100x8_cpu.yaml")
REACHED_BYTES_PER_S = 0.9 * 3350e9
"""Of an H100's memory: NVIDIA's data sheet, and what kernels reach of it."""
LAUNCH_S = 2.2e-6
"""Of an H100, by the catalogue."""
DENSE = DenseWork(step_s=1e-3, memory_bytes=1e9, flops=1e11)
SYNC = Execution("sync")
NO_OVERHEAD = HostRates(batch_s=0.0, table_s=0.0, worker_s=0.0)


def situation_of(*tables: TableUse, dense: DenseWork = DENSE, **settings) -> Situation:
    return situation(CLUSTER, tables, dense, 1024, **settings)


def table_of(num_rows: int, num_ids: int = 65_536, zipf: float = 0.0, path: str = "t") -> TableUse:
    return TableUse(path, num_rows, 512, 1024, num_ids, IdDistribution(zipf))


# ---- prices


def test_a_table_on_the_host_by_hand():
    """One row is read 8 times, once on each of 8 devices: each gets it, one CPU finds 8 ids and updates it once.

    A row has 8 lines and 16 with state; the CPU gathers 8 lines, reads and writes 2 x 16, and moves 3 x 8 x 8 lines to
    and from the buffers of the devices.
    """
    s = situation_of(table_of(1, 8), rates=HostRates(id_s=1e-6, line_s=1e-3))
    choice = on_host(s.tables[0], s)
    assert choice.loads.cpu_s == pytest.approx(8e-6 + (8 + 2 * 16 + 3 * 8 * 8) * 1e-3)
    assert choice.loads.down_s == choice.loads.up_s == pytest.approx(512 / 64e9)
    assert choice.loads.host_memory_s == pytest.approx((512 + 2 * 1024 + 4 * 8 * 512) / 614.4e9)
    assert (choice.host_bytes, choice.device_bytes, choice.loads.network_s) == (1024, 0, 0)
    # The same row is in every batch, and so patched: read, and read and written with its state.
    assert choice.patched_s == pytest.approx(3 * 1024 / REACHED_BYTES_PER_S + LAUNCH_S)


def test_a_table_that_the_host_pools_by_hand():
    """Of 64 ids that name one row 8 sums are made, one for each device: its link carries one row, whatever the ids."""
    table = dataclasses.replace(table_of(1, 64), num_sums=8)
    s = situation_of(table, rates=HostRates(id_s=1e-6, line_s=1e-3, table_s=0.5))
    choice = pooled(table, s)
    assert choice.loads.cpu_s == pytest.approx(64e-6 + (8 + 2 * 16) * 1e-3)
    assert choice.loads.thread_s == pytest.approx(0.5 + (3 * 64 * 8 + 2 * 16) * 1e-3)
    assert choice.loads.down_s == choice.loads.up_s == pytest.approx(512 / 64e9)
    assert choice.loads.host_memory_s == pytest.approx((512 + 4 * 1024 + 3 * 64 * 512) / 614.4e9)
    assert choice.loads.accelerator_s == pytest.approx(2 * 512 / REACHED_BYTES_PER_S + LAUNCH_S)
    assert (choice.host_bytes, choice.patched_s, choice.in_flight_bytes) == (1024, 0, 1024)


def test_pooling_is_chosen_where_links_are_slow_and_rows_cannot_be_in_flight():
    """Rows of 4 KB, 16 for each sum, over a link of 10 MB/s: sums are a sixteenth of that, and one thread suffices."""
    wide = TableUse("t", 10**9, 4096, 8192, 65_536, IdDistribution(), num_sums=4096)
    s = situation_of(wide)
    slow = dataclasses.replace(s.to_device, bandwidth_bytes_per_s=1e7)
    s = dataclasses.replace(s, host=dataclasses.replace(s.host, to_device=slow, memory_bytes=20e12))
    s = dataclasses.replace(s, host_budget_bytes=18e12)
    of = lambda mode, **more: search(s, SearchOptions(modes=(mode,), max_staleness=2, **more)).best
    without, with_it = of("async"), of("async", pooling=True)
    assert [one.choices[0].place for one in (without, with_it)] == [Place.HOST, Place.POOLED]
    assert with_it.step_s < without.step_s / 2 and with_it.stages.down_s < without.stages.down_s / 10
    assert of("pipelined", pooling=True) == of("pipelined")
    assert Place.POOLED not in {c.place for c in choices_of(dataclasses.replace(wide, num_sums=0), s, False, True)}
    with pytest.raises(ConfigError, match="hot_rows"):
        SearchOptions(pooling=True, hot_rows=True)


def test_layers_at_the_host_by_hand():
    """Rows are priced as for sums; once for both tables the host makes four times 7.15e9 operations at half its peak of
    14.3e12 a second, 1 ms for each 7.15e9, and touches 614.4 MB of parameters twice; each link carries an eighth.
    """
    tables = [dataclasses.replace(table_of(1, 64, path=path), num_sums=8) for path in "tu"]
    cut = HostCut(("t", "u"), ("w",), 64_000_000, 7.15e9, "float32", 614_400_000)
    s = situation_of(*tables, rates=HostRates(table_s=0.5), cuts=(cut,))
    first, second = (layers(table, 0, s) for table in tables)
    of_rows = pooled(tables[0], s)
    assert first.loads.thread_s - of_rows.loads.thread_s == pytest.approx(4e-3 + 2e-3)
    assert (second.loads.thread_s, second.loads.cpu_s) == (of_rows.loads.thread_s, of_rows.loads.cpu_s)
    assert first.loads.down_s == first.loads.up_s == pytest.approx(8e6 / 64e9)
    assert (second.loads.down_s, second.loads.up_s, second.loads.accelerator_s, second.in_flight_bytes) == (0, 0, 0, 0)
    # an H100 makes 494.7e12 operations a second in TensorFloat-32, by NVIDIA's data sheet, of which it reaches 0.78
    sent_s = 2 * 8e6 / REACHED_BYTES_PER_S + LAUNCH_S
    assert first.loads.accelerator_s == pytest.approx(sent_s - 3 * 7.15e9 / 8 / (0.78 * 494.7e12), rel=1e-3)
    assert (first.host_bytes, second.host_bytes) == (1024 + 614_400_000, 1024)
    assert {first.cut, second.cut} == {0} and not first.place.fits_mode("pipelined")


def wide_on_a_slow_link(bytes_per_s: float) -> Situation:
    """One row of 4 KB an example, projected to 64 bytes by 64 KB of parameters; on a link of this speed."""
    wide = TableUse("t", 10**7, 4096, 8192, 65_536)
    cuts = [HostCut(("t",), ("w",), 65_536 * 64, 2 * 65_536 * 1024 * 16, "float32", 2 * 65_536)]
    cuts.append(HostCut(("t",), ("v", "w"), 65_536 * 32, 65_536 * 1024 * 32 + 65_536 * 1024, "float32", 3 * 65_536))
    dense = dataclasses.replace(DENSE, step_s=1e-2)
    s = situation_of(wide, dense=dense, cuts=tuple(cuts), budget_bytes=2e9)
    slow = dataclasses.replace(s.to_device, bandwidth_bytes_per_s=bytes_per_s)
    return dataclasses.replace(s, host=dataclasses.replace(s.host, to_device=slow))


def test_layers_run_at_the_host_where_the_link_is_slow_and_it_is_allowed():
    allowed = SearchOptions(host_layers=True)
    fast, slow = (placement_of(wide_on_a_slow_link(rate), allowed) for rate in (64e9, 1e7))
    assert fast.host_layers == () and "w" in slow.host_layers and slow.pooled == ("t",)
    without = placement_of(slow.situation).best
    assert slow.best.step_s < without.step_s / 2 and slow.best.stages.down_s < without.stages.down_s / 20
    assert "layers     at the host: " in str(slow) and "sent behind them" in str(slow)
    assert all(told in str(fast) for told in ("Layers at the host", "v to w (2)", "2.15 GFLOP"))
    both = placement_of(fast.situation, SearchOptions(host_layers=("w", "v")))
    assert both.host_layers == ("v", "w") and both.step_s > fast.step_s
    assert both.best.execution.mode == "sync"
    assert with_cut(fast.situation, fast.best, 1).step_s == pytest.approx(both.step_s, rel=2e-3)
    with pytest.raises(ConfigError, match="no cut has `v` and others of these alone. There are: w; v, w"):
        placement_of(fast.situation, SearchOptions(host_layers=("v",)))
    with pytest.raises(ConfigError, match="`sync` and `async`; .*modes=.*pipelined"):
        placement_of(fast.situation, SearchOptions(host_layers=("w",), modes=("pipelined",)))
    with pytest.raises(ConfigError, match="host_layers=True and hot_rows"):
        SearchOptions(host_layers=True, hot_rows=True)


def test_a_table_on_every_accelerator_by_hand():
    s = situation_of(table_of(1000, 800))
    choice = whole(s.tables[0], s)
    reduced = 2 * 7 / 8 * 512_000 / 450e9
    moved = (5 * 100 * 512 + 1000 * (2 * 1024 + 512)) / REACHED_BYTES_PER_S + LAUNCH_S
    assert choice.loads.accelerator_s == pytest.approx(reduced + moved)
    assert choice.device_bytes == 1000 * 1536 and choice.host_bytes == 0


def test_an_update_of_all_rows_by_hand():
    """A split table's rows have their state read and written and their gradient read, which is there, too."""
    few, every = (situation_of(table_of(8000, 16), updates_all_rows=is_whole) for is_whole in (False, True))
    (table,) = few.tables
    of_batch = {
        by_row: 2 * table.ids.busiest_owner(16, 8000, 8) * 1024,
        by_column: 2 * table.ids.expected_distinct(16, 8000) * 128,
    }
    for place, moved in of_batch.items():
        before, after = place(table, few), place(table, every)
        assert after.device_bytes - before.device_bytes == 1000 * 512
        extra_s = after.loads.accelerator_s - before.loads.accelerator_s
        assert extra_s == pytest.approx((1000 * (2 * 1024 + 512) - moved) / REACHED_BYTES_PER_S)


def test_hot_rows_take_ids_from_the_host_and_memory_from_accelerators():
    s = situation_of(table_of(10**6, zipf=1.1))
    cold = on_host(s.tables[0], s)
    previous = cold
    for count in (2000, 20_000, 200_000):
        choice = hot_rows(s.tables[0], count, s)
        assert choice.loads.down_s < previous.loads.down_s and choice.device_bytes > previous.device_bytes
        assert choice.host_bytes == cold.host_bytes == 10**6 * 1024
        assert choice.loads.accelerator_s > 2 * count / s.num_devices * 1024 / REACHED_BYTES_PER_S
        previous = choice
    share = s.tables[0].ids.hottest_share(200_000, 10**6)
    assert 0.8 < share < 1 and previous.loads.down_s < cold.loads.down_s / 2


def test_steps_by_hand():
    """Stages of 0, 0, 1, 4 and 1 ms (and latencies): 6 in turn, 6/2 with two batches under way, and 4 with three."""
    s = situation_of(table_of(1), dense=dataclasses.replace(DENSE, step_s=4e-3), rates=NO_OVERHEAD)
    link = s.to_device.latency_s
    choice = dataclasses.replace(
        on_host(s.tables[0], s), loads=dataclasses.replace(whole(s.tables[0], s).loads, accelerator_s=0.0)
    )
    choice = dataclasses.replace(
        choice, loads=dataclasses.replace(choice.loads, down_s=1e-3, up_s=1e-3), patched_s=1e-4
    )
    of = lambda execution: outcome(s, execution, [choice], 1)
    assert of(SYNC).step_s == pytest.approx(6e-3 + 2 * link)
    assert of(Execution("pipelined", prefetch=1)).step_s == pytest.approx(4e-3 + 2 * 1e-4)  # patched from two
    stale = of(Execution("async", max_staleness=1))
    assert stale.step_s == pytest.approx(4e-3) and stale.execution.staleness == 1
    reading = dataclasses.replace(s, rates=dataclasses.replace(NO_OVERHEAD, read_s=1e-3))
    assert outcome(reading, SYNC, [choice], 1).step_s == pytest.approx(1.024 / 104)


def test_one_thread_hands_batches_to_workers():
    """By hand: 6 ms of CPUs for each of two tables, 1 ms a batch, 2 ms a table, 3 ms a worker; two of them are best."""
    rates = HostRates(batch_s=1e-3, table_s=2e-3, worker_s=3e-3)
    s = situation_of(table_of(1, 8), table_of(1, 8, path="u"), rates=rates)
    choices = [on_host(t, s) for t in s.tables]
    choices = [dataclasses.replace(c, loads=dataclasses.replace(c.loads, cpu_s=6e-3)) for c in choices]
    host_s = lambda workers: outcome(s, SYNC, choices, workers).stages.host_s
    assert [host_s(n) for n in (1, 2, 3, 4)] == pytest.approx([20e-3, 17e-3, 18e-3, 20e-3])
    assert with_best_workers(s, SYNC, choices).num_workers == 2
    assert outcome(s, SYNC, [whole(t, s) for t in s.tables], 0).stages.host_s == 0.0


# ---- the search


def every_placement(s: Situation, options: SearchOptions):
    for execution in options.executions():
        per_table = [[c for c in choices_of(t, s, options.hot_rows) if c.place in options.places] for t in s.tables]
        for choices in itertools.product(*per_table):
            is_on_host = any(c.place.is_on_host for c in choices)
            for count in worker_counts(s) if is_on_host else (0,):
                yield outcome(s, execution, choices, count)


@pytest.mark.parametrize("seed", range(8))
def test_no_placement_is_better_than_the_one_that_is_found(seed):
    rng = np.random.default_rng(seed)
    tables = tuple(
        table_of(int(10 ** rng.uniform(3, 8)), int(10 ** rng.uniform(3, 6)), float(rng.choice([0.0, 1.05])), f"t{n}")
        for n in range(3)
    )
    dense = dataclasses.replace(DENSE, step_s=10 ** rng.uniform(-4, -2))
    s = situation_of(*tables, dense=dense, budget_bytes=10 ** rng.uniform(9.1, 10.5))
    options = SearchOptions(max_staleness=2, most_prefetch=2, hot_rows=True)
    best = min(o.objective_s for o in every_placement(s, options) if o.fits)
    found = search(s, options)
    assert found.considered[0].fits and found.considered[0].objective_s == pytest.approx(best, rel=2e-4)
    assert found.bound_s <= best * (1 + 1e-6) and found.bound_s >= best * (1 - 2e-4)
    assert found.best.step_s <= found.considered[0].step_s * 1.0011


@pytest.mark.parametrize("seed", range(6))
def test_no_placement_with_layers_at_the_host_is_better_than_the_one_that_is_found(seed):
    """Against all placements in which a cut has all of its tables, or none."""
    rng = np.random.default_rng(seed)
    rows = lambda: int(10 ** rng.uniform(3, 8))
    tables = [dataclasses.replace(table_of(rows(), 20_000, path=f"t{n}"), num_sums=9_000 * n) for n in range(3)]
    value = lambda: int(10 ** rng.uniform(4, 7))
    cuts = (
        HostCut(("t0",), ("a",), value(), 10 ** rng.uniform(7, 11), "float32", 1000),
        HostCut(("t0", "t1"), ("a", "b"), value(), 10 ** rng.uniform(7, 11), "float32", 2000),
        HostCut(("t1", "t2"), (), value(), 1e6, "float32", 0),
    )
    dense = dataclasses.replace(DENSE, step_s=10 ** rng.uniform(-4, -2))
    s = situation_of(*tables, dense=dense, budget_bytes=10 ** rng.uniform(9.1, 10.5), cuts=cuts)
    link = dataclasses.replace(s.to_device, bandwidth_bytes_per_s=10 ** rng.uniform(7, 11))
    s = dataclasses.replace(s, host=dataclasses.replace(s.host, to_device=link))
    options = SearchOptions(max_staleness=1, most_prefetch=1, pooling=True, host_layers=True)

    def is_whole(choices):
        own = [choice.cut for choice in choices]
        return all(own.count(cut) in (0, len(s.cuts[cut].tables)) for cut in set(own) - {None})

    best = np.inf
    for execution in options.executions():
        per_table = [
            [c for c in choices_of(t, s, False, True, True) if c.place.fits_mode(execution.mode)] for t in s.tables
        ]
        for choices in filter(is_whole, itertools.product(*per_table)):
            for count in worker_counts(s) if any(c.place.is_on_host for c in choices) else (0,):
                priced = outcome(s, execution, choices, count)
                best = min(best, priced.objective_s if priced.fits else np.inf)
    found = search(s, options)
    assert is_whole(found.best.choices)
    assert found.considered[0].fits and found.considered[0].objective_s == pytest.approx(best, rel=2e-4)
    assert found.bound_s <= best * (1 + 1e-5)  # the solver is exact to 1e-6 of the slowest placement


def test_the_fewest_workers_that_do_are_taken():
    s = situation_of(table_of(10**9, zipf=1.05), rates=dataclasses.replace(NO_OVERHEAD, line_s=30e-9))
    best = search(s).best
    assert best.choices[0].place is Place.HOST and 1 < best.num_workers < s.most_workers
    fewer = outcome(s, best.execution, best.choices, best.num_workers - 1)
    assert fewer.step_s > outcome(s, best.execution, best.choices, s.most_workers).step_s * 1.001


def test_exact_modes_alone_unless_rows_may_be_stale():
    modes = lambda **settings: {one.mode for one in SearchOptions(**settings).executions()}
    assert modes() == {"sync", "pipelined"} and modes(max_staleness=1) == {"sync", "pipelined", "async"}
    assert max(one.staleness for one in SearchOptions(max_staleness=3).executions()) == 3


def test_memory_decides_first():
    s = situation_of(table_of(10**9, 8))
    placement = placement_of(s)
    assert placement.host_tables == ("t",) and "host memory" in str(placement)
    assert placement.best.host_bytes > 1e12 and placement.execution.num_workers == 1
    small = placement_of(situation_of(table_of(1000, 8)))
    assert small.host_tables == () and small.execution is None
    with pytest.raises(MemoryBudgetError, match="tables with the optimizer's state take 4,096 GB"):
        placement_of(situation_of(table_of(4 * 10**9)))


def test_what_is_compared_does_not_beat_the_plan():
    tables = [table_of(rows, zipf=1.05, path=f"t{rows}") for rows in (3, 5000, 10**6, 10**8)]
    placement = placement_of(situation_of(*tables), SearchOptions(max_staleness=2))
    assert len(placement.compared) == 7 and placement.gap < 2e-4
    assert all(row.step_s >= placement.step_s * 0.999 for row in placement.compared)
    text = str(placement)
    for told in ("CPUs alone", "accelerators, by table", "tables on hosts, sync", "Assumed:", "t100000000"):
        assert told in text
    assert placement.examples_per_s == pytest.approx(1024 / placement.step_s)


def test_the_plan_is_among_the_best_of_every_mode():
    """With the workers that are best for it: 3, where each takes a ninth of the work more; the search tries 2 and 4."""
    rates = dataclasses.replace(NO_OVERHEAD, line_s=300e-9)
    s = situation_of(table_of(10**9, zipf=1.05), rates=rates)
    cpu_s = on_host(s.tables[0], s).loads.cpu_s
    s = situation_of(*s.tables, rates=dataclasses.replace(rates, worker_s=cpu_s / 9))
    placement = placement_of(s)
    assert placement.execution.num_workers == 3
    modes = str(placement).partition("The best of every mode")[2]
    row = next(line for line in modes.splitlines() if line.startswith(placement.execution.outline))
    assert seconds(placement.step_s) in row


def test_exchanges_are_paid_once():
    s = situation_of(table_of(10**6), table_of(10**6, path="u"))
    by_row = [next(c for c in choices_of(t, s) if c.place is Place.BY_ROW) for t in s.tables]
    one, two = (outcome(s, SYNC, by_row[:n], 0).step_s for n in (1, 2))
    assert two - one == pytest.approx(by_row[1].loads.accelerator_s)
    assert one == pytest.approx(1e-3 + by_row[0].loads.accelerator_s + exchange_fixed_s(s))
    assert exchange_fixed_s(s) == pytest.approx(3 * (7 * 3e-6 + LAUNCH_S))


# ---- what cannot be placed


def test_hosts_must_be_described():
    with pytest.raises(ClusterError, match="lacks host. Add it, as in configs/clusters/h100x8_cpu.yaml"):
        situation(Cluster.from_file(CLUSTERS / "h100x8.yaml"), (table_of(1),), DENSE, 1)
    (group,) = CLUSTER.groups
    partial = dataclasses.replace(group, host=dataclasses.replace(group.host, to_device=None))
    with pytest.raises(ClusterError, match=r"lacks host\.to_device"):
        situation(Cluster("c", (partial,)), (table_of(1),), DENSE, 1)
    with pytest.raises(ConfigError, match="the step has none"):
        situation(CLUSTER, (), DENSE, 1)
    assert math.isclose(situation_of(table_of(1)).host_budget_bytes, 1.8e12)
