"""Whole runs on eight CPU devices: learning, stopping by Ctrl-C, resuming where the run stopped."""

import io
import json
import os
import pathlib
import signal
import threading
import time

import jax
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


def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path):
    stopped = tmp_path / "stopped"
    handler = signal.getsignal(signal.SIGINT)
    watcher = stop_after_first_report(stopped)
    first = run(config_of(stopped, steps=100_000))
    watcher.join()
    assert first.interrupted and 0 < first.step < 100_000
    assert signal.getsignal(signal.SIGINT) is handler

    last = first.step + 3
    with pytest.raises(ConfigError, match="train.resume=true"):
        run(config_of(stopped, steps=last))
    second = run(config_of(stopped, steps=last, resume=True))
    assert (second.step, second.interrupted) == (last, False)
    steps = [line["step"] for line in logged(stopped)]
    assert steps == sorted(set(steps)) and steps[-1] == last and first.step in steps

    whole = run(config_of(tmp_path / "whole", steps=last))
    assert second.loss == pytest.approx(whole.loss, rel=1e-5)
    assert run(config_of(stopped, steps=last, resume=True)) == TrainResult(last, None, False, stopped)


def test_a_run_learns_and_leaves_its_records(tmp_path):
    config = config_of(tmp_path, steps=30)
    result = run(config)
    lines = logged(tmp_path)
    assert [line["step"] for line in lines] == [1, 5, 10, 15, 20, 25, 30]
    assert [line["compiled"] for line in lines] == [True] + [False] * 6
    assert lines[-1]["loss"] == result.loss < lines[0]["loss"] - 0.5
    assert all(line["tokens_per_s"] == pytest.approx(8 * 16 / line["step_time_s"]) for line in lines)
    assert load_config(tmp_path / "config.yaml") == config
    assert Plan.load(tmp_path / "plan.json").mesh_axes == {"data": 4, "tensor": 2}
    assert len(jax.devices()) == 8

    other_model = config.model_copy(update={"model": config.model.model_copy(update={"overrides": {"num_layers": 2}})})
    other_model = other_model.model_copy(
        update={"train": config.train.model_copy(update={"steps": 31, "resume": True})}
    )
    with pytest.raises(ConfigError, match="checkpoint of step 30"):
        run(other_model)


def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="train.output_dir"):
        run(config_of(tmp_path / "file", steps=1))
