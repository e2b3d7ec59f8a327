"""Steps replayed against times worked out by hand, and against a recurrence over all that tasks wait for."""

import dataclasses
import functools
import importlib.util
import itertools
import math
import pathlib
import random
import sys

import pytest

from autoshard.errors import ScheduleError
from autoshard.pipelines.schedule.durations import PipelineDurations, StageDurations, StepDurations, TransferDurations
from autoshard.pipelines.schedule.orders import in_flight_bound, make_schedule
from autoshard.pipelines.schedule.simulate import simulate, step_time
from autoshard.pipelines.schedule.tasks import Phase, Schedule, ScheduleKind, Task
from autoshard.pipelines.schedule.timeline import Timeline

_spec = importlib.util.spec_from_file_location("step_bounds", pathlib.Path(__file__).with_name("bounds.py"))
bounds = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = bounds  # dataclasses look their module up
_spec.loader.exec_module(bounds)
equal_stages_time, least_step_time = bounds.equal_stages_time, bounds.least_step_time

GPIPE, ONE_F_ONE_B = ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B
INTERLEAVED, ZERO_BUBBLE = ScheduleKind.INTERLEAVED, ScheduleKind.ZERO_BUBBLE
F, B, W = Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT


def equal_step(kind, num_submeshes, num_stages, count, *times) -> StepDurations:
    """One pipeline of equal stages without transfers."""
    schedule = make_schedule(kind, num_submeshes, num_stages, count)
    return StepDurations((PipelineDurations(schedule, (StageDurations(*times),) * num_stages),))


def random_pipeline(draw: random.Random) -> PipelineDurations:
    """Unequal stages, some of no length; transfers of neighbours and others; whole numbers, so that sums are exact."""
    kind = draw.choice(list(ScheduleKind))
    num_submeshes = draw.randint(1, 4)
    num_stages = num_submeshes * (draw.randint(1, 3) if kind is INTERLEAVED else 1)
    some = lambda most: float(draw.randint(0, most))
    each = lambda most: tuple(some(most) for _ in range(num_stages)) if draw.random() < 0.7 else ()
    stages = [StageDurations(*(some(most) for most in (4, 6, 4, 9, 9, 9, 9))) for _ in range(num_stages)]
    transfers = [
        TransferDurations(s, t, some(5), some(5))
        for s, t in itertools.combinations(range(num_stages), 2)
        if draw.random() < (0.8 if t == s + 1 else 0.2)
    ]
    draw.shuffle(transfers)
    schedule = make_schedule(kind, num_submeshes, num_stages, draw.randint(1, 7))
    return PipelineDurations(schedule, tuple(stages), tuple(transfers), each(9), each(9), each(5))


def recurrence(pipeline: PipelineDurations) -> tuple[dict[Task, float], float]:
    """When each task stops, and when all gradients are there: from definitions, one task at a time."""
    schedule, stages = pipeline.schedule, pipeline.stages
    takes = {(t.source, t.target): t for t in pipeline.transfers}
    submesh_of = schedule.submesh_of

    def sent_by(task: Task) -> list[tuple[Task, float]]:
        """Tasks that get something of this one from another submesh in a time above 0, nearest stages first."""
        found = []
        for (source, target), t in sorted(takes.items()):
            if submesh_of(source) != submesh_of(target) and task.phase is not W:
                here, there, s = (source, target, t.forward_s) if task.phase is F else (target, source, t.backward_s)
                if here == task.stage and s:
                    found.append((Task(there, task.phase, task.micro_batch), s))
        return found

    @functools.cache
    def stop(task: Task) -> float:
        order = schedule.order[submesh_of(task.stage)]
        before = order[: order.index(task)]
        ready = [0.0]
        if before:
            ready.append(stop(before[-1]))
        if task.phase is F:
            ready += pipeline.weights_s[task.stage : task.stage + 1]
            givers = {s for s, t in takes if t == task.stage} | ({task.stage - 1} if task.stage else set())
        elif task.phase is B:
            ready.append(stop(Task(task.stage, F, task.micro_batch)))
            givers = {t for s, t in takes if s == task.stage} | (set(range(len(stages))) & {task.stage + 1})
        else:
            ready.append(stop(Task(task.stage, B, task.micro_batch)))
            givers = set()
        ready += [arrival(Task(s, task.phase, task.micro_batch), task) for s in givers]
        durations = stages[task.stage]
        backward_s = durations.backward_s + (0 if schedule.splits_backward else durations.weight_s)
        return max(ready) + {F: durations.forward_s, B: backward_s, W: durations.weight_s}[task.phase]

    @functools.cache
    def arrival(giver: Task, taker: Task) -> float:
        mine = [s for other, s in sent_by(giver) if other == taker]
        if not mine:
            return stop(giver)
        order = schedule.order[submesh_of(giver.stage)]
        queue = [(g, t) for g in order for t, _ in sent_by(g) if submesh_of(t.stage) == submesh_of(taker.stage)]
        at = queue.index((giver, taker))
        link_free = arrival(*queue[at - 1]) if at else 0.0
        return max(stop(giver), link_free) + mine[0]

    stops = {task: stop(task) for order in schedule.order for task in order}
    sums = pipeline.gradients_s or (0.0,) * len(stages)
    return stops, max(stops[task] + sums[task.stage] for task in stops if task.phase is schedule.last_phase)


