"""Plans on devices: of one program for one mesh, or of a training step for a cluster of several slices."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from jax.sharding import PartitionSpec

from autoshard.api.program import Plan
from autoshard.api.staged import StagedPlan
from autoshard.calls.pure_call import Statics, pure_call
from autoshard.calls.wrapped import donated_argnums
from autoshard.cluster import Cluster
from autoshard.errors import ConfigError, StageError
from autoshard.pipelines.plan.make import plan_staged
from autoshard.pipelines.search.options import StageOptions
from autoshard.plans.annotated import StagesAskedError
from autoshard.plans.host_memory import ASKED, offloads_state
from autoshard.plans.make import Posed, Request, load_cluster, plan_function, plan_posed
from autoshard.plans.options import PlanOptions
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.variant_search import plan_variants
from autoshard.plans.variant_space import Space, space_of
from autoshard.strategies.adaptive import plan_adaptive
from autoshard.suggestions import suggestion
from autoshard.train_step import TrainStep
from autoshard.verify.fastest_mesh import plan_checked


def in_stages(cluster: Cluster, stages: object | None) -> bool:
    """Whether a training step is cut into stages: where that is asked for, or where devices are of several kinds."""
    return stages is not None or not cluster.is_homogeneous


def is_cut(fn: Callable[..., Any], cluster: Cluster, stages: object | None) -> TypeGuard[TrainStep]:
    """Whether `fn` is a training step that is cut into stages; see `in_stages`."""
    return isinstance(fn, TrainStep) and in_stages(cluster, stages)


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
    is_staged = is_cut(fn, hardware, stages)
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

    try:
        if space is not None and isinstance(fn, TrainStep):
            made = plan_variants(
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
            return Plan.of(made)
        if not is_staged:
            statics = Statics.of(fn, static_argnums, static_argnames)
            with pure_call(fn, args, kwargs, statics, _own_options()) as call:
                made = plan_function(
                    call.fn,
                    call.args,
                    hardware,
                    donate_argnums=donated,
                    start=start,
                    options=options,
                    answer=answer_of(call.fn, call.args),
                    **one_program,
                )
            return Plan.of(made)
    except StagesAskedError:
        if not isinstance(fn, TrainStep):
            raise
        _space(fn, args, options, solution, is_staged=True)
    assert isinstance(fn, TrainStep)  # all else has a plan of one program, or none
    if offloads_state(options):
        raise StageError(
            f"{ASKED} is for plans of one program; this step is planned in stages. Leave it out, or plan for a "
            "cluster of one kind of device without stages."
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
    given = {"mesh": mesh, "pins": pins, "start": start, "solution": solution}
    unfit = [name for name, value in given.items() if value]
    if unfit:
        raise StageError(
            f"{', '.join(unfit)} speak of one program on one mesh, but a training step on cluster `{hardware.name}` is "
            "planned in stages, each on a mesh of its own. Leave them out, or plan for a cluster of one kind of device "
            "without stages, also in annotations."
        )
    if len(args) != 2:
        raise StageError(f"A TrainStep is planned for (state, batch); received {len(args)} arguments. Pass both.")
    staged = plan_staged(
        fn,
        *args,
        hardware,
        options,
        stages or StageOptions(),
        memory_budget_bytes,
        donates_state=0 in donated,
        configuration=configuration,
    )
    return StagedPlan.of(staged)


def _own_options() -> list[str]:
    """The options of `plan_on_devices`, by name."""
    return [p.name for p in inspect.signature(plan_on_devices).parameters.values() if p.kind is p.KEYWORD_ONLY]


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
