"""Every schedule holds each task once and can run; what it keeps in flight; what it refuses."""

import dataclasses
import itertools

import pytest

from autoshard.errors import ScheduleError
from autoshard.pipelines.schedule.orders import in_flight_bound, make_schedule
from autoshard.pipelines.schedule.task_graph import task_graph
from autoshard.pipelines.schedule.tasks import Phase, Schedule, ScheduleKind, Task

GPIPE, ONE_F_ONE_B = ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B
INTERLEAVED, ZERO_BUBBLE = ScheduleKind.INTERLEAVED, ScheduleKind.ZERO_BUBBLE
F, B, W = Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT


def text(schedule: Schedule, submesh: int) -> str:
    return " ".join(str(t) for t in schedule.order[submesh])


@pytest.mark.parametrize("kind", ScheduleKind)
def test_each_task_once_in_an_order_that_runs(kind):
    per_submesh = (1, 2, 3) if kind is INTERLEAVED else (1,)
    for num_submeshes, v, count in itertools.product((1, 2, 3, 4, 7), per_submesh, (1, 2, 3, 4, 5, 7, 8, 13)):
        num_stages = num_submeshes * v
        schedule = make_schedule(kind, num_submeshes, num_stages, count)
        phases = (F, B, W) if kind is ZERO_BUBBLE else (F, B)
        assert schedule.num_submeshes == num_submeshes
        for submesh, order in enumerate(schedule.order):
            stages = range(submesh, num_stages, num_submeshes)
            assert sorted(order, key=str) == sorted(
                (Task(s, p, m) for s in stages for p in phases for m in range(count)), key=str
            )
            for stage, phase in itertools.product(stages, phases):  # sums of gradients are made in one order
                found = [t.micro_batch for t in order if (t.stage, t.phase) == (stage, phase)]
                assert found == list(range(count))
        done = set()  # the order in which `wire` ran them keeps to what tasks wait for
        for task in task_graph(schedule, ()).tasks:
            s, m = task.stage, task.micro_batch
            needed = {
                F: {Task(s - 1, F, m)} if s else set(),
                B: {Task(s, F, m)} | ({Task(s + 1, B, m)} if s + 1 < num_stages else set()),
                W: {Task(s, B, m)},
            }
            assert needed[task.phase] <= done, (schedule, task)
            done.add(task)


def test_orders_by_hand():
    assert text(make_schedule(GPIPE, 2, 2, 2), 1) == "F0@1 F1@1 B0@1 B1@1"
    assert text(make_schedule(ONE_F_ONE_B, 3, 3, 4), 0) == "F0@0 F1@0 F2@0 B0@0 F3@0 B1@0 B2@0 B3@0"
    assert text(make_schedule(ONE_F_ONE_B, 3, 3, 4), 2) == "F0@2 B0@2 F1@2 B1@2 F2@2 B2@2 F3@2 B3@2"
    zero_bubble = make_schedule(ZERO_BUBBLE, 2, 2, 3)
    assert text(zero_bubble, 0) == "F0@0 F1@0 B0@0 W0@0 F2@0 B1@0 W1@0 B2@0 W2@0"
    assert text(zero_bubble, 1) == "F0@1 B0@1 F1@1 B1@1 W0@1 F2@1 B2@1 W1@1 W2@1"
    # Figure 4 of arXiv:2104.04473 in small: two chunks a submesh, groups of two micro-batches
    interleaved = make_schedule(INTERLEAVED, 2, 4, 2)
    assert text(interleaved, 0) == "F0@0 F1@0 F0@2 F1@2 B0@2 B1@2 B0@0 B1@0"
    assert text(interleaved, 1) == "F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 B0@1 B1@1"


