"""One program planned freely and under every strategy, as figures side by side."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from jax.sharding import PartitionSpec

from autoshard.comparison.comparison import Comparison, Contender
from autoshard.errors import AutoshardError, SolverError
from autoshard.interrupts import StopRequest, stop_on_signals
from autoshard.planner.mesh_prices import PricesOfMeshes
from autoshard.planner.program import most_stored_bytes
from autoshard.plans.form_bounds import least_kernels_s
from autoshard.plans.gaps import excess, fits
from autoshard.plans.logical_meshes import logical_meshes
from autoshard.plans.make import budget_of, homogeneous_slice, plan_program
from autoshard.plans.options import PlanOptions, PlanProgress
from autoshard.plans.program_plan import ProgramPlan
from autoshard.strategies.hand_written import HandWritten
from autoshard.strategies.make import Settings, Subject, plan_baseline, prepare_subject, suited, try_baseline
from autoshard.strategies.strategies import Strategy

NAME = "autoshard"
"""The name of the plan that is bound to no strategy."""


def compare_program(
    fn: Callable[..., Any],
    *args: Any,
    strategies: Sequence[Strategy] | None = None,
    pins: Mapping[str, PartitionSpec] | None = None,
    title: str | None = None,
    own: ProgramPlan | None = None,
    forms: Sequence[HandWritten] = (),
    **settings: Unpack[Settings],
) -> Comparison:
    """Plans `fn` freely and under every strategy, tracing it once; see `autoshard.compare` for the arguments.

    Args:
      own: The plan to compare the strategies with, if it is there already.
      forms: Those of `fn` of which each strategy has the best; none for `fn` alone.
    """
    options = settings.get("options") or PlanOptions()
    subject = prepare_subject(fn, *args, **settings)
    hardware = homogeneous_slice(subject.cluster)
    limit = budget_of(hardware.device_type, settings.get("memory_budget_bytes"), options)
    with stop_on_signals() as stop:
        if own is None:
            contenders = [_own(subject, pins, limit, _told(settings, options, NAME))]
        else:
            reason, form = excess(own.estimate, limit), "" if own.choice is None else str(own.choice)
            contenders = [Contender(NAME, own, fits(own.estimate, limit), reason, form)]
        shaped = _by_kernels(forms, limit, *args, **settings) or (_Shaped("", subject),)
        for strategy in suited(subject) if strategies is None else strategies:
            contenders.append(_strategy(strategy, shaped, limit, settings, options, stop))
    return Comparison(
        title or getattr(fn, "__name__", "the function"),
        subject.cluster.name,
        hardware.device_type.name,
        hardware.num_devices,
        None if math.isinf(limit) else limit,
        tuple(contenders),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Shaped:
    """A function in one of its forms, ready to be planned.

    Attributes:
      recomputed: What its layers compute again; empty where there is one form only.
      subject: What is planned.
      kernels_s: What its kernels take on one device, each as fast as a single mesh axis makes it, or the given mesh.
      least_bytes: What every device has to store, however it is split.
    """

    recomputed: str
    subject: Subject
    kernels_s: float = 0.0
    least_bytes: float = 0.0


def _by_kernels(
    forms: Sequence[HandWritten], limit_bytes: float, *args: Any, **settings: Unpack[Settings]
) -> tuple[_Shaped, ...]:
    """Each form, those first whose kernels take least, which mostly recompute least; of two alike, the first. Of those
    that store more than all devices hold, the last alone, and only if there is no other."""
    prices, options, by_s = PricesOfMeshes(), settings.get("options") or PlanOptions(), dict[float, _Shaped]()
    for form in forms:
        subject = prepare_subject(form.fn, *args, **settings)
        hardware = homogeneous_slice(subject.cluster)
        axes = settings.get("mesh") or {"data": hardware.num_devices}
        mesh = logical_meshes(subject.traced.graph, hardware, axes, None, options)[0]
        kernels_s = least_kernels_s(subject.program, prices.on(mesh), options)
        least_bytes = most_stored_bytes(subject.program, frozenset()) / hardware.num_devices
        by_s.setdefault(kernels_s, _Shaped(form.recomputed, subject, kernels_s, least_bytes))
    shaped = tuple(by_s[kernels_s] for kernels_s in sorted(by_s))
    return tuple(s for s in shaped if s.least_bytes <= limit_bytes) or shaped[-1:]


def _strategy(
    strategy: Strategy,
    forms: Sequence[_Shaped],
    limit_bytes: float,
    settings: Settings,
    options: PlanOptions,
    stop: StopRequest,
) -> Contender:
    """A strategy's plan in the form that is fastest for it, or why there is none."""
    untried = Contender(strategy.name, None, False, "Not tried: stopped.")
    if stop.requested:
        return untried
    try:
        if len(forms) > 1 and (found := _in_best_form(strategy, forms, limit_bytes, settings, options, stop)):
            return found
        if stop.requested:
            return untried
        leanest = forms[-1]
        outcome = try_baseline(strategy, leanest.subject, **_told(settings, options, strategy.name))
    except KeyboardInterrupt:  # stopped before anything was found
        if stop.is_urgent:
            raise
        return untried
    return Contender(strategy.name, outcome.plan, outcome.fits, outcome.reason, leanest.recomputed)


def _in_best_form(
    strategy: Strategy,
    forms: Sequence[_Shaped],
    limit_bytes: float,
    settings: Settings,
    options: PlanOptions,
    stop: StopRequest,
) -> Contender | None:
    """The fastest plan of a strategy that fits in any form; None where none does. A form is passed over whose kernels
    alone take as long as the best plan so far."""
    options, best, cost_s = dataclasses.replace(options, least_memory_s=0.0), None, math.inf
    for form in forms:
        if stop.requested or form.kernels_s >= cost_s:
            break
        told = _told(settings, options, f"{strategy.name}, {form.recomputed} recomputed")
        try:
            plan = plan_baseline(strategy, form.subject, to_beat_s=cost_s, **told)
        except AutoshardError:  # what does not fit in any form is told of the last
            continue
        if fits(plan.estimate, limit_bytes) and (best is None or plan.estimate.step_s < best.step_s):
            best = Contender(strategy.name, plan, True, form=form.recomputed)
            cost_s = min(cost_s, plan.certificate.objective)
    return best


def _own(
    subject: Subject, pins: Mapping[str, PartitionSpec] | None, limit_bytes: float, settings: Settings
) -> Contender:
    """autoshard's plan, or why there is none; without a plan under the limit, the fastest one that ignores it."""

    def planned(budget_bytes: float | None) -> ProgramPlan:
        return plan_program(
            subject.traced,
            subject.program,
            subject.cluster,
            mesh=settings.get("mesh"),
            donate_argnums=subject.donated,
            memory_budget_bytes=budget_bytes,
            pins=pins,
            options=settings.get("options"),
        )

    try:
        plan = planned(settings.get("memory_budget_bytes"))
    except SolverError as error:
        reason = str(error)
    else:
        reason = excess(plan.estimate, limit_bytes)
        return Contender(NAME, plan, not reason, reason)
    try:
        return Contender(NAME, planned(math.inf), False, reason)
    except SolverError:
        return Contender(NAME, None, False, reason)


def _told(settings: Settings, options: PlanOptions, name: str) -> Settings:
    """`settings` under which progress also names the contender."""
    tell = options.on_progress
    if tell is None:
        return {**settings, "options": options}

    def named(progress: PlanProgress) -> None:
        tell(dataclasses.replace(progress, stage=f"{name}, {progress.stage}"))

    return {**settings, "options": dataclasses.replace(options, on_progress=named)}
