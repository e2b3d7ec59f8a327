"""The driver with real supervisors and processes, whose workers only count steps."""

import os
import pathlib
import signal
import sys
import threading
import time

import pytest
import rich.console
from examples import job

from autoshard.errors import ElasticError, ShareError
from autoshard.launch.events import EventLog, Finished, GenerationStarted, RunFailed, StepCommitted, read_events
from autoshard.launch.run_lock import holder_of
from autoshard.share.allocation.objective import DecisionRules
from autoshard.share.commands import JobsOfFile, ShareRequest, launchables
from autoshard.share.driver.drive import DriveSettings, check_launchable, drive
from autoshard.share.driver.driver_log import read_driver_events
from autoshard.share.driver.nodes import nodes_in_file, nodes_of_ray
from autoshard.share.driver.supervised_job import Launchable, LaunchOptions
from autoshard.share.pool import Node

PROGRAM = (sys.executable, str(pathlib.Path(__file__).with_name("counting_launch.py")))
LIMIT_S = 60.0


def launchable(name, steps, most=4, **others):
    """A job of so many steps, faster on more workers, as far as the driver knows."""
    rates = {f"cpu:{k}": 20.0 * k**0.3 for k in (1, 2, 4) if k <= most}
    return Launchable(job(name, rates, float(steps), **{"move_s": 0.1, **others}), str(steps))


def settings(folder, **others):
    options = LaunchOptions(devices_per_worker=1, program=PROGRAM)
    rules = DecisionRules(payback_s=30.0)
    return DriveSettings(folder, options, rules, poll_s=0.02, **others)


class Watcher(threading.Thread):
    """Does something to a running driver, once a condition holds; then says that it did."""

    def __init__(self, condition, act):
        super().__init__(daemon=True)
        self.condition, self.act, self.has_acted = condition, act, False

    def run(self):
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            if self.condition():
                self.act()
                self.has_acted = True
                return
            time.sleep(0.02)


def step_of(folder):
    return max((e.step for e in read_events(folder) if isinstance(e, StepCommitted)), default=0)


def kinds(folder, name):
    return [event.kind for event in read_driver_events(folder) if event.job == name]


def assert_complete(run_dir, steps):
    """All steps were committed once and in turn, but for one that a killed process saved and did not tell."""
    committed = [event.step for event in read_events(run_dir) if isinstance(event, StepCommitted)]
    assert committed == sorted(committed) and committed[-1] == steps
    assert all(later - before in (1, 2) for before, later in zip(committed, committed[1:], strict=False))
    assert isinstance(list(read_events(run_dir))[-1], Finished)


def most_at_once(folder, names):
    """The greatest number of workers that all jobs together were told to have at any time; one that died has none."""
    now, most = dict.fromkeys(names, 0), 0
    died = [(e.time, e.job, e) for e in read_driver_events(folder) if e.kind == "job_died"]
    told = [(e.time, name, e) for name in names for e in read_events(folder / name)]
    events = sorted(told + died, key=lambda one: one[0])
    for _, name, event in events:
        if isinstance(event, GenerationStarted):
            now[name] = len(event.workers)
        elif event.kind in ("finished", "stopped", "drained", "job_died"):
            now[name] = 0
        most = max(most, sum(now.values()))
    return most


def test_one_arrives_one_ends_and_one_is_killed(tmp_path):
    jobs = [launchable("early", 150), launchable("short", 60), launchable("late", 80, arrival_s=2.0)]
    nodes = (Node(0, "cpu", 4),)

    def kill():
        os.kill(holder_of(tmp_path / "early"), signal.SIGKILL)

    watcher = Watcher(lambda: step_of(tmp_path / "early") >= 40, kill)
    watcher.start()
    outcome = drive(lambda: jobs, lambda: nodes, settings(tmp_path), lambda text: None)
    assert watcher.has_acted and set(outcome.finished) == {"early", "short", "late"} and not outcome.failed
    for one in jobs:
        assert_complete(tmp_path / one.job.name, int(one.config))
    assert "job_died" in kinds(tmp_path, "early") and kinds(tmp_path, "early").count("job_started") == 2
    assert kinds(tmp_path, "late")[0] == "job_arrived" and kinds(tmp_path, "late")[-1] == "job_finished"
    assert "job_scaled" in kinds(tmp_path, "early") + kinds(tmp_path, "short") + kinds(tmp_path, "late")
    assert most_at_once(tmp_path, ["early", "short", "late"]) <= 4


def test_new_nodes_are_used_and_lost_ones_left(tmp_path):
    """One device, then four, then two: the job follows."""
    sizes = {"now": 1}
    changes = iter([(30, 4), (90, 2)])
    ahead = [next(changes)]

    def nodes():
        if ahead[0] is not None and step_of(tmp_path / "one") >= ahead[0][0]:
            sizes["now"] = ahead[0][1]
            ahead[0] = next(changes, None)
        return (Node(0, "cpu", sizes["now"]),)

    outcome = drive(lambda: [launchable("one", 240)], nodes, settings(tmp_path), lambda text: None)
    started = [len(e.workers) for e in read_events(tmp_path / "one") if isinstance(e, GenerationStarted)]
    assert outcome.finished == ("one",) and started == [1, 4, 2]
    assert_complete(tmp_path / "one", 240)


