"""Plans on devices: of one program for one mesh, or of a training step for a cluster of several slices."""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import jax
from jax.sharding import PartitionSpec

from autoshard.api.program import Plan
from autoshard.api.received import check_received
from autoshard.api.staged import StagedPlan
from autoshard.calls.pure_call import Statics, pure_call
from autoshard.calls.wrapped import donated_argnums
from autoshard.cluster import Cluster
from autoshard.compiler.schedule import Schedule
from autoshard.errors import ConfigError, MemoryBudgetError, SolverError, StageError
from autoshard.pipelines.plan.arrange import StagedTask, arrange
from autoshard.pipelines.plan.make import plan_arranged
from autoshard.pipelines.plan.one_or_stages import hint, in_stages_instead, plan_either
from autoshard.pipelines.plan.pipeline_plan import PipelinePlan
from autoshard.pipelines.search.options import StageOptions
from autoshard.plans.annotated import StagesAskedError
from autoshard.plans.host_memory import asked_for, is_offloading, may_offload_instead, offloaded_instead
from autoshard.plans.make import Posed, Request, homogeneous_slice, load_cluster, plan_function, plan_posed
from autoshard.plans.mean_loss import why_no_mean_of
from autoshard.plans.options import PlanOptions
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.variant_search import plan_variants
from autoshard.plans.variant_space import Space, space_of
from autoshard.solver.warm_up import start_compilation
from autoshard.strategies.adaptive import plan_adaptive
from autoshard.suggestions import suggestion
from autoshard.train_step import TrainStep
from autoshard.verify.fastest_mesh import plan_checked


def in_stages(cluster: Cluster, stages: object | None, pipelines: str | None = None) -> bool:
    """Whether a training step is cut into stages for certain: where that is asked for, or where devices are of several
    kinds. With `pipelines="search"` on devices of one kind, only its plan tells.
    """
    return not cluster.is_homogeneous or stages is not None and pipelines != "search"


def is_cut(
    fn: Callable[..., Any], cluster: Cluster, stages: object | None, options: PlanOptions | None
) -> TypeGuard[TrainStep]:
    """Whether `fn` is a training step that is cut into stages for certain; see `in_stages`."""
    return isinstance(fn, TrainStep) and in_stages(cluster, stages, None if options is None else options.pipelines)


