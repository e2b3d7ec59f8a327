"""Runs whose plan chooses what is recomputed train as those whose model says it."""

import io
import json

import pytest
import rich.console

from autoshard import Plan
from autoshard.errors import ConfigError
from autoshard.train.config import TrainConfig
from autoshard.train.registry import train_functions
from autoshard.train.trainer import train


def config_of(folder, remat: str, **plan) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"overrides": {"num_layers": 3, "embed_dim": 32, "num_heads": 4, "remat": True}},
            "optimizer": {"schedule": "constant", "learning_rate": 1e-2},
            "data": {"batch_size": 8, "sequence_length": 64},
            "plan": {"mesh": {"data": 8}, "time_limit_s": 20, "remat": remat, **plan},
            "train": {"steps": 2, "log_every": 1, "output_dir": str(folder)},
        }
    )


def losses(config: TrainConfig) -> list[float]:
    train(config, rich.console.Console(file=io.StringIO()))
    lines = map(json.loads, open(f"{config.train.output_dir}/metrics.jsonl"))
    return [line["loss"] for line in lines if line["kind"] == "train"]


def test_a_run_obeys_the_choice_of_its_plan(tmp_path):
    """Under a limit that lies between what the checkpointed model needs and what keeping everything needs."""
    expected = losses(config_of(tmp_path / "written", "as_written"))
    needs = Plan.load(tmp_path / "written" / "plan.json").estimate.peak_bytes
    config = config_of(tmp_path / "searched", "search", memory_budget_bytes=round(1.1 * needs))
    assert losses(config) == pytest.approx(expected, rel=1e-4)
    plan = Plan.load(tmp_path / "searched" / "plan.json")
    assert plan.remat is not None and plan.remat.policy is not None and len(plan.remat.candidates) > 1
    assert plan.estimate.peak_bytes <= 1.1 * needs + 1


def test_micro_batches_are_not_searched(tmp_path):
    config = config_of(tmp_path, "search")
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"num_micro_batches": 2})})
    with pytest.raises(ConfigError, match="plan.remat `search` is for a batch in one part; received 2"):
        train_functions(config)