@pytest.mark.parametrize("seed", range(60))
def test_against_a_recurrence(seed):
    draw = random.Random(seed)
    pipelines = tuple(random_pipeline(draw) for _ in range(draw.randint(1, 2)))
    step = StepDurations(pipelines)
    timeline = simulate(step)
    expected = [recurrence(p) for p in pipelines]
    for i, (stops, _) in enumerate(expected):
        found = {(e.stage, e.phase, e.micro_batch): e.stop_s for e in timeline.events if e.pipeline == i and e.phase}
        assert found == {(t.stage, t.phase, t.micro_batch): s for t, s in stops.items()}
    longest_update_s = max(
        sum(p.update_s[submesh :: p.schedule.num_submeshes])
        for p in pipelines
        for submesh in range(p.schedule.num_submeshes)
    )
    assert timeline.step_s == step_time(step) == max(end for _, end in expected) + longest_update_s
    assert least_step_time(step) <= timeline.step_s
    check_events(timeline, step)


def check_events(timeline: Timeline, step: StepDurations) -> None:
    """Nothing overlaps on a submesh or on a direction of a link; nothing lies outside of the step; summaries add up."""
    rows = {}
    for event in timeline.events:
        assert 0 <= event.start_s <= event.stop_s <= timeline.step_s
        if event.is_work or event.to_submesh is not None:
            rows.setdefault((event.pipeline, event.submesh, event.to_submesh), []).append(event)
    for row in rows.values():
        for one, two in itertools.pairwise(row):
            assert one.stop_s <= two.start_s
    for summary in timeline.submeshes:
        pipeline = step.pipelines[summary.pipeline]
        busy_s = sum(e.stop_s - e.start_s for e in rows[summary.pipeline, summary.submesh, None])
        assert summary.busy_s == busy_s
        assert summary.bubble_share == pytest.approx(1 - busy_s / timeline.step_s if timeline.step_s else 0)
        stages = range(summary.submesh, pipeline.schedule.num_stages, pipeline.schedule.num_submeshes)
        held = {s: held_over_time(timeline, summary.pipeline, s, pipeline.schedule) for s in stages}
        assert summary.most_in_flight == max(max(h) for h in held.values())
        assert all(max(held[s]) == in_flight_bound(pipeline.schedule, s) for s in stages)


def held_over_time(timeline: Timeline, pipeline: int, stage: int, schedule: Schedule) -> list[int]:
    """Micro-batches that a stage holds after each of its tasks, read from the events."""
    tasks = [e for e in timeline.events if e.pipeline == pipeline and e.stage == stage and e.phase]
    return list(itertools.accumulate((e.phase is F) - (e.phase is schedule.last_phase) for e in tasks))


@pytest.mark.parametrize("kind", [GPIPE, ONE_F_ONE_B])
def test_equal_stages(kind):
    """M + S - 1 forward and backward times, however the backward time is made up."""
    for num_stages, count in itertools.product((1, 2, 3, 4), range(1, 9)):
        expected = (count + num_stages - 1) * (1 + 2)
        assert step_time(equal_step(kind, num_stages, num_stages, count, 1, 2)) == expected
        assert step_time(equal_step(kind, num_stages, num_stages, count, 1, 1.5, 0.5)) == expected
        assert equal_stages_time(num_stages, num_stages, count, 1, 2) == expected
        assert least_step_time(equal_step(kind, num_stages, num_stages, count, 1, 2)) == expected


