"""From a training configuration to a plan: the one place where the train room calls the planner."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypedDict

import jax
import rich.console
import rich.markup
from autoshard_models.train_step import TrainFunctions
from jax.sharding import PartitionSpec

from autoshard.api import BasePlan, Plan, StagedPlan, compare, plan_on_devices
from autoshard.comparison.comparison import Comparison
from autoshard.cost.id_distribution import IdDistribution
from autoshard.cost.lookups import Lookups
from autoshard.errors import ConfigError
from autoshard.offloading.host_part import HostPart
from autoshard.offloading.hosted_plan import HostTablesPlan
from autoshard.pipelines.plan.comparison import StagedComparison
from autoshard.pipelines.search.options import StageOptions
from autoshard.plans.offline import write_problem
from autoshard.plans.options import PlanOptions, PlanProgress
from autoshard.strategies.strategies import Strategy
from autoshard.tables.sparse_step import SparseStep
from autoshard.train.config import LookupsSection, PlanSection, StagesSection, TrainConfig
from autoshard.train.registry import batch_shapes, runs_in_stages
from autoshard.train.shared_batch import share_arguments
from autoshard.train.table_places import host_part
from autoshard.train_step import TrainStep
from autoshard.uneven_step import UnevenStep


def make_plan(
    config: TrainConfig,
    functions: TrainFunctions,
    on_progress: Callable[[PlanProgress], None] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Plan | StagedPlan:
    """Plans one training step of `config`, from shapes alone.

    Args:
        config: the run; its `plan` section says for which cluster and under which limits.
        functions: what `registry.train_functions` made of it.
        on_progress: called as the planner works.
        tell: called with what was decided of tables in host memory, if anything.

    Returns:
        The plan, in which the training state is donated, and which tells `config`. With tables in host memory, of the
        step over the rows of a batch.

    Raises:
        AutoshardError: the cluster or the plan to start from cannot be read, or no plan satisfies the limits.
    """
    made = make_plan_to_keep(config, functions, on_progress, tell=tell)
    if not isinstance(made, HostTablesPlan):
        return made
    tell(f"{made.placed.outline}\n")
    return made.over_rows


def make_plan_to_keep(
    config: TrainConfig,
    functions: TrainFunctions,
    on_progress: Callable[[PlanProgress], None] | None = None,
    solution: str | os.PathLike[str] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Plan | StagedPlan | HostTablesPlan:
    """As `make_plan`; where `execution.mode` is `auto`, together with the decision about tables that it follows from.

    Args:
        solution: the solution of the problem that `write_config_problem` writes, to make the plan of. Others: as there.
    """
    step, args = functions.step, arguments(config, functions)
    part, over_rows = host_part(config, step, *args[:2]), None
    if part is not None:
        over_rows = _over_rows(part, config, functions)
        step, args = over_rows.step, (over_rows.state, over_rows.batch)
        if part.placed is None:
            tell(f"{part}\n")
    made = plan_on_devices(
        step,
        *args,
        **_settings(config),
        start=None if config.plan.start is None else Plan.load(config.plan.start),
        options=_options_of(config, functions, on_progress),
        solution=solution,
        stages=_stage_options(config.plan.stages),
        configuration=config.model_dump_json(),
    )
    if part is None or part.placed is None:
        return made
    assert isinstance(made, Plan) and over_rows is not None
    state, batch, *_ = arguments(config, functions)
    return HostTablesPlan(part.placed, made, str(over_rows.update), config.execution.lazy, shapes=(state, batch))


def _over_rows(part: HostPart, config: TrainConfig, functions: TrainFunctions) -> SparseStep:
    assert isinstance(functions.step, TrainStep)  # as `host_part` has seen to
    state, batch, *_ = arguments(config, functions)
    return part.step_over_rows(functions.step, state, batch, config.execution.lazy)


def planned_program(
    config: TrainConfig, functions: TrainFunctions, plan: BasePlan, number: int
) -> tuple[Any, tuple[Any, ...]]:
    """A program of a plan that was made from a configuration, and its arguments by shape; see `BasePlan.program`.

    Args:
        config, functions: the run. plan: its plan, of any kind. number: of the program.
    """
    if config.execution.mode not in (None, "auto"):  # the plan of `auto` has the decision with it
        part = host_part(config, functions.step, *arguments(config, functions)[:2])
        assert part is not None
        over_rows = _over_rows(part, config, functions)
        return over_rows.step, (over_rows.state, over_rows.batch)
    return plan.program(number, functions.step, arguments(config, functions))


def write_config_problem(
    config: TrainConfig, functions: TrainFunctions, path: str | os.PathLike[str], console: rich.console.Console
) -> None:
    """Writes the problem that `make_plan` would solve, for `autoshard solve`; see `autoshard.write_problem`."""
    if config.plan.pipelines == "search":
        raise ConfigError(
            "plan.pipelines: A problem file holds the problem of one program; received `search`, which plans in stages "
            "too. Leave it out."
        )
    if runs_in_stages(config):
        raise ConfigError(
            "plan: A problem file holds the problem of one program; received a step that is cut into stages, since "
            "plan.stages is set or the cluster has devices of several kinds. Leave plan.stages out, and name a cluster "
            "of one kind of device with --cluster."
        )
    with shown_progress(console) as show:
        options = _options_of(config, functions, show)
        write_problem(path, functions.step, *arguments(config, functions), **_settings(config), options=options)


def arguments(config: TrainConfig, functions: TrainFunctions) -> tuple[Any, ...]:
    """The arguments of a training step, by shape: state, batch, and what else it takes."""
    state = jax.eval_shape(functions.init, config.train.seed)
    return state, batch_shapes(config), *share_arguments(functions.step)


class _Settings(TypedDict):
    cluster: str | None
    mesh: dict[str, int] | None
    donate_argnums: int
    memory_budget_bytes: int | None
    pins: dict[str, PartitionSpec] | None


def _settings(config: TrainConfig) -> _Settings:
    return {
        "cluster": config.plan.cluster,
        "mesh": config.plan.mesh,
        "donate_argnums": 0,
        "memory_budget_bytes": config.plan.memory_budget_bytes,
        "pins": _partition_specs(config.plan) or None,
    }


def make_plan_visibly(
    config: TrainConfig,
    functions: TrainFunctions,
    console: rich.console.Console,
) -> Plan | StagedPlan:
    """`make_plan`, with a line on the terminal that tells what the planner is doing."""
    with shown_progress(console) as show:
        return make_plan(config, functions, show, tell=lambda text: _say(console, text))


def make_plan_to_keep_visibly(
    config: TrainConfig,
    functions: TrainFunctions,
    console: rich.console.Console,
    solution: str | os.PathLike[str] | None = None,
) -> Plan | StagedPlan | HostTablesPlan:
    """`make_plan_to_keep`, likewise."""
    with shown_progress(console) as show:
        return make_plan_to_keep(config, functions, show, solution, lambda text: _say(console, text))


def _say(console: rich.console.Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def make_comparison_visibly(
    config: TrainConfig,
    functions: TrainFunctions,
    console: rich.console.Console,
    strategies: Sequence[Strategy] | None = None,
) -> Comparison | StagedComparison:
    """The plan that `make_plan` makes beside others; see `autoshard.compare`."""
    settings = _settings(config)
    title = f"{config.model.name} {config.model.preset}, batch of {config.data.batch_size}"
    with shown_progress(console) as show:
        return compare(
            functions.step,
            *arguments(config, functions),
            strategies=strategies,
            title=title,
            options=_options_of(config, functions, show),
            stages=_stage_options(config.plan.stages),
            **settings,
        )


@contextlib.contextmanager
def shown_progress(console: rich.console.Console) -> Iterator[Callable[[PlanProgress], None]]:
    """Shows progress in one changing line."""
    with console.status("Planning") as status:

        def show(progress: PlanProgress) -> None:
            best = "" if progress.objective_s is None else f", best step {progress.objective_s * 1e3:.3g} ms"
            line = f"Planning, {progress.elapsed_s:.0f} s: {progress.stage}, {progress.detail}{best}"
            status.update(rich.markup.escape(line))

        yield show


def _stage_options(section: StagesSection | None) -> StageOptions | None:
    if section is None:
        return None
    given = {k: v for k, v in section.model_dump().items() if v is not None}
    for name in ("schedules", "micro_batch_sizes"):
        if name in given:
            given[name] = tuple(given[name])
    return StageOptions(**given)


def _partition_specs(section: PlanSection) -> dict[str, PartitionSpec]:
    """The pins as JAX writes them: a list of axes splits one dimension over all of them."""
    return {
        pattern: PartitionSpec(*(tuple(entry) if isinstance(entry, list) else entry for entry in entries))
        for pattern, entries in section.pins.items()
    }


def _options_of(
    config: TrainConfig, functions: TrainFunctions, on_progress: Callable[[PlanProgress], None] | None
) -> PlanOptions:
    """As `options_of`; where replicas share a batch out, their loops are counted as often as they run on average."""
    options, step = options_of(config, on_progress), functions.step
    if not isinstance(step, UnevenStep):
        return options
    return dataclasses.replace(options, while_trips=step.mean_parts, adaptive=False)


def _lookups(section: LookupsSection) -> Lookups:
    ids = IdDistribution(section.zipf_exponent, section.is_ranked)
    return Lookups(ids, section.slots_factor, section.exchange)


def options_of(config: TrainConfig, on_progress: Callable[[PlanProgress], None] | None) -> PlanOptions:
    """What `config` tells the planner."""
    section = config.plan
    by_default = None if runs_in_stages(config) else "never"
    return PlanOptions(
        adaptive=config.stragglers.mode != "off",
        time_limit_s=section.time_limit_s,
        work_limit=section.work_limit,
        cache=section.cache,
        compile_check=section.check,
        compile_check_meshes=section.check_meshes,
        remat=section.remat,
        micro_batches=section.micro_batches,
        pipelines=section.pipelines or by_default,
        offload=section.offload,
        decompose=section.decompose,
        lookups=_lookups(section.lookups),
        on_progress=on_progress,
    )
