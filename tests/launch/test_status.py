"""What `autoshard status` says of runs whose logs are made by hand; processes that are named there are real."""

import json
import os
import socket
import subprocess
import sys

import pytest
from run_logs import FIRST, lost, phase, saved, second, supervisor, workers
from typer.testing import CliRunner

from autoshard.cli import app
from autoshard.errors import FileFormatError
from autoshard.launch.events import Drained, DrainStarted, EventLog, Finished, RunFailed, Stopped, WorkerEntry
from autoshard.launch.messages import Phase, Tier
from autoshard.launch.metrics_reader import last_metrics, read_metrics
from autoshard.launch.status import RunState, StatusReader
from autoshard.launch.status_display import fitted
from autoshard.printing import TextConsole

HOST = socket.gethostname()
NOW_S = 4e9
"""A time after the start of every process of this test."""


def written(folder, events):
    log = EventLog(folder)
    for event in events:
        log.write(event)
    return folder


def live_supervisor(host=HOST, pid=None):
    return supervisor(NOW_S).model_copy(update={"pid": pid or os.getpid(), "host": host})


def generation_of(pids, number=1):
    entries = tuple(WorkerEntry(rank=i, pid=pid, slot=i, host=HOST) for i, pid in enumerate(pids))
    return workers(NOW_S, number).model_copy(update={"workers": entries})


@pytest.fixture
def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_folder_without_a_run(tmp_path):
    result = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert result.exit_code == 2 and "events.jsonl" in result.output and "train.output_dir" in result.output
    with pytest.raises(FileFormatError, match="begins with `supervisor_started`"):
        (tmp_path / "events.jsonl").write_text("not JSON\n")
        StatusReader(tmp_path).read()


def test_a_run_that_nobody_supervises_says_so(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 40, "loss": 2.5}\n')
    with pytest.raises(FileFormatError, match=r"without a supervisor, and its last reported step is 40\. See its"):
        StatusReader(tmp_path)


def test_a_folder_of_several_runs_names_them(tmp_path):
    """As that of `autoshard share --run`, with a folder for each job."""
    for name in ("two", "one"):
        (tmp_path / name).mkdir()
        written(tmp_path / name, [live_supervisor()])
    with pytest.raises(FileFormatError) as told:
        StatusReader(tmp_path)
    assert f"folders of these runs: {tmp_path / 'one'}, {tmp_path / 'two'}." in str(told.value)


def test_a_run_that_goes_on(tmp_path, dead_pid):
    reader = StatusReader(written(tmp_path, [live_supervisor(), generation_of([os.getpid(), dead_pid])]))
    found = reader.read()
    assert (found.state, found.generation, found.phase, found.step) == (RunState.RUNNING, 1, Phase.STARTUP, 0)
    assert [(w.rank, w.state) for w in found.workers] == [(0, "alive"), (1, "gone")]
    written(tmp_path, [phase(NOW_S, 1, "training"), saved(NOW_S, 1, 7, Tier.MEMORY), saved(NOW_S, 1, 5)])
    found = reader.read()
    assert (found.phase, found.step) == (Phase.TRAINING, 7)
    assert [(one.tier, one.step) for one in found.saved] == [(Tier.MEMORY, 7), (Tier.DISK, 5)]
    written(tmp_path, [lost(NOW_S, 1, 8).model_copy(update={"pid": dead_pid})])
    found = reader.read()
    assert (found.state, found.phase) == (RunState.RESTARTING, None)
    assert [w.state for w in found.workers] == ["alive", "lost: signal 9"]
    written(tmp_path, [generation_of([os.getpid()], 2), DrainStarted(time=NOW_S, generation=2, why="2 workers")])
    assert reader.read().state is RunState.DRAINING
    written(tmp_path, [Drained(time=NOW_S, generation=2, step=9)])
    assert (reader.read().state, reader.read().step) == (RunState.RESTARTING, 9)


@pytest.mark.parametrize(
    ("last", "state"),
    [
        (Finished(time=NOW_S, generation=1, step=20), RunState.FINISHED),
        (Stopped(time=NOW_S, generation=1, step=20), RunState.STOPPED),
        (RunFailed(time=NOW_S, generation=1, error="no"), RunState.FAILED),
    ],
)
def test_a_run_that_has_ended(tmp_path, last, state, dead_pid):
    found = StatusReader(written(tmp_path, [live_supervisor(pid=dead_pid), generation_of([dead_pid]), last])).read()
    assert found.state is state and found.phase is None


def test_a_supervisor_that_is_gone_and_one_that_cannot_be_seen(tmp_path, dead_pid):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, host in ((here, HOST), (there, "elsewhere")):
        folder.mkdir()
        written(folder, [live_supervisor(host, dead_pid), generation_of([dead_pid])])
    assert StatusReader(here).read().state is RunState.ABANDONED
    assert StatusReader(there).read().state is RunState.RUNNING


def test_a_number_that_another_process_has_now_is_not_the_supervisor(tmp_path):
    early = supervisor(1000).model_copy(update={"pid": os.getpid(), "host": HOST})
    assert StatusReader(written(tmp_path, [early])).read().state is RunState.ABANDONED


