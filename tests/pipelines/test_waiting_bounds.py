"""Bounds on candidates against brute force: never above the best of all cuts, and met where all submeshes are alike."""

import importlib.util
import itertools
import math
import pathlib

import numpy as np
import pytest

from autoshard.pipelines.cost.table import CostTable
from autoshard.pipelines.schedule.tasks import ScheduleKind
from autoshard.pipelines.search.arrangement import Arrangement, Stage
from autoshard.pipelines.search.candidate import Candidate
from autoshard.pipelines.search.candidates import CandidateSet
from autoshard.pipelines.search.options import StageOptions
from autoshard.pipelines.search.replica_group import arrangement_step_s
from autoshard.pipelines.search.slice_candidates import least_time_s, least_waiting_s, slice_candidates
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
        context = case.context(layers, case.random_table(rng, cluster), cluster)
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
        assert waiting.most_micro_batches(one, best_s * (1 + ROUNDING), 1, 100) >= number
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
