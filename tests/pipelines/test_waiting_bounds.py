"""Bounds on candidates against brute force: never above the best of all cuts, and met where all submeshes are alike."""

import dataclasses
import importlib.util
import itertools
import math
import pathlib

import numpy as np
import pytest

from autoshard.pipelines.cost.table import CostTable
from autoshard.pipelines.schedule.orders import make_schedule
from autoshard.pipelines.schedule.peak_memory import peak_bytes
from autoshard.pipelines.schedule.tasks import Phase, ScheduleKind
from autoshard.pipelines.search.arrangement import Arrangement, Stage
from autoshard.pipelines.search.candidate import Candidate
from autoshard.pipelines.search.candidates import CandidateSet
from autoshard.pipelines.search.memory_bounds import MemoryBounds, held_micro_batches
from autoshard.pipelines.search.options import StageOptions
from autoshard.pipelines.search.replica_group import arrangement_step_s
from autoshard.pipelines.search.slice_candidates import least_time_s, least_waiting_s, slice_candidates
from autoshard.pipelines.search.step_durations import stage_durations, step_durations
from autoshard.pipelines.search.waiting_bounds import WaitingBounds

_spec = importlib.util.spec_from_file_location("case", pathlib.Path(__file__).with_name("case.py"))
case = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(case)

ROUNDING = 1e-9


def best_of_all_cuts_s(context, candidate, num_micro_batches, num_pipelines):
    """Least step time over all cuts; nothing is computed again, as memory is no matter here."""
    group = candidate.group(context, [num_micro_batches] * num_pipelines)
    num_layers, best = context.intervals.layers.num_layers, math.inf
    for inner in itertools.combinations(range(1, num_layers), group.num_stages - 1):
        stages = tuple(Stage(*span) for span in itertools.pairwise((0, *inner, num_layers)))
        best = min(best, arrangement_step_s(context, Arrangement(group.pipelines(stages))))
    return best


def best_that_fits_s(context, candidate, num_micro_batches, num_pipelines, others=0):
    """Least step time over all cuts and all choices of what is computed again; with that many other replicas."""
    group = candidate.group(context, [num_micro_batches] * num_pipelines)
    limits = [context.limits_bytes[submesh.slice] for submesh in group.submeshes[0]]
    num_layers, best = context.intervals.layers.num_layers, math.inf
    for inner in itertools.combinations(range(1, num_layers), group.num_stages - 1):
        for again in itertools.product((False, True), repeat=group.num_stages):
            spans = itertools.pairwise((0, *inner, num_layers))
            stages = tuple(Stage(*span, a) for span, a in zip(spans, again, strict=True))
            arrangement = Arrangement(group.pipelines(stages))
            durations = step_durations(context.intervals, context.topology, arrangement, [0])
            pipeline = durations.pipelines[0]
            owners = num_pipelines + others
            parts = [stage_durations(context.intervals, arrangement.pipelines[0], s, owners) for s in range(len(again))]
            peaks = peak_bytes(dataclasses.replace(pipeline, stages=tuple(parts)))
            if all(peak <= limit for peak, limit in zip(peaks, limits, strict=True)):
                best = min(best, arrangement_step_s(context, arrangement))
    return best


