"""The plan of a run that goes on: the one in its folder, as long as it fits."""

import dataclasses
import pathlib

import jax
from autoshard_models.train_step import TrainFunctions

from autoshard.cluster.detect import detect_cluster
from autoshard.errors import AutoshardError, PlanMismatchError
from autoshard.plans.plan import Plan
from autoshard.train.config import TrainConfig, load_config
from autoshard.train.registry import batch_shapes

DECISIVE = ("model", "optimizer", "data", "plan")
"""The parts of a configuration that a plan depends on, or may depend on."""


@dataclasses.dataclass(frozen=True, slots=True)
class KeptPlan:
    """The plan of an earlier run: itself, or the reason why it cannot be used."""

    plan: Plan | None
    reason: str


def kept_plan(config: TrainConfig, functions: TrainFunctions, folder: pathlib.Path) -> KeptPlan:
    """The plan in `folder`, if the configuration there is the same and the plan fits program and devices.

    Planning anew could end in another plan, whose sums are rounded in another order; the same plan continues a run
    exactly.
    """
    try:
        before = load_config(folder / "config.yaml")
        plan = Plan.load(folder / "plan.json")
    except AutoshardError as error:
        return KeptPlan(None, str(error).partition("\n")[0])
    old, new = before.model_dump(mode="json"), config.model_dump(mode="json")
    changed = [f"`{part}`" for part in DECISIVE if old[part] != new[part]]
    if changed:
        return KeptPlan(None, f"the configuration has another {' and '.join(changed)}")
    if plan.num_devices != jax.device_count():
        return KeptPlan(None, f"the plan is for {plan.num_devices} devices, and there are {jax.device_count()}")
    kind = detect_cluster().groups[0].device_type.name if config.plan.cluster is None else plan.device
    if kind != plan.device:
        return KeptPlan(None, f"the plan is for devices of type {plan.device}, and these are {kind}")
    state = jax.eval_shape(functions.init, config.train.seed)
    try:
        plan.check(functions.step, (state, batch_shapes(config)))
    except PlanMismatchError as error:
        return KeptPlan(None, str(error).partition("\n")[0])
    return KeptPlan(plan, "")
