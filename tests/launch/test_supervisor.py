"""Runs of real processes under the supervisor: lost, stopped, resized, and without a supervisor for a while."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from autoshard.launch import events
from autoshard.launch.engines.local import LocalEngine
from autoshard.launch.events import read_events
from autoshard.launch.launching import launch_run
from autoshard.launch.requests import ScaleRequest, write_scale_request
from autoshard.launch.settings import Budgets, LaunchSettings
from autoshard.launch.supervisor import Ending
from autoshard.run_processes import RUN_VARIABLE

WORKER = pathlib.Path(__file__).with_name("counting_worker.py")
LIMIT_S = 60.0


def settings(run_dir, least, most, steps=100, **others):
    return LaunchSettings(
        run_dir=run_dir,
        least_workers=least,
        most_workers=most,
        devices_per_worker=None,
        arguments=(sys.executable, str(WORKER), str(steps)),
        **{"plans_ahead": False, "has_standbys": False, **others},
    )


def launch(settings):
    return launch_run(settings, lambda: LocalEngine(settings.run_dir, settings.most_workers), lambda text: None)


class Disturbance(threading.Thread):
    """Waits for a committed step of a generation, and then disturbs the run."""

    def __init__(self, run_dir, disturb, generation=1, step=10):
        super().__init__(daemon=True)
        self.run_dir, self.disturb, self.generation, self.at_step = run_dir, disturb, generation, step

    def run(self):
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            if any(
                event.generation == self.generation for event in committed(self.run_dir) if event.step >= self.at_step
            ):
                self.disturb(workers(self.run_dir))
                return
            time.sleep(0.01)


def of_kind(run_dir, kind):
    return [event for event in read_events(run_dir) if isinstance(event, kind)]


def committed(run_dir):
    return of_kind(run_dir, events.StepCommitted)


def workers(run_dir):
    return of_kind(run_dir, events.GenerationStarted)[-1].workers


def assert_lineage(run_dir, steps):
    """Every step was committed, each generation goes on from where the state was restored, and none is skipped."""
    step, is_new_supervisor = 0, True
    for event in read_events(run_dir):
        is_new_supervisor |= isinstance(event, events.SupervisorStarted)
        if isinstance(event, events.Restored):
            # Killed between saving a step and telling it, or the other way; a killed supervisor leaves steps unread.
            assert abs(event.step - step) <= 1 or is_new_supervisor and event.step > step
            step, is_new_supervisor = event.step, False
        elif isinstance(event, events.StepCommitted):
            assert event.step == step + 1
            step = event.step
    assert step == steps


def processes_of(run_dir):
    """Processes that belong to a run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_VARIABLE) == str(run_dir):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def kill(*ranks, number=signal.SIGKILL):
    def disturb(workers):
        for rank in ranks:
            os.kill(workers[rank].pid, number)

    return disturb


@pytest.mark.parametrize("ranks", [pytest.param((1,), marks=pytest.mark.exhaustive), (0,), (0, 1)])
def test_lost_workers_are_replaced(tmp_path, ranks):
    Disturbance(tmp_path, kill(*ranks)).start()
    outcome = launch(settings(tmp_path, 2, 2))
    assert (outcome.ending, outcome.step, outcome.loss) == (Ending.FINISHED, 100, 0.01)
    losses = of_kind(tmp_path, events.WorkerLost)
    assert {loss.rank for loss in losses} == set(ranks) and {loss.cause for loss in losses} == {"signal 9"}
    assert len(of_kind(tmp_path, events.GenerationStarted)) == 2
    assert_lineage(tmp_path, 100)
    assert processes_of(tmp_path) == []


def test_standbys_take_over(tmp_path):
    Disturbance(tmp_path, kill(0), step=60).start()
    assert launch(settings(tmp_path, 2, 2, steps=120, has_standbys=True)).ending is Ending.FINISHED
    first, second = of_kind(tmp_path, events.GenerationStarted)
    assert not {w.pid for w in first.workers} & {w.pid for w in second.workers}
    assert_lineage(tmp_path, 120)
    assert processes_of(tmp_path) == []


def test_an_elastic_run_goes_on_with_fewer_and_takes_back_who_returns(tmp_path):
    Disturbance(tmp_path, kill(1)).start()
    assert launch(settings(tmp_path, 2, 3, steps=150, rejoin_after_s=0.5)).ending is Ending.FINISHED
    assert [len(event.workers) for event in of_kind(tmp_path, events.GenerationStarted)] == [3, 2, 3]
    assert [event.slot for event in of_kind(tmp_path, events.WorkerJoined)] == [1]
    (drained,) = of_kind(tmp_path, events.Drained)
    restored = of_kind(tmp_path, events.Restored)[-1]
    assert restored.step == drained.step  # no step is lost by a change of size
    assert_lineage(tmp_path, 150)


