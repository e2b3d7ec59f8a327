"""What a run can have searched of recomputation."""

import pytest

from autoshard.errors import ConfigError
from autoshard.train.config import TrainConfig
from autoshard.train.registry import train_functions


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


def test_micro_batches_are_not_searched(tmp_path):
    config = config_of(tmp_path, "search")
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"num_micro_batches": 2})})
    with pytest.raises(ConfigError, match="plan.remat `search`.*for a batch in one part; received 2"):
        train_functions(config)
