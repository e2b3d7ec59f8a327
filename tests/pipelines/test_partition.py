"""Cuts against brute force, bounds against cuts, and memory against the schedule itself."""

import importlib.util
import itertools
import math
import pathlib

import numpy as np
import pytest

from autoshard.pipelines.schedule.durations import PipelineDurations, StageDurations
from autoshard.pipelines.schedule.orders import make_schedule
from autoshard.pipelines.schedule.peak_memory import peak_bytes
from autoshard.pipelines.schedule.simulate import step_time
from autoshard.pipelines.schedule.tasks import ScheduleKind
from autoshard.pipelines.search.arrangement import Arrangement, Stage, Submesh
from autoshard.pipelines.search.improve import improved_partition
from autoshard.pipelines.search.options import PartitionEffort
from autoshard.pipelines.search.partition import StagePartition, best_partition
from autoshard.pipelines.search.replica_group import ReplicaGroup, arrangement_step_s
from autoshard.pipelines.search.stage_memory import fits
from autoshard.pipelines.search.step_durations import step_durations
from autoshard.pipelines.search.whale import even_cut

_spec = importlib.util.spec_from_file_location("case", pathlib.Path(__file__).with_name("case.py"))
case = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(case)

ROUNDING = 1e-9


def random_team(rng, table, kind, num_layers):
    """Replicas on submeshes of any options, one after the other."""
    chunks = 2 if kind is ScheduleKind.INTERLEAVED else 1
    num_submeshes = int(rng.integers(1, min(3, num_layers // chunks) + 1))
    chosen = [int(o) for o in rng.integers(0, len(table.options), num_submeshes)]
    taken, replicas = [0, 0], []
    for _ in range(int(rng.integers(1, 3))):
        row = []
        for option in chosen:
            part = table.options[option].slice
            row.append(Submesh(part, taken[part], option))
            taken[part] += table.options[option].num_devices
        replicas.append(tuple(row))
    numbers = (int(rng.integers(1, 6)),) * len(replicas)
    return ReplicaGroup(tuple(replicas), int(rng.integers(1, 3)), numbers, kind, num_submeshes * chunks)


def best_cut(context, group):
    return best_partition(context, group)[0]


def brute_force_s(context, group):
    """Least step time over all cuts and all choices of what is computed again."""
    limits = [context.limits_bytes[submesh.slice] for submesh in group.submeshes[0]]
    num_layers, best = context.intervals.layers.num_layers, math.inf
    for inner in itertools.combinations(range(1, num_layers), group.num_stages - 1):
        spans = list(itertools.pairwise((0, *inner, num_layers)))
        for again in itertools.product((False, True), repeat=group.num_stages):
            stages = [Stage(*span, a) for span, a in zip(spans, again, strict=True)]
            durations = step_durations(context.intervals, context.topology, Arrangement(group.pipelines(stages)))
            peaks = peak_bytes(durations.pipelines[0])
            if all(peak <= limit for peak, limit in zip(peaks, limits, strict=True)):
                best = min(best, step_time(durations))
    return best


@pytest.mark.parametrize("kind", ScheduleKind, ids=lambda k: k.value)
def test_brute_force(kind):
    rng = np.random.default_rng(1)
    num_found = num_again = 0
    for _ in range(40):
        cluster = case.cluster(12, 12)
        layers = case.random_layers(rng, int(rng.integers(3, 7)))
        table = case.random_table(rng, cluster)
        group = random_team(rng, table, kind, layers.num_layers)
        context = case.context(layers, table, cluster, *rng.uniform(1.2e9, 5e9, 2))
        best_s, cut = brute_force_s(context, group), best_cut(context, group)
        assert (math.inf if cut is None else cut.step_s) == pytest.approx(best_s, rel=ROUNDING)
        quick, bound_s = best_partition(context, group, PartitionEffort(most_enumerated=0, most_simulated=2))
        assert bound_s <= best_s * (1 + ROUNDING)
        if quick is not None:
            assert best_s * (1 - ROUNDING) <= improved_partition(context, group, quick).step_s <= quick.step_s
        num_found += cut is not None
        num_again += cut is not None and any(s.rematerialise for s in cut.stages)
    assert num_found > 10
    assert num_again


@pytest.mark.parametrize("kind", [k for k in ScheduleKind if k is not ScheduleKind.INTERLEAVED], ids=lambda k: k.value)
def test_the_formula_for_what_is_in_flight_is_what_the_order_holds(kind):
    for num_stages, number in itertools.product(range(1, 5), range(1, 8)):
        schedule = make_schedule(kind, num_stages, num_stages, number)
        for held, held_for_weights in ((1.0, 0.4), (1.0, 1.7), (0.0, 1.0)):
            stage = StageDurations(1.0, 1.0, 1.0, held, held_for_weights, 5.0, 0.5)
            stages = (stage,) * num_stages
            peaks = peak_bytes(PipelineDurations(schedule, stages))
            assert all(fits(schedule, stages, peaks))
            assert not any(fits(schedule, stages, [peak - 0.01 for peak in peaks]))


def test_unlike_submeshes_get_layers_in_proportion_to_their_speed():
    """Twice as fast: 6 of 9 equal layers, and of the other 3 the same time."""
    cluster = case.cluster(1, 1)
    layers, table = case.chain([0] * 9), case.plain_table(cluster, 1, (1,))
    group = ReplicaGroup(((Submesh(0, 0, 0), Submesh(1, 0, 1)),), 1, (8,), ScheduleKind.ONE_F_ONE_B, 2)
    cut = best_cut(case.context(layers, table, cluster), group)
    assert [s.stop - s.start for s in cut.stages] == [6, 3]
    assert cut.step_s == pytest.approx((8 + 1) * 9e-3)  # S + M - 1 tasks of 6 x 1.5 ms
    assert cut.bound_s == cut.step_s


def test_earlier_stages_hold_more_and_so_take_less_or_compute_again():
    cluster = case.cluster(3)
    layers = case.chain([0] * 6)
    table = case.plain_table(cluster, 1, (1,), weight=1e6, residual=1e9, inputs=1e7)
    group = ReplicaGroup((tuple(Submesh(0, i, 0) for i in range(3)),), 1, (8,), ScheduleKind.ONE_F_ONE_B, 3)
    roomy = best_cut(case.context(layers, table, cluster, 7e9), group)  # three in flight with two layers: 6 GB
    assert [(s.stop - s.start, s.rematerialise) for s in roomy.stages] == [(2, False)] * 3
    tight = best_cut(case.context(layers, table, cluster, 4.1e9), group)
    assert [s.rematerialise for s in tight.stages][-1] is False
    assert tight.stages[0].rematerialise or tight.stages[0].stop == 1
    assert best_cut(case.context(layers, table, cluster, 0.5e9), group) is None


def test_the_program_finds_the_cut_of_many_layers():
    """Too many cuts to look at each; equal layers on equal submeshes, where the bound is met."""
    cluster = case.cluster(8)
    layers, table = case.chain([0] * 48), case.plain_table(cluster, 1, (1,))
    group = ReplicaGroup((tuple(Submesh(0, i, 0) for i in range(8)),), 1, (16,), ScheduleKind.GPIPE, 8)
    cut = best_cut(case.context(layers, table, cluster), group)
    assert cut.step_s == pytest.approx((16 + 7) * 6 * 1.5e-3)
    assert cut.bound_s == pytest.approx(cut.step_s)


def test_a_cut_is_improved_to_the_best_of_all():
    """Layer by layer from an even cut, over submeshes of two speeds; 680 cuts."""
    cluster = case.cluster(2, 2)
    layers, table = case.chain([0, 1, 2] * 6, 1e6), case.plain_table(cluster, 3, (1,))
    context = case.context(layers, table, cluster)
    group = ReplicaGroup(
        ((Submesh(0, 0, 0), Submesh(0, 1, 0), Submesh(1, 0, 1), Submesh(1, 1, 1)),),
        1,
        (6,),
        ScheduleKind.ONE_F_ONE_B,
        4,
    )
    best = best_cut(context, group)
    stages = tuple(Stage(*span) for span in itertools.pairwise(even_cut(18, 4)))
    even = Arrangement(group.pipelines(stages))
    start = StagePartition(even, stages, arrangement_step_s(context, even), 0.0)
    improved = improved_partition(context, group, start)
    assert start.step_s > best.step_s * 1.1
    assert improved.step_s == pytest.approx(best.step_s, rel=ROUNDING)
    assert (
        improved_partition(context, group, start, [[s.start for s in best.stages] + [18]], 2).step_s == improved.step_s
    )


def test_stages_of_a_submesh_share_its_memory_as_they_need_it():
    """Two submeshes with two stages each, four micro-batches, one layer a stage: the first holds 3 + 2 micro-batches.

    It fits exactly with 2 (1 + 1 + 2) bytes for weights, gradients and state, and 5 x 3 of residuals. Half of that does
    not do for its first stage, which holds three.
    """
    cluster = case.cluster(2)
    layers = case.chain([0] * 4)
    table = case.plain_table(cluster, 1, (1,), weight=1.0, residual=3.0, inputs=3.0)
    group = ReplicaGroup(((Submesh(0, 0, 0), Submesh(0, 1, 0)),), 1, (4,), ScheduleKind.INTERLEAVED, 4)
    quick = PartitionEffort(most_enumerated=0, most_simulated=2)
    cut, _ = best_partition(case.context(layers, table, cluster, 23.0), group, quick)
    assert cut.stages == tuple(Stage(i, i + 1) for i in range(4))
    assert best_partition(case.context(layers, table, cluster, 22.9), group, quick)[0] is None