def test_interleaved_is_megatrons_order_where_submeshes_divide_micro_batches():
    """As Megatron numbers them: the k-th forward task of a submesh, and how many precede its first backward task."""
    for num_submeshes, v, count in itertools.product((2, 3, 4), (2, 3), (1, 2, 3)):
        count *= num_submeshes
        schedule = make_schedule(INTERLEAVED, num_submeshes, num_submeshes * v, count)
        for submesh, order in enumerate(schedule.order):
            forward = [t for t in order if t.phase is F]
            for k, task in enumerate(forward):
                chunk, micro_batch = k % (num_submeshes * v) // num_submeshes, k // (num_submeshes * v) * num_submeshes
                assert task == Task(chunk * num_submeshes + submesh, F, micro_batch + k % num_submeshes)
            warm_up = min(count * v, 2 * (num_submeshes - submesh - 1) + (v - 1) * num_submeshes)
            first = next(i for i, t in enumerate(order) if t.phase is B)
            assert first == min(count * v, warm_up + 1)


@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_micro_batches_in_flight(count):
    for stage in range(4):
        assert in_flight_bound(make_schedule(GPIPE, 4, 4, count), stage) == count
        assert in_flight_bound(make_schedule(ONE_F_ONE_B, 4, 4, count), stage) == min(count, 4 - stage)
        assert in_flight_bound(make_schedule(ZERO_BUBBLE, 4, 4, count), stage) == min(count, 4)
        assert in_flight_bound(make_schedule(INTERLEAVED, 4, 4, count), stage) == min(count, 4 - stage)


def test_interleaved_holds_hardly_more_than_megatron():
    """The stages of submesh 0 hold at most 2 (P - 1) + 1 and v - 1 groups, of less than twice P micro-batches."""
    for count in range(1, 24):
        order = make_schedule(INTERLEAVED, 4, 8, count).order[0]
        held = list(itertools.accumulate(1 if t.phase is F else -1 for t in order))
        assert max(held) <= 7 + (4 if count % 4 == 0 else min(count, 7))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((GPIPE, 2, 4, 1), "one stage on each submesh; received 4 stages on 2 submeshes"),
        ((ZERO_BUBBLE, 4, 2, 1), "one stage on each submesh"),
        ((INTERLEAVED, 2, 3, 1), "multiple of 2"),
        ((INTERLEAVED, 4, 2, 1), "multiple of 4"),
        ((ONE_F_ONE_B, 2, 2, 0), "at least one submesh, one stage and one micro-batch; received .* 0 micro-batches"),
        ((ONE_F_ONE_B, 0, 0, 1), "at least one submesh"),
    ],
)
def test_sizes_that_do_not_fit(sizes, message):
    with pytest.raises(ScheduleError, match=message):
        make_schedule(*sizes)


def test_orders_that_cannot_run():
    good = make_schedule(ONE_F_ONE_B, 2, 2, 2)
    first, second = good.order

    def wired(*order):
        return task_graph(dataclasses.replace(good, order=order), ())

    swapped = (first[0], first[2], first[1], *first[3:])  # waits for B0 of stage 1 before F1, which stage 1 gets first
    late = (second[0], second[2], second[1], second[3])
    with pytest.raises(ScheduleError, match="submesh 0: B0@0 for B0@1; submesh 1: F1@1 for F1@0"):
        wired(swapped, late)
    with pytest.raises(ScheduleError, match="1 never run .* the first of them B1@1"):
        wired(first, second[:-1])
    with pytest.raises(ScheduleError, match="runs B0@1 again"):
        wired(first, (*second, second[1]))
    with pytest.raises(ScheduleError, match="Submesh 0 runs F0@1, which does not belong there"):
        wired(second, first)
    with pytest.raises(ScheduleError, match="Submesh 1 runs W0@1, which does not belong there"):
        wired(first, (*second, Task(1, W, 0)))
    with pytest.raises(ScheduleError, match="received 1 to 0"):
        task_graph(good, ((1, 0),))
    with pytest.raises(ScheduleError, match="received 1 to 2"):
        task_graph(good, ((1, 2),))
    with pytest.raises(ScheduleError, match="two transfers"):
        task_graph(good, ((0, 1), (0, 1)))
