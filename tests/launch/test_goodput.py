"""Goodput by hand: for each log, what every second was spent on is worked out beside it."""

import random

import pytest
from run_logs import FIRST, lost, phase, restored, saved, second, supervisor, workers

from autoshard.launch.events import Drained, DrainStarted, Finished, PlannedAhead, RunFailed, Stopped
from autoshard.launch.goodput import BADPUT, Activity, LossCount, goodput
from autoshard.launch.messages import Phase, Tier

START = {Activity.STARTUP: 8, Activity.PLANNING: 3, Activity.COMPILE: 5, Activity.RESTORE: 2}


def parts(found):
    assert sum(span.end_s - span.start_s for span in found.spans) == pytest.approx(found.total_s)
    assert all(a.end_s <= b.start_s for a, b in zip(found.spans, found.spans[1:], strict=False))
    assert found.productive_s + sum(map(found.seconds, BADPUT)) == pytest.approx(found.total_s)
    return {activity: pytest.approx(found.seconds(activity)) for activity in Activity if found.seconds(activity)}


def test_an_undisturbed_run():
    log = [
        *FIRST,
        saved(138, 1, 10),
        phase(158, 1, "saving", 20),
        saved(161, 1, 20),
        Finished(time=162, generation=1, step=20),
    ]
    found = goodput(log)
    assert parts(found) == START | {Activity.PRODUCTIVE: 40, Activity.SAVING: 4}
    assert found.total_s == 62 and found.fraction == pytest.approx(40 / 62)
    assert (found.generations, found.losses, found.steps_redone) == (1, (), 0)


@pytest.mark.parametrize("name", Phase)
def test_every_phase_is_an_activity(name):
    found = goodput([supervisor(0), workers(0, 1), phase(0, 1, name), Finished(time=7, generation=1, step=1)])
    activity = Activity.PRODUCTIVE if name is Phase.TRAINING else Activity(name.value)
    assert parts(found) == {activity: 7}


def test_evaluations_stand_apart_from_steps():
    """Ten steps in 20 s, an evaluation of 6 s, ten steps in 20 s; the last three are lost with 1 s of the next."""
    log = [*FIRST, phase(138, 1, "evaluation", 10), phase(144, 1, "training", 10), saved(158, 1, 17)]
    found = goodput([*log, lost(165, 1, 20, since=1), *second(166, 17), Finished(time=174, generation=2, step=20)])
    assert parts(found)[Activity.EVALUATION] == 6 and parts(found)[Activity.PRODUCTIVE] == 20 + 14 + 6
    assert parts(found)[Activity.REDONE] == 7 and found.steps_redone == 3


def test_a_kill_costs_the_steps_since_the_checkpoint_and_the_one_in_flight():
    """17 steps from 118 to 152 are 2 s each; ten were kept: 20 s. Seven were lost: 14 s, and 1 s of the 18th."""
    log = [
        *FIRST,
        saved(139, 1, 10),
        lost(153, 1, 17, since=1),
        *second(156, 10),
        Finished(time=178, generation=2, step=20),
    ]
    found = goodput(log)
    again = {Activity.DOWN: 3, Activity.STARTUP: 8 + 1, Activity.RESTORE: 2 + 1}
    assert parts(found) == START | again | {Activity.PRODUCTIVE: 20 + 20, Activity.REDONE: 15}
    assert found.losses == (LossCount("signal 9", 1),)
    assert (found.generations, found.steps_redone) == (2, 7)


def test_from_memory_only_the_step_in_flight_is_lost():
    log = [*FIRST, saved(152, 1, 17, Tier.MEMORY), lost(153, 1, 17, since=1), *second(156, 17)]
    found = goodput([*log, Finished(time=164, generation=2, step=20)])
    assert parts(found)[Activity.PRODUCTIVE] == 34 + 6 and parts(found)[Activity.REDONE] == 1
    assert found.steps_redone == 0


def test_two_lost_at_once_are_two_losses_and_one_interruption():
    both = [lost(153, 1, 17, since=1), lost(153.5, 1, 17, since=1.5, rank=0), phase(153.6, 1, "saving", 17)]
    found = goodput([*FIRST, saved(152, 1, 17), *both, *second(156, 17), Finished(time=164, generation=2, step=20)])
    assert parts(found)[Activity.DOWN] == 3 and Activity.SAVING not in parts(found)
    assert found.losses == (LossCount("signal 9", 2),)


