"""Cuts against brute force, bounds against cuts, and memory against the schedule itself."""

import importlib.util
import itertools
import math
import pathlib

import numpy as np
import pytest

from autoshard.pipeline.schedule.durations import PipelineDurations, StageDurations
from autoshard.pipeline.schedule.orders import make_schedule
from autoshard.pipeline.schedule.peak_memory import peak_bytes
from autoshard.pipeline.schedule.simulate import step_time
from autoshard.pipeline.schedule.tasks import ScheduleKind
from autoshard.pipeline.search.arrangement import Arrangement, Place, Stage
from autoshard.pipeline.search.cut import Cut, CutEffort, bounded_cut
from autoshard.pipeline.search.improve import improved_cut
from autoshard.pipeline.search.stage_memory import fits
from autoshard.pipeline.search.step_durations import step_durations
from autoshard.pipeline.search.team import Team, arrangement_step_s
from autoshard.pipeline.search.whale import even_cut

_spec = importlib.util.spec_from_file_location("case", pathlib.Path(__file__).with_name("case.py"))
case = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(case)

ROUNDING = 1e-9


def random_team(rng, table, kind, num_layers):
    """Replicas on places of any options, one after the other."""
    chunks = 2 if kind is ScheduleKind.INTERLEAVED else 1
    num_places = int(rng.integers(1, min(3, num_layers // chunks) + 1))
    chosen = [int(o) for o in rng.integers(0, len(table.options), num_places)]
    taken, replicas = [0, 0], []
    for _ in range(int(rng.integers(1, 3))):
        row = []
        for option in chosen:
            part = table.options[option].slice
            row.append(Place(part, taken[part], option))
            taken[part] += table.options[option].num_devices
        replicas.append(tuple(row))
    numbers = (int(rng.integers(1, 6)),) * len(replicas)
    return Team(tuple(replicas), int(rng.integers(1, 3)), numbers, kind, num_places * chunks)


def best_cut(scene, team):
    return bounded_cut(scene, team)[0]


def brute_force_s(scene, team):
    """Least step time over all cuts and all choices of what is computed again."""
    limits = [scene.limits_bytes[place.slice] for place in team.places[0]]
    num_layers, best = scene.runs.layers.num_layers, math.inf
    for inner in itertools.combinations(range(1, num_layers), team.num_stages - 1):
        spans = list(itertools.pairwise((0, *inner, num_layers)))
        for again in itertools.product((False, True), repeat=team.num_stages):
            stages = [Stage(*span, a) for span, a in zip(spans, again, strict=True)]
            durations = step_durations(scene.runs, scene.ground, Arrangement(team.pipelines(stages)))
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
        team = random_team(rng, table, kind, layers.num_layers)
        scene = case.scene(layers, table, cluster, *rng.uniform(1.2e9, 5e9, 2))
        best_s, cut = brute_force_s(scene, team), best_cut(scene, team)
        assert (math.inf if cut is None else cut.step_s) == pytest.approx(best_s, rel=ROUNDING)
        quick, bound_s = bounded_cut(scene, team, CutEffort(most_enumerated=0, most_simulated=2))
        assert bound_s <= best_s * (1 + ROUNDING)
        if quick is not None:
            assert best_s * (1 - ROUNDING) <= improved_cut(scene, team, quick).step_s <= quick.step_s
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


def test_unlike_places_get_layers_in_proportion_to_their_speed():
    """Twice as fast: 6 of 9 equal layers, and of the other 3 the same time."""
    cluster = case.cluster(1, 1)
    layers, table = case.chain([0] * 9), case.plain_table(cluster, 1, (1,))
    team = Team(((Place(0, 0, 0), Place(1, 0, 1)),), 1, (8,), ScheduleKind.ONE_F_ONE_B, 2)
    cut = best_cut(case.scene(layers, table, cluster), team)
    assert [s.stop - s.start for s in cut.stages] == [6, 3]
    assert cut.step_s == pytest.approx((8 + 1) * 9e-3)  # S + M - 1 tasks of 6 x 1.5 ms
    assert cut.bound_s == cut.step_s


def test_earlier_stages_hold_more_and_so_take_less_or_compute_again():
    cluster = case.cluster(3)
    layers = case.chain([0] * 6)
    table = case.plain_table(cluster, 1, (1,), weight=1e6, residual=1e9, inputs=1e7)
    team = Team((tuple(Place(0, i, 0) for i in range(3)),), 1, (8,), ScheduleKind.ONE_F_ONE_B, 3)
    roomy = best_cut(case.scene(layers, table, cluster, 7e9), team)  # three in flight with two layers: 6 GB
    assert [(s.stop - s.start, s.rematerialise) for s in roomy.stages] == [(2, False)] * 3
    tight = best_cut(case.scene(layers, table, cluster, 4.1e9), team)
    assert [s.rematerialise for s in tight.stages][-1] is False
    assert tight.stages[0].rematerialise or tight.stages[0].stop == 1
    assert best_cut(case.scene(layers, table, cluster, 0.5e9), team) is None


def test_the_program_finds_the_cut_of_many_layers():
    """Too many cuts to look at each; equal layers on equal places, where the bound is met."""
    cluster = case.cluster(8)
    layers, table = case.chain([0] * 48), case.plain_table(cluster, 1, (1,))
    team = Team((tuple(Place(0, i, 0) for i in range(8)),), 1, (16,), ScheduleKind.GPIPE, 8)
    cut = best_cut(case.scene(layers, table, cluster), team)
    assert cut.step_s == pytest.approx((16 + 7) * 6 * 1.5e-3)
    assert cut.bound_s == pytest.approx(cut.step_s)


def test_a_cut_is_improved_to_the_best_of_all():
    """Layer by layer from an even cut, over places of two speeds; 680 cuts."""
    cluster = case.cluster(2, 2)
    layers, table = case.chain([0, 1, 2] * 6, 1e6), case.plain_table(cluster, 3, (1,))
    scene = case.scene(layers, table, cluster)
    team = Team(
        ((Place(0, 0, 0), Place(0, 1, 0), Place(1, 0, 1), Place(1, 1, 1)),), 1, (6,), ScheduleKind.ONE_F_ONE_B, 4
    )
    best = best_cut(scene, team)
    stages = tuple(Stage(*span) for span in itertools.pairwise(even_cut(18, 4)))
    even = Arrangement(team.pipelines(stages))
    start = Cut(even, stages, arrangement_step_s(scene, even), 0.0)
    improved = improved_cut(scene, team, start)
    assert start.step_s > best.step_s * 1.1
    assert improved.step_s == pytest.approx(best.step_s, rel=ROUNDING)
    assert improved_cut(scene, team, start, [[s.start for s in best.stages] + [18]], 2).step_s == improved.step_s
