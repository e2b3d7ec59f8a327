"""A run once it is planned: its program, its data, and where its tensors lie."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from autoshard_models.train_step import TrainFunctions

from autoshard.api import BasePlan, Plan, StagedPlan
from autoshard.api.balanced_call import BalancedCall
from autoshard.api.planned_call import PlannedCall
from autoshard.balance.options import Balance
from autoshard.checkpoints.checkpoints import Checkpoints, Restored
from autoshard.errors import ConfigError
from autoshard.launch.messages import Tier
from autoshard.pipelines.run.staged_function import StagedFunction
from autoshard.train.config import StragglersSection, TrainConfig
from autoshard.train.data import TrainData
from autoshard.train.data.batches import in_parts
from autoshard.train.feed import BatchReader
from autoshard.train.one_mesh import OneMesh
from autoshard.train.shared_batch import SharedBatchCall
from autoshard.uneven_step import UnevenStep


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
    plan: Plan | StagedPlan
    folder: pathlib.Path
    step: PlannedCall | SharedBatchCall | StagedFunction
    shardings: tuple[Any, Any | None]
    one_mesh: OneMesh | None = None

    def latest_state(self, checkpoints: Checkpoints, tier: Tier | None = None) -> Restored:
        """The newest state that is saved whole, or the initial one; see `saved_state`."""
        return self.saved_state(checkpoints, tier) or Restored(0, self.initial_state(), None)

    def saved_state(self, checkpoints: Checkpoints, tier: Tier | None = None) -> Restored | None:
        """The newest state that is saved whole; None if there is none.

        Args:
            checkpoints: those of this run.
            tier: look only there.

        Raises:
            ConfigError: a checkpoint does not fit.
        """
        placed = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        shapes = jax.eval_shape(self.functions.init, self.config.train.seed)
        return checkpoints.restore(jax.tree.map(placed, shapes, self.shardings[0]), tier)

    def initial_state(self) -> Any:
        """The state before the first step, made where it lies."""
        return _initial_state(self.plan, self)

    def compile(self, when_lowered: Callable[[], None] = lambda: None) -> None:
        """Compiles the step, so that the first takes no longer than others; one in stages is compiled as it runs.

        Args:
            when_lowered: called when nothing but the compilation is left to do.
        """
        if isinstance(self.step, PlannedCall | SharedBatchCall):
            state = jax.eval_shape(self.functions.init, self.config.train.seed)
            self.step.compile(state, self.data.batches.shapes(), when_lowered=when_lowered)
        else:
            when_lowered()

    def by_units(self, state: Any) -> Any:
        """A state that a step returned, as the plan lays it out, whatever the shares of devices."""
        return self.step.balance.by_units(state) if isinstance(self.step, BalancedCall) else state

    def batch(self, number: int) -> Any:
        """Batch `number` of the data, on the devices; that of step `number` + 1."""
        return BatchReader(self.data.batches, self.shardings[1]).batch(number)


def _initial_state(plan: BasePlan, run: Run) -> Any:
    """What `plan.init` makes, whichever kind of plan it is."""
    return plan.init(run.functions.init, run.config.train.seed, run=run.step)


def _step(
    plan: BasePlan, functions: TrainFunctions, section: StragglersSection
) -> PlannedCall | SharedBatchCall | StagedFunction:
    """The training step under a plan of either kind."""
    if isinstance(functions.step, UnevenStep):
        return SharedBatchCall(plan.jit(functions.step), functions.step)
    if section.mode == "off" and not section.emulate:
        return plan.jit(functions.step)
    if not isinstance(plan, Plan):
        raise ConfigError(
            f"stragglers.mode: shares of a tensor axis are those of one program over one mesh; received "
            f"`{section.mode}` with a plan in stages. Set it to `off`, or plan without stages."
        )
    balance = Balance(
        mode=section.mode,
        absorbs=section.absorbs,
        max_loss_share=section.max_loss_share,
        unbiased=section.unbiased,
        priority=section.priority,
        can_be_slowed=bool(section.emulate),
    )
    return plan.jit(functions.step, balance=balance)


def planned_run(
    config: TrainConfig, functions: TrainFunctions, data: TrainData, plan: Plan | StagedPlan, folder: pathlib.Path
) -> Run:
    """The run of `config` under `plan`, whose file is in `folder`.

    Raises:
        PlanMismatchError, MeshError: the plan fits neither the program nor the devices.
    """
    count = config.optimizer.num_micro_batches
    if isinstance(plan, StagedPlan) and count > 1:
        data = dataclasses.replace(data, batches=in_parts(data.batches, count))
    state = jax.eval_shape(functions.init, config.train.seed)
    batch = data.batches.shapes()
    step = _step(plan, functions, config.stragglers)
    step.prepare(state, batch)
    shardings = step.in_shardings((state, batch))
    one_mesh = OneMesh(step) if isinstance(step, StagedFunction) else None
    return Run(config, functions, data, plan, folder, step, shardings, one_mesh)
