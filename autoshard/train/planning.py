"""From a training configuration to a plan: the one place where the train room calls the planner."""

from collections.abc import Callable

import jax
import rich.console
import rich.markup
from autoshard_models.train_step import TrainFunctions, batch_shapes
from jax.sharding import PartitionSpec

from autoshard.plans.make import plan
from autoshard.plans.options import PlanOptions, PlanProgress
from autoshard.plans.plan import Plan
from autoshard.train.config import PlanSection, TrainConfig


def make_plan(
    config: TrainConfig, functions: TrainFunctions, on_progress: Callable[[PlanProgress], None] | None = None
) -> Plan:
    """Plans one training step of `config`, from shapes alone.

    Args:
        config: the run; its `plan` section says for which cluster and under which limits.
        functions: what `registry.train_functions` made of it.
        on_progress: called as the planner works.

    Returns:
        The plan, in which the training state is donated.

    Raises:
        AutoshardError: the cluster cannot be read, or no plan satisfies the limits.
    """
    state = jax.eval_shape(functions.init, config.train.seed)
    return plan(
        functions.step,
        state,
        batch_shapes(config.data.batch_size, config.data.sequence_length),
        cluster=config.plan.cluster,
        mesh=config.plan.mesh,
        donate_argnums=0,
        memory_budget_bytes=config.plan.memory_budget_bytes,
        pins=_partition_specs(config.plan) or None,
        options=_options(config.plan, on_progress),
    )


def make_plan_visibly(config: TrainConfig, functions: TrainFunctions, console: rich.console.Console) -> Plan:
    """`make_plan`, with a line on the terminal that tells what the planner is doing."""
    with console.status("Planning") as status:

        def show(progress: PlanProgress) -> None:
            best = "" if progress.objective_s is None else f", best step {progress.objective_s * 1e3:.3g} ms"
            line = f"Planning, {progress.elapsed_s:.0f} s: {progress.stage}, {progress.detail}{best}"
            status.update(rich.markup.escape(line))

        return make_plan(config, functions, show)


def _partition_specs(section: PlanSection) -> dict[str, PartitionSpec]:
    """The pins as JAX writes them: a list of axes splits one dimension over all of them."""
    return {
        pattern: PartitionSpec(*(tuple(entry) if isinstance(entry, list) else entry for entry in entries))
        for pattern, entries in section.pins.items()
    }


def _options(section: PlanSection, on_progress: Callable[[PlanProgress], None] | None) -> PlanOptions:
    if section.time_limit_s is None:
        return PlanOptions(on_progress=on_progress)
    return PlanOptions(time_limit_s=section.time_limit_s, on_progress=on_progress)
