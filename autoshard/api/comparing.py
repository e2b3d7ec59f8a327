"""`autoshard.compare` and `autoshard.diff`: plans side by side, of one program or in stages."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from jax.sharding import PartitionSpec

from autoshard.api.base_plan import BasePlan
from autoshard.api.planning import is_cut, plan_on_devices
from autoshard.api.program import Plan
from autoshard.api.staged import StagedPlan
from autoshard.comparison.compare import compare_program
from autoshard.comparison.comparison import Comparison
from autoshard.errors import ConfigError, MemoryBudgetError, StageError
from autoshard.pipelines.plan.comparison import StagedComparison
from autoshard.pipelines.plan.diff import StagedDiff
from autoshard.pipelines.search.options import StageOptions
from autoshard.plans.make import load_cluster
from autoshard.plans.options import PlanOptions
from autoshard.plans.plan_diff import PlanDiff
from autoshard.strategies.hand_written import HandWritten, hand_written
from autoshard.strategies.make import Settings
from autoshard.strategies.strategies import Strategy
from autoshard.train_step import TrainStep


def compare(
    fn: Callable[..., Any],
    *args: Any,
    strategies: Sequence[Strategy] | None = None,
    pins: Mapping[str, PartitionSpec] | None = None,
    title: str | None = None,
    stages: StageOptions | None = None,
    **settings: Unpack[Settings],
) -> Comparison | StagedComparison:
    """Plans `fn`, and shows the plan beside what people write by hand.

    A step of one program stands beside data parallelism, ZeRO, Megatron and their mixes, each planned under the same
    costs and limits; of a `TrainStep`, whose form is searched as by `autoshard.plan`, in the best of the usual forms:
    nothing recomputed, all but the products with weights, all, or what the step says itself, in the batch that it is
    given. A step in stages stands beside the forms that its search looked at: each slice alone, pipelines
    across slices, and a replica group on each slice with shares by speed, even shares and Whale's (Jia et al. 2022).

    Args:
      fn: The function, such as a whole training step, that takes and returns its state; or a `TrainStep`.
      *args: Its positional arguments: pytrees of arrays or `jax.ShapeDtypeStruct`. Nothing is allocated.
      strategies: Which strategies; None for all of `autoshard.baselines.ALL` that apply to the function.
      pins: Shardings that autoshard's own plan must have, as for `autoshard.plan`.
      title: What is compared, for people; the function's name by default.
      stages: As for `autoshard.plan`.
      **settings: See `autoshard.baselines.Settings`. Without `mesh`, autoshard searches its meshes, and each strategy
        has the meshes that suit it.

    The first Ctrl-C ends the search for the plan at hand with the best so far, and leaves out the strategies that
    follow; the second one ends it all.

    Returns:
      A `Comparison`, or of a step in stages a `StagedComparison`. A contender that exceeds the memory limit, or that
      cannot be written down, is in it all the same, with the reason.

    Raises:
      ClusterError, LayoutError, MeshError, PinError, TraceError: The inputs do not fit together.
      ConfigError: Stages are to be compared with one program (`PlanOptions.pipelines`).
      StageError: `strategies` and the like are given for a step in stages, which no strategy speaks of.
    """
    options = settings.get("options")
    if options is not None and options.pipelines == "search":
        raise ConfigError(
            'PlanOptions.pipelines="search" (plan.pipelines) leaves open whether a step is one program, which is '
            "compared with strategies, or in stages, which are compared with other arrangements. Leave it out, and for "
            "the latter pass stages= (plan.stages); or plan with it, and see what was considered (explain, report)."
        )
    if not is_cut(fn, load_cluster(settings.get("cluster")), stages, options):
        own, forms = _searched(fn, args, pins, settings)
        found = compare_program(
            fn, *args, strategies=strategies, pins=pins, title=title, own=own, forms=forms, **settings
        )
        contenders = [c if c.plan is None else dataclasses.replace(c, plan=Plan.of(c.plan)) for c in found.contenders]
        return dataclasses.replace(found, contenders=tuple(contenders))
    given = {"strategies": strategies, "pins": pins, **settings}
    unfit = [name for name in ("strategies", "pins", "mesh", "tensor_axis", "batch_argnums") if given.get(name)]
    if unfit:
        raise StageError(
            f"{', '.join(unfit)}: strategies lay out one program on one mesh, and a step in stages is compared with "
            "the forms that its search looked at. Leave them out, or compare on a cluster of one kind of device."
        )
    made = _planned(fn, args, settings, stages=stages)
    return made.compare(fn, *args, title=title)


def _searched(
    fn: Callable[..., Any], args: Sequence[Any], pins: Mapping[str, PartitionSpec] | None, settings: Settings
) -> tuple[Plan | None, Sequence[HandWritten]]:
    """The plan of a step whose form is searched, and the forms that strategies can have; None and none of any other,
    and where nothing fits."""
    options = settings.get("options") or PlanOptions()
    is_asked = options.remat == "search" or options.micro_batches not in (None, "as_written")
    if not (isinstance(fn, TrainStep) or is_asked):
        return None, ()
    try:
        made = _planned(fn, args, settings, mesh=settings.get("mesh"), pins=pins)
    except MemoryBudgetError:
        return None, ()
    if not isinstance(made, Plan):
        return None, ()
    if isinstance(fn, TrainStep) and made.choice is not None and options.remat != "as_written":
        return made, hand_written(fn, *args)
    return made, ()


def _planned(fn: Callable[..., Any], args: Sequence[Any], settings: Settings, **of_its_kind: Any) -> Plan | StagedPlan:
    """The plan of a step under the settings of a comparison, and what only a plan of its kind takes."""
    return plan_on_devices(
        fn,
        *args,
        cluster=settings.get("cluster"),
        donate_argnums=settings.get("donate_argnums"),
        memory_budget_bytes=settings.get("memory_budget_bytes"),
        options=settings.get("options"),
        **of_its_kind,
    )


def diff(a: BasePlan, b: BasePlan) -> PlanDiff | StagedDiff:
    """Compares two plans, of one program or of several, on one cluster or on two.

    Args:
      a, b: The plans, fresh or read from files; both of one program, or both in stages.

    Returns:
      What differs. `print` shows it; `.json()` is for programs. The difference of a plan with itself is empty.

    Raises:
      PlanMismatchError: One of them is in stages, the other is not.
    """
    return a.diff(b)
