"""The forms of a step that strategies written by hand can have, and the one that is the fastest for a strategy."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from autoshard.comparison.comparison import Contender
from autoshard.comparison.told import told
from autoshard.errors import AutoshardError
from autoshard.interrupts import StopRequest
from autoshard.planner.mesh_prices import PricesOfMeshes
from autoshard.planner.program import most_stored_bytes
from autoshard.plans.form_bounds import least_kernels_s
from autoshard.plans.gaps import fits
from autoshard.plans.host_memory import is_offloading
from autoshard.plans.logical_meshes import logical_meshes
from autoshard.plans.make import homogeneous_slice
from autoshard.plans.options import PlanOptions
from autoshard.plans.question import report
from autoshard.strategies.hand_written import HandWritten, in_form
from autoshard.strategies.make import Settings, Subject, plan_baseline, prepare_subject
from autoshard.strategies.strategies import Strategy


@dataclasses.dataclass(frozen=True, slots=True)
class ReadyForm:
    """A function in one of its forms, ready to be planned.

    Attributes:
      recomputed: What its layers compute again; empty where there is one form only.
      subject: What is planned.
      kernels_s: What its kernels take on one device, each as fast as a single mesh axis makes it, or the given mesh.
      least_bytes: What every device has to store, however it is split; 0.0 where some may lie in the host's memory.
    """

    recomputed: str
    subject: Subject
    kernels_s: float = 0.0
    least_bytes: float = 0.0


def by_kernels(
    forms: Sequence[HandWritten],
    fn: Callable[..., Any],
    subject: Subject,
    limit_bytes: float,
    *args: Any,
    **settings: Unpack[Settings],
) -> tuple[ReadyForm, ...]:
    """Each form, those first whose kernels take least, which mostly recompute least; of two alike, the first. Of those
    that store more than all devices hold, the last alone, and only if there is no other.

    Args:
      forms: The forms. fn, subject: What is compared, and what was read from it, which need not be read again.
      limit_bytes: Memory that each device may use. *args, **settings: As for `prepare_subject`.
    """
    prices, options, by_s = PricesOfMeshes(), settings.get("options") or PlanOptions(), dict[float, ReadyForm]()
    started = time.perf_counter()
    for form in forms:
        report(options, started, "forms", in_form("strategies", form.recomputed))
        own = subject if form.fn is fn else prepare_subject(form.fn, *args, **settings)
        hardware = homogeneous_slice(own.cluster)
        axes = settings.get("mesh") or {"data": hardware.num_devices}
        mesh = logical_meshes(own.traced.graph, hardware, axes, None, options)[0]
        kernels_s = least_kernels_s(own.program, prices.on(mesh), options)
        stored_bytes = 0.0 if is_offloading(options) else most_stored_bytes(own.program, frozenset())
        least_bytes = stored_bytes / hardware.num_devices
        by_s.setdefault(kernels_s, ReadyForm(form.recomputed, own, kernels_s, least_bytes))
    ready = tuple(by_s[kernels_s] for kernels_s in sorted(by_s))
    return tuple(r for r in ready if r.least_bytes <= limit_bytes) or ready[-1:]


def in_best_form(
    strategy: Strategy, forms: Sequence[ReadyForm], limit_bytes: float, settings: Settings, stop: StopRequest
) -> Contender | None:
    """The fastest plan of a strategy that fits in any form; None where none does. A form is passed over whose kernels
    alone take as long as the best plan so far."""
    options = dataclasses.replace(settings.get("options") or PlanOptions(), least_memory_s=0.0)
    lean: Settings = {**settings, "options": options}
    best, cost_s = None, math.inf
    for form in forms:
        if stop.requested or form.kernels_s >= cost_s:
            break
        own = told(lean, in_form(strategy.name, form.recomputed))
        try:
            plan = plan_baseline(strategy, form.subject, to_beat_s=cost_s, **own)
        except AutoshardError:  # what does not fit in any form is told of the last
            continue
        if fits(plan.estimate, limit_bytes) and (best is None or plan.estimate.step_s < best.step_s):
            best = Contender(strategy.name, plan, True, form=form.recomputed)
            cost_s = min(cost_s, plan.certificate.objective)
    return best
