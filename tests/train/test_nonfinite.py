"""Runs whose numbers cease to be finite or whose data cannot be read: what they say, and what they leave."""

import dataclasses
import io
import json
import math
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
import rich.console

from autoshard.errors import TrainingError
from autoshard.train.config import TrainConfig
from autoshard.train.data import Batches, TrainData
from autoshard.train.nonfinite import is_bad
from autoshard.train.registry import load_data, train_functions
from autoshard.train.trainer import carry_out


def config_of(folder: pathlib.Path, learning_rate: float, **train_settings) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"name": "dlrm"},
            "optimizer": {"name": "sgd", "schedule": "constant", "learning_rate": learning_rate, "clip_norm": None},
            "data": {"batch_size": 8},
            "plan": {"mesh": {"data": 8}, "time_limit_s": 5},
            "train": {"steps": 6, "log_every": 1, "output_dir": str(folder), "checkpoint_every": 2, **train_settings},
        }
    )


Change = Callable[[int, dict[str, np.ndarray]], dict[str, np.ndarray]]


def changed(data: TrainData, change: Change) -> TrainData:
    """The data with each batch to train on put through `change`, with its number."""
    batches = Batches(data.batches.size, lambda examples: data.batches.of(examples).map_with_index(change))
    return dataclasses.replace(data, batches=batches)


def with_nan(data: TrainData, step: int) -> TrainData:
    """The data with one number missing from the batch of `step`."""

    def poisoned(number: int, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if number != step - 1:
            return batch
        numbers = batch["numbers"].copy()
        numbers[5, 1] = np.nan
        return batch | {"numbers": numbers}

    return changed(data, poisoned)


def failing(data: TrainData, step: int) -> TrainData:
    """The data up to `step`, whose batch cannot be read."""

    def read(number: int, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if number == step - 1:
            raise OSError("the disk is gone")
        return batch

    return changed(data, read)


def ended(config: TrainConfig, change: Callable[[TrainData], TrainData] = lambda data: data) -> tuple[str, str]:
    """The error that ends a run, and what the run prints."""
    printed = io.StringIO()
    with pytest.raises(TrainingError) as error:
        carry_out(config, train_functions(config), change(load_data(config)), rich.console.Console(file=printed))
    return str(error.value), printed.getvalue()


def kept(folder: pathlib.Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_nan_in_the_batch_is_named_by_its_path_and_index(tmp_path):
    told, printed = ended(config_of(tmp_path, 0.01), lambda data: with_nan(data, 4))
    assert "The loss of step 4 is nan." in told and "It happened in step 4." in told
    assert "`batch.numbers` held NaN already. The first is at index [5, 1] of [8, " in told
    assert "last good checkpoint is that of step 2" in told and kept(tmp_path) == [2]
    report = json.loads((tmp_path / "nonfinite.json").read_text())
    assert (report["step"], report["since"], report["origin"]["argument"]) == (4, 2, "batch.numbers")
    assert "Looking for where it began" in printed


@pytest.mark.slow
def test_parameters_that_grow_without_bound_are_traced_to_the_operation_and_its_line(tmp_path):
    told, _ = ended(config_of(tmp_path, 1e30))
    report = json.loads((tmp_path / "nonfinite.json").read_text())
    origin = report["origin"]
    assert report["since"] == 0 and report["step"] <= report["noticed_at"]
    assert origin["kind"] in ("NaN", "infinity") and origin["argument"] == ""
    assert "models/" in origin["line"] and origin["line"] in told and f"`{origin['operation']}`" in told
    assert max(abs(bound) for operand in origin["operands"] for bound in (operand["least"], operand["greatest"])) > 1e15
    assert "There is no checkpoint" in told and kept(tmp_path) == []


@pytest.mark.slow
def test_a_run_can_go_on_regardless_and_a_broken_pipeline_ends_it_with_its_state_saved(tmp_path):
    config = config_of(tmp_path, 0.01, on_nonfinite="continue", checkpoint_every=None)
    told, printed = ended(config, lambda data: failing(with_nan(data, 2), 4))
    assert "The batch of step 4 cannot be read" in told and "the disk is gone" in told
    assert printed.count("warning: The loss of step") == 2 and kept(tmp_path) == [3]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert math.isfinite(lines[0]["loss"]) and [line["loss"] for line in lines[1:]] == [None, None]


def test_a_step_that_loss_scaling_leaves_out_is_no_fault():
    assert is_bad({"loss": math.nan}) and is_bad({"loss": math.inf, "is_finite": 1.0})
    assert not is_bad({"loss": math.inf, "is_finite": 0.0}) and not is_bad({"loss": 1.0})
