"""One program planned freely and under every strategy, as figures side by side."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from jax.sharding import PartitionSpec

from autoshard.comparison.comparison import UNTRIED, Comparison, Contender
from autoshard.comparison.ready_form import ReadyForm, by_kernels, in_best_form
from autoshard.comparison.told import told
from autoshard.errors import SolverError
from autoshard.interrupts import StopRequest, stop_on_signals
from autoshard.plans.gaps import excess, fits
from autoshard.plans.make import budget_of, homogeneous_slice, plan_program
from autoshard.plans.options import PlanOptions
from autoshard.plans.program_plan import ProgramPlan
from autoshard.strategies.hand_written import HandWritten
from autoshard.strategies.make import Settings, Subject, prepare_subject, suited, try_baseline
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
            contenders = [_own(subject, pins, limit, told(settings, NAME))]
        else:
            reason, form = excess(own.estimate, limit), "" if own.choice is None else str(own.choice)
            contenders = [Contender(NAME, own, fits(own.estimate, limit), reason, form)]
        ready = by_kernels(forms, fn, subject, limit, *args, **settings) or (ReadyForm("", subject),)
        for strategy in suited(subject) if strategies is None else strategies:
            contenders.append(_strategy(strategy, ready, limit, settings, stop))
    return Comparison(
        title or getattr(fn, "__name__", "the function"),
        subject.cluster.name,
        hardware.device_type.name,
        hardware.num_devices,
        None if math.isinf(limit) else limit,
        tuple(contenders),
    )


def _strategy(
    strategy: Strategy, forms: Sequence[ReadyForm], limit_bytes: float, settings: Settings, stop: StopRequest
) -> Contender:
    """A strategy's plan in the form that is fastest for it, or why there is none."""
    untried = Contender(strategy.name, None, False, UNTRIED)
    if stop.requested:
        return untried
    try:
        if len(forms) > 1 and (found := in_best_form(strategy, forms, limit_bytes, settings, stop)):
            return found
        if stop.requested:
            return untried
        leanest = forms[-1]
        outcome = try_baseline(strategy, leanest.subject, **told(settings, strategy.name))
    except KeyboardInterrupt:  # stopped before anything was found
        if stop.is_urgent:
            raise
        return untried
    return Contender(strategy.name, outcome.plan, outcome.fits, outcome.reason, leanest.recomputed)


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
