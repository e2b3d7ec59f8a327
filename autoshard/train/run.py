"""A run once it is planned: its program, its data, and where its tensors lie."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
from autoshard_models.train_step import TrainFunctions

from autoshard.execution.jit import PlannedFunction
from autoshard.plans.plan import Plan
from autoshard.train.checkpoints import Checkpoints
from autoshard.train.config import TrainConfig
from autoshard.train.data import TrainData
from autoshard.train.feed import place


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A planned run.

    Attributes:
        config, functions, data, plan: what it is made of.
        folder: where its results go.
        step: the training step as planned; it donates the state.
        shardings: of the state and of a batch.
    """

    config: TrainConfig
    functions: TrainFunctions
    data: TrainData
    plan: Plan
    folder: pathlib.Path
    step: PlannedFunction
    shardings: tuple[Any, Any]

    def state_at(self, step: int, checkpoints: Checkpoints) -> Any:
        """The state after `step` steps: the initial one, or the checkpoint of that step.

        Raises:
            ConfigError: the checkpoint does not fit or is damaged.
        """
        seed = self.config.train.seed
        if not step:
            return self.plan.init(self.functions.init, seed)
        placed = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return checkpoints.restore(
            step, jax.tree.map(placed, jax.eval_shape(self.functions.init, seed), self.shardings[0])
        )

    def batch(self, number: int) -> Any:
        """Element `number` of the data, on the devices; the batch of step `number` + 1."""
        return place(self.data.batches[number], self.shardings[1])

    def identity(self) -> dict[str, Any]:
        """What tells this run from others, as plain data: its configuration and its plan."""
        plan = json.loads((self.folder / "plan.json").read_text())
        return {"config": self.config.model_dump(mode="json"), "plan": plan}


def planned_run(
    config: TrainConfig, functions: TrainFunctions, data: TrainData, plan: Plan, folder: pathlib.Path
) -> Run:
    """The run of `config` under `plan`, whose file is in `folder`."""
    state = jax.eval_shape(functions.init, config.train.seed)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dict(data.batches[0]))
    shardings = (plan.in_shardings(state, 0), plan.in_shardings(batch, 1))
    return Run(config, functions, data, plan, folder, plan.jit(functions.step), shardings)