def test_one_commit_of_a_series_tells_the_same(tmp_path):
    """Of commits of every step only the last of a series is kept; goodput is that of the whole log."""
    series = [saved(118 + 2 * step, 1, step, Tier.MEMORY) for step in range(1, 11)]
    log = [*FIRST, *series, lost(139, 1, 10, since=1), *second(141, 10), Finished(time=163, generation=2, step=20)]
    found = StatusReader(written(tmp_path, log)).read()
    assert found.goodput.productive_s == 40 and found.goodput.total_s == 63
    assert [event.kind for event in found.recent] == [
        "supervisor_started",
        "generation_started",
        "restored",
        "worker_lost",
        "generation_started",
        "restored",
        "finished",
    ]


def test_a_line_that_is_being_written_is_read_once_it_is_complete(tmp_path):
    reader = StatusReader(written(tmp_path, FIRST))
    line = saved(120, 1, 3).model_dump_json().encode() + b"\n"
    with (tmp_path / "events.jsonl").open("ab", buffering=0) as file:
        file.write(line[:20])
        assert reader.read().step == 0
        file.write(line[20:])
        assert reader.read().step == 3


def metrics(step, **more):
    return json.dumps({"kind": "train", "step": step, "loss": 2.5, "items_per_s": 1234.5, "item": "tokens", **more})


def test_metrics_of_steps(tmp_path):
    assert read_metrics(tmp_path) == () and last_metrics(tmp_path) is None
    lines = [
        metrics(1, loss=None),
        json.dumps({"kind": "eval", "step": 1, "loss": 3}),
        metrics(2, generation=4),
        '{"ki',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert [(one.step, one.generation, one.loss) for one in read_metrics(tmp_path)] == [(1, 0, None), (2, 4, 2.5)]
    assert last_metrics(tmp_path) == read_metrics(tmp_path)[-1]


@pytest.mark.parametrize("columns", [80, 120])
def test_what_is_shown_fits_the_terminal(tmp_path, columns):
    log = [*FIRST, saved(138, 1, 10), lost(153, 1, 17, since=1, rank=1), *second(156, 10)]
    written(tmp_path, [*log, Finished(time=178, generation=2, step=20, loss=2.25)])
    (tmp_path / "metrics.jsonl").write_text(metrics(20, generation=2) + "\n")
    (tmp_path / "config.yaml").write_text("train: {steps: 20}\n")
    arguments = ["status", str(tmp_path), "--json", str(tmp_path / "status.json")]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.replace("│", "").split())
    for words in (
        "finished",
        "step 20 of 20",
        "Goodput 51.3% of 1 min 18 s",
        "productive 40.0 s 51.3%",
        "redone steps 15.0 s 19.2%",
        "loss 2.5000 after step 20 speed 1,234 tokens/s",
        "worker 1 (pid 1) lost, signal 9, at training, step 17",
        "finished after step 20, loss 2.250",
    ):
        assert words in text
    assert max(map(len, result.output.splitlines())) <= columns
    figures = json.loads((tmp_path / "status.json").read_text())
    assert (figures["state"], figures["step"], figures["total_steps"]) == ("finished", 20, 20)
    assert figures["goodput"]["seconds"]["productive"] == 40 and figures["goodput"]["total_s"] == 78
    assert figures["workers"][1] == {"rank": 1, "slot": 1, "host": "here", "pid": 21, "state": ""}


@pytest.mark.parametrize(("height", "words"), [(18, "others"), (34, "rank"), (60, "supervisor (pid 1")])
def test_the_live_display_shows_what_there_are_lines_for(tmp_path, height, words):
    log = [*FIRST, saved(138, 1, 10), lost(153, 1, 17, since=1, rank=1), *second(156, 10), lost(190, 2, 12, since=20)]
    status = StatusReader(written(tmp_path, [*log, *second(200, 10, generation=3)])).read()
    console = TextConsole(80)
    console.height = height
    lines = console.render_lines(fitted(console, status, tmp_path, 20))
    text = "\n".join("".join(segment.text for segment in line) for line in lines)
    assert len(lines) < height and words in text and "Last events" in text


def test_the_picture(tmp_path):
    written(tmp_path, [*FIRST, saved(138, 1, 10), lost(153, 1, 17, since=1, rank=1), *second(156, 10)])
    (tmp_path / "metrics.jsonl").write_text(metrics(10, generation=1) + "\n" + metrics(20, generation=2) + "\n")
    assert CliRunner().invoke(app, ["status", str(tmp_path), "--picture", str(tmp_path / "run.svg")]).exit_code == 0
    drawn = (tmp_path / "run.svg").read_text()
    for words in ("1: 2 workers", "2: 2 workers", "worker 1: signal 9", "redone steps: 15.0 s", ">loss<"):
        assert words in drawn
    result = CliRunner().invoke(app, ["status", str(tmp_path), "--picture", "run.pdf"])
    assert result.exit_code == 2 and ".png or .svg" in result.output