def plan_on_devices(
    fn: Callable[..., Any],
    *args: Any,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    mesh: Mapping[str, int] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    memory_budget_bytes: float | None = None,
    pins: Mapping[str, PartitionSpec] | None = None,
    start: Plan | Mapping[str, PartitionSpec] | None = None,
    options: PlanOptions | None = None,
    solution: str | os.PathLike[str] | None = None,
    stages: StageOptions | None = None,
    configuration: str | None = None,
    **kwargs: Any,
) -> Plan | StagedPlan:
    """Chooses how `fn` runs on the devices of a cluster, with all that it keeps in their memory.

    Arguments, results and errors are those of `autoshard.plan`, which comes here first, without its `tables`.
    """
    start_compilation()
    check_received(fn, args, pins, options, stages)
    options = options or PlanOptions()
    hardware = load_cluster(cluster)
    donated = donated_argnums(fn, donate_argnums)
    if stages is not None and not isinstance(fn, TrainStep):
        received = getattr(fn, "__name__", type(fn).__name__)
        raise StageError(
            f"Only a TrainStep can be cut into stages; received {received}. Write the step as "
            "autoshard.TrainStep(loss_fn, optimizer), or leave out stages=."
        )
    if isinstance(fn, TrainStep) and (kwargs or static_argnums is not None or static_argnames is not None):
        received = next(iter(kwargs), "static_argnums or static_argnames")
        raise ConfigError(
            f"A TrainStep is planned for (state, batch) alone; received {received}. Bind what its loss function needs "
            f"besides by functools.partial.{suggestion(received, _own_options(), quote='`')}"
        )
    given = {"mesh": mesh, "pins": pins, "start": start, "solution": solution}
    is_staged = is_cut(fn, hardware, stages, options)
    are_compared = _are_compared(fn, args, hardware, options, stages, given)
    space = _space(fn, args, options, solution, is_staged)
    one_program: Request = {
        "mesh": mesh,
        "memory_budget_bytes": memory_budget_bytes,
        "pins": pins,
        "solution": solution,
        "configuration": configuration,
    }

    def answer_of(fn: Callable[..., Any], args: Sequence[Any]) -> Callable[[Posed], ProgramPlan]:
        """What makes the plan of a function."""
        own = functools.partial(plan_checked, fn=fn, args=args) if options.compile_check else plan_posed
        return functools.partial(plan_adaptive, answer=own) if options.adaptive else own

    def plan_of(options: PlanOptions) -> ProgramPlan:
        """The plan of one program."""
        if space is not None and isinstance(fn, TrainStep):
            return plan_variants(
                fn,
                args,
                hardware,
                space,
                donate_argnums=donated,
                start=start,
                options=options,
                answer=lambda step: answer_of(step, args),
                **one_program,
            )
        statics = Statics.of(fn, static_argnums, static_argnames)
        with pure_call(fn, args, kwargs, statics, _own_options()) as call:
            return plan_function(
                call.fn,
                call.args,
                hardware,
                donate_argnums=donated,
                start=start,
                options=options,
                answer=answer_of(call.fn, call.args),
                **one_program,
            )

    def plan_one() -> ProgramPlan:
        """The plan of one program, some of it in host memory where nothing else fits and options leave that open."""
        if solution is not None or not may_offload_instead(options, homogeneous_slice(hardware)):
            return plan_of(options)
        try:
            # the least memory of the devices alone is for an error that is not raised
            return plan_of(dataclasses.replace(options, least_memory_s=0.0))
        except SolverError:
            try:
                return offloaded_instead(plan_of(dataclasses.replace(options, offload="all")))
            except SolverError as error:
                raise MemoryBudgetError(
                    f"{error} That is with optimizer state and activations in the memory of the hosts."
                ) from error

    def staged_task(step: TrainStep) -> StagedTask:
        """What is planned in stages."""
        state, batch = args
        settings = stages or StageOptions(), memory_budget_bytes, 0 in donated, configuration
        return StagedTask(step, state, batch, hardware, options, *settings)

    try:
        if are_compared and isinstance(fn, TrainStep):
            made = plan_either(plan_one, staged_task(fn))
            return StagedPlan.of(made) if isinstance(made, PipelinePlan) else Plan.of(made)
        if not is_staged:
            made = plan_one()
            told = hint(made) if options.pipelines is None and not _of_one_program(options, given) else None
            if told is not None and isinstance(fn, TrainStep):
                made = dataclasses.replace(made, warnings=(*made.warnings, told))
            return Plan.of(made)
    except StagesAskedError:
        if not isinstance(fn, TrainStep):
            raise
        _space(fn, args, options, solution, is_staged=True)
    assert isinstance(fn, TrainStep)  # all else has a plan of one program, or none
    if is_offloading(options):
        raise StageError(
            f"{asked_for(options)} is for plans of one program; this step is planned in stages. Leave it out, or plan "
            "for a cluster of one kind of device without stages."
        )
    if options.compile_check:
        raise StageError(
            "options.compile_check (--check, plan.check) is for plans of one program; this step is planned in stages. "
            "Leave it out, and compare the stages with what a compiler makes of them: autoshard verify, plan.verify."
        )
    if options.adaptive:
        raise StageError(
            "options.adaptive is for plans of one program, in which work moves along a tensor axis; this step is "
            "planned in stages. Leave it out; stages are cut for devices of unequal speed when they are planned."
        )
    if options.schedule is Schedule.LATENCY_HIDING:
        raise StageError(
            "options.schedule asks for programs that hide collectives, but the phases of stages are compiled in the "
            "order of least memory, and their times add up. Leave it out, or plan for a cluster of one kind of device "
            "without stages."
        )
    unfit = [name for name, value in given.items() if value]
    if unfit:
        verb, them = ("is", "it") if len(unfit) == 1 else ("are", "them")
        raise StageError(
            f"{', '.join(f'{name}=' for name in unfit)} {verb} for one program on one mesh; this step is planned in "
            f"stages on cluster `{hardware.name}`, each on a mesh of its own. Leave {them} out, or plan for a cluster "
            "of one kind of device without stages, also in annotations."
        )
    if len(args) != 2:
        raise StageError(f"A TrainStep is planned for (state, batch); received {len(args)} arguments. Pass both.")
    return StagedPlan.of(plan_arranged(arrange(staged_task(fn))))


def plan_in_stages_instead(
    error: MemoryBudgetError,
    fn: Callable[..., Any],
    args: Sequence[Any],
    cluster: Cluster,
    options: PlanOptions,
    given: Mapping[str, object],
    *,
    donate_argnums: int | Sequence[int] | None,
    memory_budget_bytes: float | None,
    configuration: str | None,
) -> StagedPlan | None:
    """The plan in stages of a step that does not fit the memory as one program, where options leave that open.

    Args:
      error: Why there is none of one program.
      given: What the caller insists on of one program, by name: mesh, pins, start, solution.
      All others: As for `plan_on_devices`.

    Returns:
      The plan, with a warning; None where stages are out of the question, as where micro-batches would make it another
      step.

    Raises:
      MemoryBudgetError: There is none either; says why.
    """
    is_open = options.pipelines is None and options.micro_batches is None and cluster.is_homogeneous
    if not (is_open and isinstance(fn, TrainStep) and len(args) == 2) or _of_one_program(options, given):
        return None
    state, batch = args
    if len(set(fn.parts or ())) > 1 or jax.tree.leaves(getattr(state, "mutable", None)):
        return None
    if not fn.parts and why_no_mean_of(fn, state, batch) is not None:
        return None  # in micro-batches it could be another step
    donates = 0 in donated_argnums(fn, donate_argnums)
    task = StagedTask(fn, state, batch, cluster, options, StageOptions(), memory_budget_bytes, donates, configuration)
    return StagedPlan.of(in_stages_instead(error, task))