def test_interleaving_divides_the_bubble():
    """(P - 1) (f + b) / v instead of (P - 1) (f + b), f and b of all stages of a submesh (2104.04473, 2.2)."""
    for num_submeshes, v in itertools.product((2, 3, 4), (1, 2, 4)):
        for count in (num_submeshes, 3 * num_submeshes, 3 * num_submeshes + 1, 4 * num_submeshes - 1):
            step = equal_step(INTERLEAVED, num_submeshes, num_submeshes * v, count, 4 / v, 8 / v)
            assert step_time(step) == count * 12 + (num_submeshes - 1) * 12 / v
            assert step_time(step) == equal_stages_time(num_submeshes, num_submeshes * v, count, 4 / v, 8 / v)
    for count in (
        1,
        2,
    ):  # fewer than submeshes: the last one leaves M - 1 tasks after the first, which takes all stages
        assert step_time(equal_step(INTERLEAVED, 3, 6, count, 1, 2)) == (6 + count - 1) * 3


def test_zero_bubble():
    """Bubbles of arXiv:2401.10241, table 2: (S - 1) (F + B - W) against (S - 1) (F + B + W) of 1F1B."""
    for num_stages in (2, 3, 4, 6):
        for count in (num_stages, 2 * num_stages, 3 * num_stages + 1):
            for f, b, w in ((1, 1, 1), (2, 2, 1)):
                step = equal_step(ZERO_BUBBLE, num_stages, num_stages, count, f, b, w)
                busy_s = count * (f + b + w)
                assert step_time(step) == busy_s + (num_stages - 1) * (f + b - w)
                plain = equal_step(ONE_F_ONE_B, num_stages, num_stages, count, f, b, w)
                assert step_time(plain) == busy_s + (num_stages - 1) * (f + b + w)


def test_two_stages_with_transfers_by_hand():
    """Transfers of 3 each way, forward 1, backward 2; the link is the bottleneck of the forward pass of GPipe.

    F0@0 and F1@0 stop at 1 and 2; they arrive at 4 and, as the link is busy until then, at 7. F0@1 4-5, F1@1 7-8,
    B0@1 8-10, B1@1 10-12; gradients arrive at 13 and 16; B0@0 13-15, B1@0 16-18.
    """
    schedule = make_schedule(GPIPE, 2, 2, 2)
    pipeline = PipelineDurations(schedule, (StageDurations(1, 2),) * 2, (TransferDurations(0, 1, 3, 3),))
    timeline = simulate(StepDurations((pipeline,)), limits_bytes=((8, 9),), names=(("a", "b"),))
    spans = {(e.name, e.submesh, e.to_submesh): (e.start_s, e.stop_s) for e in timeline.events}
    assert spans == {
        ("F0@0", 0, None): (0, 1),
        ("F1@0", 0, None): (1, 2),
        ("F0@1", 0, 1): (1, 4),
        ("F1@1", 0, 1): (4, 7),
        ("F0@1", 1, None): (4, 5),
        ("F1@1", 1, None): (7, 8),
        ("B0@1", 1, None): (8, 10),
        ("B1@1", 1, None): (10, 12),
        ("B0@0", 1, 0): (10, 13),
        ("B1@0", 1, 0): (13, 16),
        ("B0@0", 0, None): (13, 15),
        ("B1@0", 0, None): (16, 18),
    }
    assert (timeline.step_s, timeline.origin) == (18, "simulated")
    assert [(p.name, p.limit_bytes, p.busy_s, p.bubble_share) for p in timeline.submeshes] == [
        ("a", 8, 6, pytest.approx(2 / 3)),
        ("b", 9, 6, pytest.approx(2 / 3)),
    ]


