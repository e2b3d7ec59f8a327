"""Whole runs on eight CPU devices: learning, stopping by Ctrl-C, resuming where the run stopped."""

import io
import json
import os
import pathlib
import signal
import threading
import time

import pytest
import rich.console

from autoshard.errors import ConfigError
from autoshard.plans.plan import Plan
from autoshard.train.config import TrainConfig, load_config
from autoshard.train.trainer import TrainResult, train


def config_of(folder: pathlib.Path, **train_settings) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"overrides": {"num_layers": 1, "embed_dim": 32, "num_heads": 2, "dropout_rate": 0.1}},
            "optimizer": {"schedule": "constant", "learning_rate": 1e-2},
            "data": {"batch_size": 8, "sequence_length": 16},
            "plan": {"mesh": {"data": 4, "tensor": 2}, "time_limit_s": 5},
            "train": {"log_every": 5, "output_dir": str(folder), **train_settings},
        }
    )


def run(config: TrainConfig) -> TrainResult:
    return train(config, rich.console.Console(file=io.StringIO()))


def logged(folder: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def stop_after_first_report(folder: pathlib.Path) -> threading.Thread:
    """Sends this process SIGINT, as Ctrl-C does, once the run in `folder` has reported a step."""

    def watch() -> None:
        metrics = folder / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path):
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    handler = signal.getsignal(signal.SIGINT)
    watcher = stop_after_first_report(stopped)
    first = run(config_of(stopped, steps=100_000))
    watcher.join()
    assert first.interrupted and 0 < first.step < 100_000
    assert signal.getsignal(signal.SIGINT) is handler

    last = max(first.step + 3, 30)
    with pytest.raises(ConfigError, match="train.resume=true"):
        run(config_of(stopped, steps=last))
    second = run(config_of(stopped, steps=last, resume=True))
    assert (second.step, second.interrupted) == (last, False)
    steps = [line["step"] for line in logged(stopped)]
    assert steps == sorted(set(steps)) and steps[-1] == last and first.step in steps
    assert run(config_of(stopped, steps=last, resume=True)) == TrainResult(last, None, False, stopped)

    uninterrupted = run(config_of(whole, steps=last))
    assert second.loss == pytest.approx(uninterrupted.loss, rel=1e-5)
    check_records(whole, config_of(whole, steps=last), uninterrupted)
    other = config_of(whole, steps=last + 1, resume=True)
    other = other.model_copy(update={"model": other.model.model_copy(update={"overrides": {"num_layers": 2}})})
    with pytest.raises(ConfigError, match=f"checkpoint of step {last}"):
        run(other)


def check_records(folder: pathlib.Path, config: TrainConfig, result: TrainResult) -> None:
    """The run learned, and its files tell what it did."""
    lines = logged(folder)
    assert [line["step"] for line in lines][:7] == [1, 5, 10, 15, 20, 25, 30]
    assert [line["compiled"] for line in lines] == [True] + [False] * (len(lines) - 1)
    assert lines[-1]["loss"] == result.loss < lines[0]["loss"] - 0.5
    assert all(line["tokens_per_s"] == pytest.approx(8 * 16 / line["step_time_s"]) for line in lines)
    assert load_config(folder / "config.yaml") == config
    assert Plan.load(folder / "plan.json").mesh_axes == {"data": 4, "tensor": 2}


def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="train.output_dir"):
        run(config_of(tmp_path / "file", steps=1))
