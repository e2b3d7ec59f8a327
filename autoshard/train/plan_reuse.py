"""The plan of a run that goes on: the one in its folder, or the one it has for these devices, as long as it fits."""

import dataclasses
import pathlib

import jax
from autoshard_models.train_step import TrainFunctions

from autoshard.api import Plan, StagedPlan, load
from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError, ConfigError, PlanMismatchError
from autoshard.train.config import TrainConfig, config_of_text, load_config
from autoshard.train.planning import arguments

DECISIVE = ("model", "optimizer", "data", "plan")
"""The parts of a configuration that a plan depends on, or may depend on."""


@dataclasses.dataclass(frozen=True, slots=True)
class KeptPlan:
    """The plan of an earlier run: itself, or the reason why it cannot be used."""

    plan: Plan | StagedPlan | None
    reason: str


def kept_plan(config: TrainConfig, functions: TrainFunctions, folder: pathlib.Path) -> KeptPlan:
    """The plan in `folder`, if the configuration there is the same and the plan fits program and devices.

    Planning anew could end in another plan, whose sums are rounded in another order; the same plan continues a run
    exactly.
    """
    try:
        before = load_config(folder / "config.yaml")
        plan = load(folder / "plan.json")
    except AutoshardError as error:
        return KeptPlan(None, str(error).partition("\n")[0])
    reason = _changed(before, config) or _other_devices(plan, config) or _other_program(plan, config, functions)
    return KeptPlan(None if reason else plan, reason or "")


def why_unfit(plan: Plan | StagedPlan, config: TrainConfig, functions: TrainFunctions) -> str | None:
    """Why a plan that the run has for these devices cannot be used, or None if it can.

    Args:
        plan: made from a configuration, which it tells.
        config, functions: the run.
    """
    try:
        before = config_of_text(plan.configuration or "", "plan")
    except ConfigError:
        return "it does not tell the configuration that it was made from"
    return _changed(before, config) or _other_devices(plan, config) or _other_program(plan, config, functions)


def _changed(before: TrainConfig, config: TrainConfig) -> str | None:
    old, new = before.model_dump(mode="json"), config.model_dump(mode="json")
    changed = [f"`{part}`" for part in DECISIVE if old[part] != new[part]]
    return f"the configuration has another {' and '.join(changed)}" if changed else None


def _other_devices(plan: Plan | StagedPlan, config: TrainConfig) -> str | None:
    if plan.num_devices != jax.device_count():
        return f"the plan is for {plan.num_devices} devices, and there are {jax.device_count()}"
    kinds = plan.device_types
    found = tuple(s.device_type.name for s in Cluster.detect().slices()) if config.plan.cluster is None else kinds
    if found != kinds:
        return f"the plan is for devices of type {', '.join(kinds)}, and these are {', '.join(found)}"
    return None


def _other_program(plan: Plan | StagedPlan, config: TrainConfig, functions: TrainFunctions) -> str | None:
    try:
        plan.check(functions.step, arguments(config, functions))
    except PlanMismatchError as error:
        return str(error).partition("\n")[0]
    return None