def test_a_stall_lasts_from_the_last_progress_until_it_is_noticed():
    """10 steps from 118 to 138, then nothing for 30 s."""
    log = [*FIRST, saved(138, 1, 10), lost(168, 1, 10, "stalled", since=30), *second(170, 10)]
    found = goodput([*log, Finished(time=192, generation=2, step=20)])
    assert parts(found)[Activity.STALL] == 30 and Activity.REDONE not in parts(found)
    assert parts(found)[Activity.PRODUCTIVE] == 40


def test_a_stall_while_compiling():
    found = goodput([*FIRST[:5], lost(171, 1, 0, "stalled", since=60, name="compile"), *second(172, 0)], now_s=184)
    assert parts(found) == {
        Activity.STARTUP: 8 + 1,
        Activity.PLANNING: 3,
        Activity.STALL: 60,
        Activity.DOWN: 1,
        Activity.RESTORE: 1,
        Activity.PRODUCTIVE: 10,
    }


def test_a_drained_resize_loses_no_step():
    drain = [DrainStarted(time=130, generation=1, why="3 workers"), phase(134, 1, "saving", 8)]
    log = [*FIRST, *drain, saved(135, 1, 8), Drained(time=136, generation=1, step=8), *second(137, 8)]
    found = goodput([*log, Finished(time=163, generation=2, step=20)])
    expected = {Activity.PRODUCTIVE: 16 + 24, Activity.SAVING: 2, Activity.DOWN: 1}
    assert parts(found) == START | expected | {Activity.STARTUP: 9, Activity.RESTORE: 3}
    assert found.losses == () and found.steps_redone == 0


def test_workers_that_wait_for_each_other_after_they_saved_still_save():
    """A worker goes back to training when it has saved; it takes no step, but waits until all have."""
    wait = [phase(134, 1, "saving", 8), saved(135, 1, 8), phase(135, 1, "training", 8)]
    drained = [*FIRST, *wait, Drained(time=138, generation=1, step=8), *second(139, 8)]
    end = [phase(163, 2, "saving", 20), phase(164, 2, "training", 20), Finished(time=165, generation=2, step=20)]
    found = goodput([*drained, *end])
    assert parts(found)[Activity.SAVING] == 4 + 2 and parts(found)[Activity.PRODUCTIVE] == 16 + 22
    assert Activity.REDONE not in parts(found)


def test_what_a_killed_supervisor_did_not_log_is_down_time():
    """Its last event is of 138; of the time after it nothing is known but that the run was wanted."""
    log = [*FIRST, saved(138, 1, 10), supervisor(148, resumed=True, generation=1), *second(150, 10)]
    found = goodput([*log, Finished(time=172, generation=2, step=20)])
    assert parts(found)[Activity.DOWN] == 10
    assert parts(found)[Activity.STARTUP] == 8 + 3 and parts(found)[Activity.PRODUCTIVE] == 40


def test_of_a_killed_supervisor_steps_count_only_if_they_were_kept():
    """Known are ten steps by 138, the last event is of 140; five steps were kept."""
    ahead = PlannedAhead(time=140, generation=1, num_workers=3, seconds=9)
    log = [*FIRST, saved(138, 1, 10, Tier.MEMORY), ahead, supervisor(148, resumed=True, generation=1)]
    found = goodput([*log, *second(150, 5), Finished(time=180, generation=2, step=20)])
    assert parts(found)[Activity.PRODUCTIVE] == 10 + 28 and parts(found)[Activity.REDONE] == 12
    assert found.steps_redone == 5


def test_a_run_that_goes_on_is_measured_up_to_now():
    running = goodput([*FIRST, saved(138, 1, 10)], now_s=150)
    assert parts(running) == START | {Activity.PRODUCTIVE: 32} and running.steps_redone == 0
    broken = goodput([*FIRST, saved(138, 1, 10), lost(153, 1, 17, since=1)], now_s=155)
    assert parts(broken) == START | {Activity.PRODUCTIVE: 20, Activity.REDONE: 15, Activity.DOWN: 2}