def test_beginning_and_end_of_a_step_by_hand():
    """Two pipelines of one stage: copies of weights, sums of gradients, and updates that wait for both pipelines."""
    stages = (StageDurations(1, 2),)
    one = PipelineDurations(make_schedule(ONE_F_ONE_B, 1, 1, 2), stages, (), (5,), (1,), (4,))  # 5 + 2 (1 + 2) + 1 = 12
    two = PipelineDurations(make_schedule(ONE_F_ONE_B, 1, 1, 5), stages, (), (), (2,), (1,))  # 5 (1 + 2) + 2 = 17
    timeline = simulate(StepDurations((one, two)))
    spans = {(e.name, e.pipeline): (e.start_s, e.stop_s) for e in timeline.events if e.phase is None}
    assert spans == {
        ("weights", 0): (0, 5),
        ("gradients", 0): (11, 12),
        ("gradients", 1): (15, 17),
        ("update", 0): (17, 21),
        ("update", 1): (17, 18),
    }
    assert timeline.step_s == 21
    assert [p.busy_s for p in timeline.submeshes] == [10, 16]


def test_unequal_stages_by_hand():
    """The slow stage in the middle decides: 1 before it, 4 (3 + 6), 2 after it.

    GPipe adds 1 + 2: the slow stage's last forward task goes on to the last stage, whose first backward task is next.
    """
    stages = (StageDurations(1, 2), StageDurations(3, 6), StageDurations(1, 2))
    for kind, expected in ((ONE_F_ONE_B, 39), (GPIPE, 42)):
        step = StepDurations((PipelineDurations(make_schedule(kind, 3, 3, 4), stages),))
        assert step_time(step) == least_step_time(step) == expected


def test_slow_transfers_in_1f1b_by_hand():
    """Stage 0 holds two micro-batches: the last of five begins after the third's round, which began after the first's.

    A round takes 1 + 5 + 3 + 5 + 2.
    """
    schedule = make_schedule(ONE_F_ONE_B, 2, 2, 5)
    pipeline = PipelineDurations(schedule, (StageDurations(1, 2),) * 2, (TransferDurations(0, 1, 5, 5),))
    step = StepDurations((pipeline,))
    assert step_time(step) == least_step_time(step) == 3 * 16


def test_memory_by_hand():
    """Fixed 100, residuals of 10, of which 4 remain for the weight phase, and 1 while a task runs."""
    times = (1, 1, 1, 10, 4, 100, 1)

    def peaks(kind, num_submeshes, num_stages, count):
        return [p.peak_bytes for p in simulate(equal_step(kind, num_submeshes, num_stages, count, *times)).submeshes]

    assert peaks(GPIPE, 3, 3, 5) == [151] * 3
    assert peaks(ONE_F_ONE_B, 3, 3, 5) == [131, 121, 111]
    assert peaks(ONE_F_ONE_B, 3, 3, 2) == [121, 121, 111]
    # W is put off by s micro-batches: of the same number in flight, s have only what the weight phase reads
    assert peaks(ZERO_BUBBLE, 3, 3, 5) == [131, 125, 119]
    # the first of two submeshes: two chunks, 2 (P - 1) + (v - 1) P = 4 forward tasks before the first backward pair
    assert peaks(INTERLEAVED, 2, 4, 6) == [251, 231]


def test_large_pipelines_agree_with_the_closed_form():
    assert step_time(equal_step(ONE_F_ONE_B, 32, 32, 128, 1, 2)) == (128 + 31) * 3


def test_durations_that_do_not_fit():
    pipeline = equal_step(ONE_F_ONE_B, 2, 2, 2, 1, 2).pipelines[0]

    def refused(message, limits=(), names=(), **changes):
        with pytest.raises(ScheduleError, match=message):
            simulate(StepDurations((dataclasses.replace(pipeline, **changes),)), limits, names)

    refused("2 stages in its schedule, but durations of 1", stages=pipeline.stages[:1])
    refused("`update_s` has one time for each of the 2 stages .* received 3", update_s=(1, 1, 1))
    refused("forward_s of stage 1 of pipeline 0 is nan", stages=(pipeline.stages[0], StageDurations(math.nan, 1)))
    refused("weights_s of stage 0 of pipeline 0 is -1", weights_s=(-1, 0))
    refused("backward_s of the transfer from stage 0 to 1 .* is inf", transfers=(TransferDurations(0, 1, 0, math.inf),))
    refused(r"limits of memory there is one for each submesh .* received \[1\]", limits=((1,),))
    refused(r"names there is one for each submesh .* received \[2, 2\]", names=(("a", "b"), ("c", "d")))
    with pytest.raises(ScheduleError, match="at least one pipeline"):
        step_time(StepDurations(()))
