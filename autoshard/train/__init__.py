"""The train room: a training run described by a YAML file, planned by autoshard and carried out.

`load_config` reads the file, `autoshard.train.trainer.train` carries it out; `autoshard.train.planning.make_plan` only
plans it. This room is for examples and small runs; the models it knows are those of `autoshard_models`.
"""

from autoshard.train.config import TrainConfig, load_config

__all__ = ["TrainConfig", "load_config"]