def test_a_worker_that_is_stopped_is_noticed(tmp_path):
    Disturbance(tmp_path, kill(1, number=signal.SIGSTOP)).start()
    assert launch(settings(tmp_path, 2, 2, stall_limit_s=1.0)).ending is Ending.FINISHED
    (loss,) = of_kind(tmp_path, events.WorkerLost)
    assert (loss.rank, loss.cause) == (1, "stalled") and "no heartbeat" in loss.detail
    assert_lineage(tmp_path, 100)
    assert processes_of(tmp_path) == []


def test_another_size_on_request(tmp_path):
    Disturbance(tmp_path, lambda _: write_scale_request(tmp_path, ScaleRequest(workers=1))).start()
    assert launch(settings(tmp_path, 1, 2)).ending is Ending.FINISHED
    assert [len(event.workers) for event in of_kind(tmp_path, events.GenerationStarted)] == [2, 1]
    assert of_kind(tmp_path, events.WorkerLost) == []
    assert_lineage(tmp_path, 100)


def test_a_run_that_is_stopped_before_its_first_step_ends_at_once(tmp_path):
    def stop():
        while not of_kind(tmp_path, events.GenerationStarted):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    (tmp_path / "wait").touch()  # workers that have not begun have nothing to save
    threading.Thread(target=stop, daemon=True).start()
    assert launch(settings(tmp_path, 2, 2, steps=10**9)).ending is Ending.STOPPED
    assert of_kind(tmp_path, events.DrainStarted) == [] and len(of_kind(tmp_path, events.Stopped)) == 1
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("is_in_memory", [False, True])
def test_a_run_that_is_stopped_while_it_starts_again_tells_where_its_state_is(tmp_path, is_in_memory):
    def stop():
        while len(of_kind(tmp_path, events.GenerationStarted)) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    def disturb(workers):
        (tmp_path / "wait").touch()
        kill(1)(workers)

    if is_in_memory:
        (tmp_path / "in_memory").touch()
    Disturbance(tmp_path, disturb).start()
    threading.Thread(target=stop, daemon=True).start()
    outcome = launch(settings(tmp_path, 2, 2, steps=10**9))
    assert (outcome.ending, outcome.is_in_memory) == (Ending.STOPPED, is_in_memory)
    assert outcome.step == max(event.step for event in committed(tmp_path)) >= 10


def test_an_error_that_comes_again_ends_the_run_with_that_error(tmp_path):
    (tmp_path / "fail_at").write_text("7")
    outcome = launch(settings(tmp_path, 2, 2, budgets=Budgets(at_one_step=3)))
    assert outcome.ending is Ending.FAILED
    assert "Step 8 failed 3 times" in outcome.error and "ValueError: no such step" in outcome.error
    assert len(of_kind(tmp_path, events.GenerationStarted)) == 3
    assert "no such step" in of_kind(tmp_path, events.RunFailed)[0].error


def test_workers_do_not_outlive_their_supervisor_and_the_next_one_goes_on(tmp_path):
    code = f"import test_supervisor as t, pathlib; t.launch(t.settings(pathlib.Path({str(tmp_path)!r}), 2, 2))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(WORKER.parent), *sys.path])}
    first = subprocess.Popen([sys.executable, "-c", code], env=environment)
    Disturbance(tmp_path, lambda _: first.kill()).run()
    assert first.wait(LIMIT_S) == -signal.SIGKILL
    deadline_s = time.monotonic() + LIMIT_S
    while processes_of(tmp_path) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert processes_of(tmp_path) == []
    assert launch(settings(tmp_path, 2, 2)).ending is Ending.FINISHED
    assert [event.resumed for event in of_kind(tmp_path, events.SupervisorStarted)] == [False, True]
    assert [event.generation for event in of_kind(tmp_path, events.GenerationStarted)] == [1, 2]
    assert_lineage(tmp_path, 100)


def test_a_run_has_one_supervisor(tmp_path):
    messages = []

    def launch_again(_):
        try:
            launch(settings(tmp_path, 2, 2))
        except Exception as error:
            messages.append(str(error))

    Disturbance(tmp_path, launch_again).start()
    assert launch(settings(tmp_path, 2, 2)).ending is Ending.FINISHED
    assert messages and "a run has one supervisor" in messages[0] and str(os.getpid()) in messages[0]