def test_without_now_a_log_ends_with_its_last_event():
    """As of a run whose supervisor was killed, and that was not continued: what is not saved is lost."""
    found = goodput([*FIRST, saved(138, 1, 10), PlannedAhead(time=140, generation=1, num_workers=3, seconds=9)])
    assert parts(found) == START | {Activity.PRODUCTIVE: 20, Activity.REDONE: 2}


def test_a_damaged_checkpoint_costs_steps_of_earlier_generations_too():
    """Steps 1 to 10 at 2 s, lost; 11 to 15 in the second at 2 s; the third restores 5: ten steps are taken again."""
    log = [*FIRST, saved(138, 1, 10), lost(138, 1, 10), *second(140, 10), saved(152, 2, 15), lost(152, 2, 15)]
    found = goodput([*log, *second(160, 5, generation=3), Finished(time=192, generation=3, step=20)])
    assert parts(found)[Activity.PRODUCTIVE] == 10 + 0 + 30
    assert parts(found)[Activity.REDONE] == 10 + 10 and found.steps_redone == 10


def test_a_generation_that_is_lost_before_its_first_step_counts_as_restart():
    again = [workers(140, 2), phase(140, 2, "startup"), lost(144, 2, 0, "exit status 1", name="startup")]
    log = [*FIRST, saved(138, 1, 10), lost(138, 1, 10), *again, *second(145, 10, generation=3)]
    found = goodput([*log, Finished(time=167, generation=3, step=20)])
    assert parts(found)[Activity.STARTUP] == 8 + 4 + 1 and parts(found)[Activity.DOWN] == 2 + 1
    assert found.generations == 3 and parts(found)[Activity.PRODUCTIVE] == 40


def test_a_run_that_was_stopped_was_not_wanted_until_it_is_continued():
    log = [*FIRST, phase(138, 1, "saving", 10), Drained(time=140, generation=1, step=10)]
    log += [Stopped(time=140, generation=1, step=10), supervisor(9140, resumed=True, generation=1), *second(9142, 10)]
    found = goodput([*log, Finished(time=9164, generation=2, step=20)])
    assert found.total_s == 40 + 24 and found.productive_s == 40


def test_a_run_that_failed_is_down_until_it_is_continued():
    failed = [lost(139, 1, 10, "exit status 1", since=1), RunFailed(time=140, generation=1, error="no")]
    log = [*FIRST, saved(138, 1, 10), *failed]
    assert parts(goodput(log, now_s=500)) == START | {Activity.PRODUCTIVE: 20, Activity.REDONE: 1, Activity.DOWN: 1}
    found = goodput([*log, supervisor(160, resumed=True, generation=1), *second(161, 10)], now_s=170)
    assert parts(found)[Activity.DOWN] == 21 and parts(found)[Activity.PRODUCTIVE] == 27


def test_clocks_that_are_set_back_do_not_count_time_twice():
    found = goodput([*FIRST, saved(138, 1, 10), saved(130, 1, 12), Finished(time=142, generation=1, step=14)])
    assert found.total_s == 42 and found.productive_s == 24


def test_an_empty_log():
    assert goodput([]).total_s == 0 and goodput([]).fraction == 0


@pytest.mark.parametrize("seed", range(50))
def test_whatever_the_log_says_every_second_is_counted_once(seed):
    """Events in an order that no run has: from the first to the last one, spans follow each other without gaps."""
    draw = random.Random(seed)
    log, time, generation = [supervisor(0)], 0, 0
    for _ in range(60):
        time, step = time + draw.randint(0, 5), draw.randint(0, 30)
        generation += draw.random() < 0.1
        possible = (
            supervisor(time, resumed=True, generation=generation),
            workers(time, generation),
            phase(time, generation, draw.choice(list(Phase)), step),
            restored(time, generation, step),
            saved(time, generation, step, draw.choice(list(Tier))),
            lost(time, generation, step, draw.choice(["signal 9", "stalled"]), since=draw.randint(0, 9)),
            Drained(time=time, generation=generation, step=step),
        )
        log.append(draw.choice(possible))
    found = goodput(log)
    parts(found)
    assert found.total_s == log[-1].time and found.steps_redone >= 0
    assert all(a.end_s == b.start_s for a, b in zip(found.spans, found.spans[1:], strict=False))
