"""A run once it is planned: its program, its data, and where its tensors lie."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
from autoshard_models.train_step import TrainFunctions

from autoshard.api import BasePlan
from autoshard.checkpoints.checkpoints import Checkpoints, Restored
from autoshard.execution.jit import PlannedFunction
from autoshard.launch.messages import Tier
from autoshard.pipeline.run.staged_function import StagedFunction
from autoshard.train.config import TrainConfig
from autoshard.train.data import TrainData
from autoshard.train.feed import BatchReader
from autoshard.train.one_mesh import OneMesh


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A planned run.

    Attributes:
        config, functions, data, plan: what it is made of.
        folder: where its results go.
        step: the training step as planned; it donates the state.
        shardings: of the state and of a batch; None for a batch that stays on the host.
        one_mesh: where a run in stages does what lies outside of its step; None for one program, whose mesh serves.
    """

    config: TrainConfig
    functions: TrainFunctions
    data: TrainData
    plan: BasePlan
    folder: pathlib.Path
    step: PlannedFunction | StagedFunction
    shardings: tuple[Any, Any | None]
    one_mesh: OneMesh | None = None

    def latest_state(self, checkpoints: Checkpoints, tier: Tier | None = None) -> Restored:
        """The newest state that is saved whole, or the initial one.

        Args:
            checkpoints: those of this run.
            tier: look only there.

        Raises:
            ConfigError: a checkpoint does not fit.
        """
        seed = self.config.train.seed
        placed = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        like = jax.tree.map(placed, jax.eval_shape(self.functions.init, seed), self.shardings[0])
        restored = checkpoints.restore(like, tier)
        return restored or Restored(0, self.plan.init(self.functions.init, seed, run=self.step), None)

    def batch(self, number: int) -> Any:
        """Batch `number` of the data, on the devices; that of step `number` + 1."""
        return BatchReader(self.data.batches, self.shardings[1]).batch(number)

    def identity(self) -> dict[str, Any]:
        """What tells this run from others, as plain data: its configuration and its plan."""
        plan = json.loads((self.folder / "plan.json").read_text())
        return {"config": self.config.model_dump(mode="json"), "plan": plan}


def planned_run(
    config: TrainConfig, functions: TrainFunctions, data: TrainData, plan: BasePlan, folder: pathlib.Path
) -> Run:
    """The run of `config` under `plan`, whose file is in `folder`.

    Raises:
        PlanMismatchError, MeshError: the plan fits neither the program nor the devices.
    """
    state = jax.eval_shape(functions.init, config.train.seed)
    batch = data.batches.shapes()
    step = plan.jit(functions.step)
    step.prepare(state, batch)
    shardings = step.in_shardings((state, batch))
    one_mesh = OneMesh(step) if isinstance(step, StagedFunction) else None
    return Run(config, functions, data, plan, folder, step, shardings, one_mesh)