def _of_one_program(options: PlanOptions, given: Mapping[str, object]) -> list[str]:
    """What the caller asks for that speaks of one program alone."""
    asked = [f"{name}=" for name, value in given.items() if value]
    asked += ["options.compile_check (plan.check)"] * options.compile_check
    asked += ["options.adaptive (stragglers.mode)"] * options.adaptive
    return asked + [asked_for(options)] * is_offloading(options)


def _are_compared(
    fn: Callable[..., Any],
    args: Sequence[Any],
    cluster: Cluster,
    options: PlanOptions,
    stages: StageOptions | None,
    given: Mapping[str, object],
) -> bool:
    """Whether a step is planned as one program and in stages.

    Raises:
      ConfigError: That is asked for where it cannot be, or the option is none.
    """
    asked = f"PlanOptions.pipelines={options.pipelines!r} (plan.pipelines)"
    if options.pipelines not in (None, "never", "search"):
        raise ConfigError(f'{asked} is "never" or "search". Choose one, or leave it out.')
    if options.pipelines == "never" and stages is not None:
        raise ConfigError(
            f"{asked} and stages= (plan.stages) exclude each other; received both. Leave one of them out."
        )
    if options.pipelines == "never" and isinstance(fn, TrainStep) and not cluster.is_homogeneous:
        kinds = ", ".join(dict.fromkeys(part.device_type.name for part in cluster.slices()))
        raise ConfigError(
            f"{asked} is for devices of one kind, which can run one program; received cluster `{cluster.name}` with "
            f"{kinds}. Leave it out, or name a cluster of one kind of device."
        )
    if options.pipelines != "search":
        return False
    if not (isinstance(fn, TrainStep) and len(args) == 2):
        received = getattr(fn, "__name__", type(fn).__name__)
        raise ConfigError(
            f"{asked}: only a TrainStep, planned for (state, batch), can be cut into stages; received {received} with "
            f"{len(args)} arguments. Write the step as autoshard.TrainStep(loss_fn, optimizer), or leave it out."
        )
    if not cluster.is_homogeneous:
        return False
    if unfit := _of_one_program(options, given):
        raise ConfigError(
            f"{asked} plans a step both as one program and in stages; received {', '.join(unfit)}, which only one "
            "program can have. Leave one of them out."
        )
    return True


def _own_options() -> dict[str, str]:
    """The options of `plan_on_devices` and those within `options`, and how each is written."""
    own = inspect.signature(plan_on_devices).parameters.values()
    inner = {field.name: f"options=PlanOptions({field.name}=...)" for field in dataclasses.fields(PlanOptions)}
    return inner | {p.name: p.name for p in own if p.kind is p.KEYWORD_ONLY}


def _space(
    fn: Callable[..., Any],
    args: Sequence[Any],
    options: PlanOptions,
    solution: str | os.PathLike[str] | None,
    is_staged: bool,
) -> Space | None:
    """The forms of a step that may be tried; None where it is planned as it is written.

    Raises:
      ConfigError: A search is asked for where there can be none, or an option is none.
    """
    if isinstance(fn, TrainStep) and len(args) == 2 and not is_staged:
        space = space_of(fn, args[0], args[1], options)
        is_open = space.with_policies or space.counts != (None,)
        is_free = solution is None and not options.adaptive
        return space if is_open and (space.is_asked or is_free) else None
    asked = [
        f"PlanOptions.{name}={value!r} (plan.{name})"
        for name, value in (("remat", options.remat), ("micro_batches", options.micro_batches))
        if value not in (None, "as_written")
    ]
    if not asked:
        return None
    if not (isinstance(fn, TrainStep) and len(args) == 2):
        received = getattr(fn, "__name__", type(fn).__name__)
        raise ConfigError(
            f"{', '.join(asked)}: what layers recompute and micro-batches are chosen for the loss of a TrainStep, "
            f"planned for (state, batch); received {received} with {len(args)} arguments. Write the step as "
            "autoshard.TrainStep(loss_fn, optimizer), or leave the option out."
        )
    raise ConfigError(
        f"{', '.join(asked)}: for steps of one program; a step in stages chooses by itself which stages are computed "
        "again, and its micro-batches (StageOptions.micro_batch_sizes). Leave the option out."
    )
