"""Limits of time are learnt, and those who exceed them are named."""

import pytest

from autoshard.launch.messages import Heartbeat, Phase
from autoshard.launch.progress import FIRST_LIMITS_S, LEAST_LIMITS_S, LearntLimits, Progress


def beat(progress, process, phase, step, now_s):
    progress.heard(process, Heartbeat(phase=phase, step=step), now_s)


def both(progress, phase, step, now_s):
    for process in (1, 2):
        beat(progress, process, phase, step, now_s)


def test_limits_are_those_of_the_first_time_and_then_five_times_the_longest():
    limits = LearntLimits()
    assert limits.of_phase(Phase.COMPILE) == FIRST_LIMITS_S[Phase.COMPILE]
    limits.saw_phase(Phase.COMPILE, 40.0)
    limits.saw_phase(Phase.COMPILE, 20.0)
    assert limits.of_phase(Phase.COMPILE) == 200.0
    limits.saw_step(0.1)
    assert limits.of_phase(Phase.TRAINING) == LEAST_LIMITS_S[Phase.TRAINING]
    limits.saw_step(7.0)
    assert limits.of_phase(Phase.TRAINING) == 35.0


def test_a_silent_worker_is_named_alone():
    progress = Progress(LearntLimits(heartbeat_limit_s=5.0), (1, 2), 0.0)
    both(progress, Phase.TRAINING, 3, 1.0)
    for now_s in range(2, 8):
        beat(progress, 1, Phase.TRAINING, 3, float(now_s))
    (stall,) = progress.stalls(7.0)
    assert (stall.process, stall.phase, stall.step) == (2, Phase.TRAINING, 3)
    assert "6.0 s, limit 5.0 s" in stall.detail


def test_of_those_that_make_no_progress_the_last_is_named():
    limits = LearntLimits(heartbeat_limit_s=1e9)
    progress = Progress(limits, (1, 2), 0.0)
    both(progress, Phase.TRAINING, 1, 0.0)
    both(progress, Phase.TRAINING, 2, 1.0)  # a step of 1 s: the limit is the least one, 10 s
    beat(progress, 1, Phase.TRAINING, 3, 2.0)
    assert progress.stalls(10.9) == ()
    assert [stall.process for stall in progress.stalls(11.1)] == [2]
    assert [stall.process for stall in progress.stalls(13.0)] == [2]


def test_all_are_named_where_nobody_is_behind():
    progress = Progress(LearntLimits(heartbeat_limit_s=1e9), (1, 2), 0.0)
    both(progress, Phase.TRAINING, 1, 0.0)
    both(progress, Phase.TRAINING, 2, 1.0)
    assert [stall.process for stall in progress.stalls(11.1)] == [1, 2]


def test_of_those_that_make_no_progress_the_one_that_says_nothing_is_named():
    """A worker is stopped after a step; the others wait for it in the next one, and their heartbeats go on."""
    progress = Progress(LearntLimits(heartbeat_limit_s=20.0), (1, 2), 0.0)
    both(progress, Phase.TRAINING, 1, 0.0)
    both(progress, Phase.TRAINING, 2, 1.0)
    for now_s in range(2, 12):
        beat(progress, 1, Phase.TRAINING, 2, float(now_s))
    assert [stall.process for stall in progress.stalls(11.1)] == [2]


def test_importing_everything_is_no_gap_between_heartbeats():
    limits = LearntLimits()
    progress = Progress(limits, (1, 2), 0.0)
    both(progress, Phase.STARTUP, 0, 25.0)
    both(progress, Phase.TRAINING, 1, 25.5)
    both(progress, Phase.TRAINING, 2, 26.0)
    assert limits.of_heartbeats() == 5.0


def test_a_worker_that_imports_has_the_time_of_startup_for_its_first_word():
    """Otherwise a machine that became busy after the first steps would end every generation while it imports."""
    limits = LearntLimits(heartbeat_limit_s=5.0)
    limits.saw_phase(Phase.STARTUP, 4.0)
    progress = Progress(limits, (1, 2), 0.0)
    beat(progress, 1, Phase.STARTUP, 0, 2.0)
    assert [stall.process for stall in progress.stalls(7.1)] == [1]  # it had spoken
    progress = Progress(limits, (1, 2), 0.0)
    assert progress.stalls(29.0) == ()
    assert [stall.process for stall in progress.stalls(30.1)] == [1, 2]


def test_limits_double_with_every_stall_until_there_is_progress():
    limits = LearntLimits()
    both(Progress(limits, (1, 2), 0.0), Phase.TRAINING, 1, 0.0)
    limits.saw_step(0.1)
    assert (limits.of_heartbeats(), limits.of_phase(Phase.TRAINING)) == (5.0, 10.0)
    limits.stalled()
    limits.stalled()
    assert (limits.of_heartbeats(), limits.of_phase(Phase.TRAINING)) == (20.0, 40.0)
    limits.made_progress()
    assert limits.of_heartbeats() == 5.0
    asked = LearntLimits(heartbeat_limit_s=3.0)
    asked.stalled()
    assert asked.of_heartbeats() == 3.0


def test_steps_that_are_told_together_are_counted():
    limits = LearntLimits(heartbeat_limit_s=1e9)
    progress = Progress(limits, (1, 2), 0.0)
    beat(progress, 1, Phase.TRAINING, 0, 0.0)
    beat(progress, 1, Phase.TRAINING, 10, 50.0)  # ten steps of 5 s
    assert limits.of_phase(Phase.TRAINING) == 25.0
    assert progress.where(1) == (Phase.TRAINING, 10, 50.0)


@pytest.mark.parametrize("gap_s, limit_s", [(0.2, 5.0), (2.0, 10.0), (20.0, 30.0)])
def test_the_limit_of_heartbeats_follows_the_longest_gap(gap_s, limit_s):
    limits = LearntLimits()
    assert limits.of_heartbeats() == 30.0
    limits.saw_step(0.1)
    limits.saw_gap(gap_s)
    assert limits.of_heartbeats() == limit_s