def test_a_stopped_driver_saves_all_and_the_next_one_continues(tmp_path):
    jobs = [launchable("one", 120), launchable("two", 120)]
    nodes = (Node(0, "cpu", 2),)
    watcher = Watcher(lambda: step_of(tmp_path / "one") >= 20, lambda: os.kill(os.getpid(), signal.SIGTERM))
    watcher.start()
    assert drive(lambda: jobs, lambda: nodes, settings(tmp_path), lambda text: None).is_stopped
    assert holder_of(tmp_path / "one") is None
    outcome = drive(lambda: jobs, lambda: nodes, settings(tmp_path), lambda text: None)
    assert set(outcome.finished) == {"one", "two"}
    for one in jobs:
        assert_complete(tmp_path / one.job.name, 120)


def test_a_job_that_cannot_start_fails_and_the_others_go_on(tmp_path):
    broken = Launchable(job("broken", {"cpu:1": 1.0}, 10.0), "nothing.yaml")
    said = []
    outcome = drive(
        lambda: [broken, launchable("well", 40)], lambda: (Node(0, "cpu", 2),), settings(tmp_path), said.append
    )
    assert outcome.finished == ("well",) and outcome.failed == ("broken",)
    assert any(
        "its supervisor died 3 times at step 0: error: nothing.yaml is no configuration" in text for text in said
    )


def test_a_job_that_failed_is_tried_again_by_the_next_driver(tmp_path):
    """What made it fail is mended, as far as anyone knows who runs it again."""
    (tmp_path / "one").mkdir()
    EventLog(tmp_path / "one").write(RunFailed(time=time.time(), generation=1, error="no space"))
    outcome = drive(lambda: [launchable("one", 20)], lambda: (Node(0, "cpu", 1),), settings(tmp_path), str)
    assert outcome.finished == ("one",) and not outcome.failed


def test_the_jobs_of_a_folder_have_one_driver(tmp_path):
    refused = []

    def drive_again():
        with pytest.raises(ElasticError) as told:
            drive(lambda: [], lambda: (), settings(tmp_path), str)
        refused.append(str(told.value))

    watcher = Watcher(lambda: step_of(tmp_path / "one") >= 5, drive_again)
    watcher.start()
    assert drive(lambda: [launchable("one", 40)], lambda: (Node(0, "cpu", 1),), settings(tmp_path), str).finished
    assert refused and "have one driver" in refused[0] and str(os.getpid()) in refused[0]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ShareError, match="--output-dir: .*file/inside cannot be made: Not a directory"):
        drive(lambda: [], lambda: (), settings(tmp_path / "file" / "inside"), str)


def test_a_jobs_file_that_is_broken_while_jobs_run_changes_nothing(tmp_path):
    """As an editor leaves it, or with a job that could not be launched."""
    path, said = tmp_path / "jobs.yaml", []
    good = "format: autoshard-jobs\nversion: 1\njobs:\n- {name: one, config: a.yaml, steps: 1, rates: {cpu:2: 1.0}}\n"
    path.write_text(good)
    cluster = pathlib.Path("configs/clusters/cpu4x2.yaml")
    request = ShareRequest(path, cluster, "completion", 1, 900.0, 10.0, 0.001, rich.console.Console(quiet=True))
    options = LaunchOptions(devices_per_worker=2)
    look = JobsOfFile(
        request, launchables(request), lambda jobs: check_launchable(jobs, options, "local", 1), said.append
    )
    for number, text in enumerate(
        (good[:-9], good + "- {name: two, steps: 1, rates: {cpu:2: 1.0}}\n", good.replace("cpu:2", "cpu:1")), 1
    ):
        path.write_text(text)
        os.utime(path, ns=(number, number))
        assert [one.job.name for one in look()] == ["one"] and len(said) == number, text
    assert "not plain YAML" in said[0] and "needs a configuration" in said[1] and "multiple of a worker's" in said[2]
    path.write_text(good.replace("one", "other"))
    os.utime(path, ns=(9, 9))
    assert [one.job.name for one in look()] == ["other"] and len(said) == 3


def test_what_cannot_be_launched_is_refused_before_anything_starts():
    options = LaunchOptions(devices_per_worker=2)
    with pytest.raises(ShareError, match="'odd': a footprint must be a multiple of a worker's 2"):
        check_launchable([Launchable(job("odd", {"cpu:1": 1.0}), "a.yaml")], options, "local", 1)
    with pytest.raises(ShareError, match="needs a configuration.*plain"):
        check_launchable([Launchable(job("plain", {"cpu:2": 1.0}), "")], options, "local", 1)
    with pytest.raises(ShareError, match="all must be of one kind; the cluster has 2 groups"):
        check_launchable([], options, "ray", 2)


def test_a_ray_cluster_must_be_named(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ShareError, match="RAY_ADDRESS names; it is not set"):
        nodes_of_ray("cpu", 2, "CPU")


def test_nodes_come_with_the_cluster_file(tmp_path):
    text = pathlib.Path("configs/clusters/cpu4x2.yaml").read_text()
    path = tmp_path / "cluster.yaml"
    path.write_text(text.replace("num_nodes: 4", "num_nodes: 1"))
    said = []
    look = nodes_in_file(path, said.append)
    assert len(look()) == 1
    path.write_text(text)
    os.utime(path, ns=(1, 1))
    assert len(look()) == 4
    path.write_text("nothing")
    os.utime(path, ns=(2, 2))
    assert len(look()) == 4 and "the nodes stay as they were" in said[0]