def candidate(options, counts, kind, chunks, number, replicas, size=1):
    return Candidate(options, counts, size, number, replicas, kind, chunks, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("kind", ScheduleKind, ids=lambda k: k.value)
def test_no_cut_is_below_the_bounds(kind):
    rng = np.random.default_rng(4)
    num_tight = 0
    for _ in range(60):
        cluster = case.cluster(12, 12)
        chunks = int(rng.integers(2, 4)) if kind is ScheduleKind.INTERLEAVED else 1
        layers = case.random_layers(rng, int(rng.integers(2 * chunks, 9)), int(rng.integers(1, 3)))
        context = case.context(layers, case.random_table(rng, cluster), cluster, 1e15, 1e15)
        most = layers.num_layers // chunks
        options = (0,) if rng.integers(2) else (0, 2)
        counts = tuple(int(rng.integers(1, max(2, min(4, most - len(options) + 2)))) for _ in options)
        if sum(counts) * chunks > layers.num_layers:
            options, counts = (0,), (most,)
        number, replicas = int(rng.integers(1, 16)), int(rng.integers(1, 3))
        one = candidate(options, counts, kind, chunks, number, replicas)
        best_s = best_of_all_cuts_s(context, one, number, replicas)
        waiting = WaitingBounds(context)
        bound_s = waiting.least_s(one, 0.0, 4 * best_s)
        assert bound_s <= best_s * (1 + ROUNDING)
        assert waiting.most_micro_batches(one, best_s * (1 + ROUNDING), 1, 100, replicas) >= number
        of_set = CandidateSet(context, options, 1)
        schedules = (kind,)
        set_s = of_set.least_s(np.array([replicas]), np.array([number]), schedules)[0]
        assert set_s <= best_s * (1 + ROUNDING)
        found, _ = of_set.candidates_of(
            np.array([counts]), replicas, number, StageOptions(schedules=schedules, most_chunks=chunks), math.inf, 10
        )
        own = [c.bound_s for c in found if c.chunks == chunks]
        assert all(s <= best_s * (1 + ROUNDING) for s in own)
        num_tight += bound_s > 0.75 * best_s
    assert num_tight > 10


@pytest.mark.parametrize("kind", ScheduleKind, ids=lambda k: k.value)
def test_no_cut_that_fits_is_below_the_bounds(kind):
    """With little memory, so that layers are computed again or nothing fits."""
    rng = np.random.default_rng(11)
    num_fit = num_more = num_none = 0
    for _ in range(40):
        cluster = case.cluster(6, 6)
        chunks = int(rng.integers(2, 4)) if kind is ScheduleKind.INTERLEAVED else 1
        layers = case.random_layers(rng, int(rng.integers(2 * chunks, 8)))
        table = case.random_table(rng, cluster, sizes=(1,))
        context = case.context(layers, table, cluster, *rng.uniform(8e8, 3.5e9, 2))
        most = min(3, layers.num_layers // chunks)
        options = (0,) if most < 2 or rng.integers(2) else (0, 2)
        counts = (int(rng.integers(1, most + 1)),) if len(options) == 1 else (1, 1)
        number, replicas, others = (int(n) for n in rng.integers((1, 1, 0), (9, 3, 3)))
        one = candidate(options, counts, kind, chunks, number, replicas)
        best_s = best_that_fits_s(context, one, number, replicas)
        waiting = WaitingBounds(context)
        bound_s = waiting.least_s(one, 0.0, 10.0)
        assert bound_s <= best_s * (1 + ROUNDING)
        with_others_s = best_that_fits_s(context, one, number, replicas, others)
        if math.isfinite(with_others_s):
            time_s = with_others_s * (1 + ROUNDING)
            assert waiting.most_micro_batches(one, time_s, 1, 20, replicas + others) >= number
        free = WaitingBounds(case.context(layers, table, cluster, 1e12, 1e12)).least_s(one, 0.0, 10.0)
        assert free <= bound_s * (1 + ROUNDING)
        num_fit += math.isfinite(best_s)
        num_more += math.isfinite(best_s) and bound_s > 1.02 * free
        num_none += bound_s == 10.0
    assert num_fit > 5
    assert num_more + num_none > 5


@pytest.mark.parametrize("kind", ScheduleKind, ids=lambda k: k.value)
def test_what_is_held_follows_from_the_order(kind):
    """Of each stage, the forward tasks that come before the first backward task of its submesh."""
    for num_submeshes, chunks, number in itertools.product(range(1, 5), range(1, 4), range(1, 12)):
        if (chunks > 1) == (kind is ScheduleKind.INTERLEAVED):
            order = make_schedule(kind, num_submeshes, num_submeshes * chunks, number).order
            held = held_micro_batches(kind, num_submeshes, chunks, number)
            for submesh, tasks in enumerate(order):
                first = next(i for i, task in enumerate(tasks) if task.phase is Phase.BACKWARD)
                stages = [task.stage // num_submeshes for task in tasks[:first]]
                assert [stages.count(c) for c in range(chunks)] == held[submesh].tolist()


def test_layers_computed_again_by_hand():
    """One submesh; a layer has 1 byte of weights, 1 of gradients, 2 of state, and 3 of residuals or 1 of inputs.

    Under GPipe with 4 micro-batches n layers need 4 n + 12 n bytes as they are, and 4 n + 4 computed again. Of two
    replicas each has half of the state.
    """
    cluster = case.cluster(2)
    table = case.plain_table(cluster, 1, (1,), weight=1.0, residual=3.0, inputs=1.0)
    one = candidate((0,), (1,), ScheduleKind.GPIPE, 1, 4, 1)
    main = np.arange(4)

    def again(limit, owners=1):
        context = case.context(case.chain([0] * 4), table, cluster, limit)
        return MemoryBounds(context).least_again(one, main, owners, 4)[0].tolist()

    assert again(64.0) == [0, 0, 0, 0, 0]
    assert again(63.0) == [0, 0, 0, 0, 4]
    assert again(20.0) == [0, 0, 2, 3, 4]
    assert again(15.9) == [0, 1, 2, math.inf, math.inf]
    assert again(15.9, owners=2) == [0, 0, 2, 3, math.inf]


def test_equal_layers_that_fill_all_submeshes():
    """One layer of 1.5 ms a stage: GPipe takes (M + P - 1) tasks of each phase, and the bound says so."""
    cluster = case.cluster(8)
    context = case.context(case.chain([0] * 8), case.plain_table(cluster, 1, (1,)), cluster)
    one = candidate((0,), (8,), ScheduleKind.GPIPE, 1, 16, 1)
    assert WaitingBounds(context).least_s(one, 0.0, 0.1) == pytest.approx((16 + 7) * 1.5e-3, rel=1e-4)
    assert best_of_all_cuts_s(context, one, 16, 1) == pytest.approx((16 + 7) * 1.5e-3)


def test_interleaved_stages_wait_too():
    """Eight layers of f = 0.5 and b = 1 ms on four submeshes, two each: no submesh can wait less than 3 (b - f)."""
    cluster = case.cluster(4)
    context = case.context(case.chain([0] * 8), case.plain_table(cluster, 1, (1,)), cluster)
    one = candidate((0,), (4,), ScheduleKind.INTERLEAVED, 2, 16, 1)
    bound_s = WaitingBounds(context).least_s(one, 0.0, 0.1)
    assert bound_s == pytest.approx((16 * 2 + 3) * 1.5e-3, rel=1e-4)  # the last submesh waits for 3 layers, as all do
    assert bound_s <= best_of_all_cuts_s(context, one, 16, 1) * (1 + ROUNDING)


def test_a_group_on_each_slice():
    """Every candidate of two slices, every cut, every split of the batch: none is below the bound for all of them.

    A device has room for two of the five layers, so that every replica is a pipeline.
    """
    cluster = case.cluster(3, 3)
    layers = case.chain([0, 1, 0, 1, 0])
    table = case.plain_table(cluster, 2, (1, 2), weight=1e6)
    context = case.context(layers, table, cluster, 9e6, 9e6)
    options, batch_size = StageOptions(), 12
    rows = [slice_candidates(context, s, (1, 2), options) for s in (0, 1)]
    by_number = []
    for row in rows:
        times_s = np.full(batch_size + 1, np.inf)
        times_s[0] = 0.0
        for one in row.candidates:
            per_round = one.micro_batch_size * one.num_pipelines
            for number in range(1, batch_size // per_round + 1):
                best_s = best_of_all_cuts_s(context, one, number, one.num_pipelines)
                for share in range(per_round * (number - 1) + 1, per_round * number + 1):  # some may have fewer
                    times_s[share] = min(times_s[share], best_s)
        by_number.append(times_s)
    best_s = float(np.maximum(by_number[0], by_number[1][::-1]).min())
    loose_s = least_time_s(rows, batch_size, at_best=True)
    bound_s = least_waiting_s(context, rows, batch_size, loose_s, 2 * best_s)
    assert loose_s <= bound_s <= best_s * (1 + ROUNDING)
    assert bound_s > 1.02 * loose_s


def test_copies_of_later_stages_of_a_submesh_are_sent_while_it_is_busy():
    """Two replicas over a slow link: the interleaved step hides half of what 1F1B waits for, and so do its bounds."""
    slow = case.Link(0.0, 1e9, 1, "made up")
    cluster = case.cluster(2, 2, between=slow)
    layers = case.chain([0] * 4)
    table = case.plain_table(cluster, 1, (1,), weight=1e7)
    context = case.context(layers, CostTable(table.options, table.costs), cluster)
    for kind, chunks in ((ScheduleKind.ONE_F_ONE_B, 1), (ScheduleKind.INTERLEAVED, 2)):
        one = candidate((0,), (1,), kind, chunks, 4, 2)
        best_s = best_of_all_cuts_s(context, one, 4, 2)
        found, _ = CandidateSet(context, (0,), 1).candidates_of(
            np.array([[1]]), 2, 4, StageOptions(schedules=(kind,), most_chunks=2), math.inf, 10
        )
        assert all(c.bound_s <= best_s * (1 + ROUNDING) for c in found)
        assert WaitingBounds(context).least_s(one, 0.0, 2 * best_s) <= best_s * (1 + ROUNDING)
