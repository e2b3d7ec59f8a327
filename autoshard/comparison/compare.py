"""`autoshard.compare`: one program planned freely and under every strategy, as figures side by side."""

import collections
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from jax.sharding import PartitionSpec

from autoshard.baselines import Settings, Strategy, prepare_subject, suited, try_baseline
from autoshard.baselines.make import Subject
from autoshard.errors import SolverError
from autoshard.interrupts import StopRequest, stop_on_signals
from autoshard.plans.gaps import excess
from autoshard.plans.make import budget_of, homogeneous_slice, plan_program
from autoshard.plans.options import PlanOptions, PlanProgress
from autoshard.plans.plan import Plan

NAME = "autoshard"
"""The name of the plan that is bound to no strategy."""


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """One way to split the program.

    Attributes:
      name: `autoshard`, or the strategy's name, such as `zero3+megatron`.
      plan: Its plan; where nothing keeps to the memory limit, the fastest plan without one. None if there is none.
      fits: Whether the plan keeps to the memory limit.
      reason: Why there is no plan, or why it does not fit; empty otherwise.
    """

    name: str
    plan: Plan | None
    fits: bool
    reason: str = ""

    @property
    def communication(self) -> dict[str, tuple[float, float]]:
        """By kind of collective: seconds a step, and bytes that each device sends."""
        sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        for item in self.plan.estimate.communication if self.plan else ():
            sums[item.kind][0] += item.time_s
            sums[item.kind][1] += item.wire_bytes
        return {kind: (s[0], s[1]) for kind, s in sorted(sums.items(), key=lambda row: -row[1][0])}

    @property
    def memory_bytes(self) -> dict[str, float]:
        """By class of tensor: bytes on each device at the peak."""
        sums: dict[str, float] = collections.defaultdict(float)
        for item in self.plan.estimate.memory if self.plan else ():
            sums[item.memory_class] += item.size_bytes
        return dict(sorted(sums.items(), key=lambda row: -row[1]))


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """A program's plan beside others.

    Attributes:
      title: What is compared.
      cluster: Name of the cluster. device: Name of its device type. num_devices: How many there are.
      limit_bytes: Memory that each device may use; None for no limit.
      contenders: autoshard's own plan first, then the strategies.
    """

    title: str
    cluster: str
    device: str
    num_devices: int
    limit_bytes: float | None
    contenders: tuple[Contender, ...]

    @property
    def own(self) -> Contender:
        """autoshard's own plan."""
        return self.contenders[0]

    @property
    def best_other(self) -> Contender | None:
        """The fastest strategy that fits; None if none does."""
        return min((c for c in self.contenders[1:] if c.fits), key=lambda c: c.plan.estimate.step_s, default=None)

    def relative_step(self, contender: Contender) -> float | None:
        """Step time of a contender as a multiple of that of autoshard's plan; None where one of them has no plan."""
        if self.own.plan is None or contender.plan is None or not self.own.plan.estimate.step_s:
            return None
        return contender.plan.estimate.step_s / self.own.plan.estimate.step_s

    def json(self) -> str:
        """All figures as JSON; null for what is not known. Times are seconds a step, bytes those of one device."""
        document = {
            "format": "autoshard-comparison",
            "version": 1,
            "title": self.title,
            "cluster": self.cluster,
            "device": self.device,
            "num_devices": self.num_devices,
            "limit_bytes": self.limit_bytes,
            "contenders": [self._figures(c) for c in self.contenders],
        }
        return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)

    def _figures(self, c: Contender) -> dict[str, Any]:
        figures: dict[str, Any] = {"name": c.name, "fits": c.fits, "reason": c.reason}
        if c.plan is None:
            return figures
        e, certificate = c.plan.estimate, c.plan.certificate
        finite = lambda value: value if math.isfinite(value) else None
        return figures | {
            "mesh": c.plan.mesh_axes,
            "step_s": e.step_s,
            "relative_step": self.relative_step(c),
            "compute_s": e.compute_s,
            "comm_s": e.comm_s,
            "comm_bytes": e.comm_bytes,
            "communication": {k: {"time_s": s, "wire_bytes": b} for k, (s, b) in c.communication.items()},
            "peak_bytes": e.peak_bytes,
            "memory_bytes": c.memory_bytes,
            "status": certificate.status.value,
            "gap": finite(certificate.gap),
            "bound_s": finite(certificate.bound),
        }

    def __str__(self) -> str:
        from autoshard.comparison.table import comparison_text  # the one upward step: the table is made of this

        return comparison_text(self)


def compare(
    fn: Callable[..., Any],
    *args: Any,
    strategies: Sequence[Strategy] | None = None,
    pins: Mapping[str, PartitionSpec] | None = None,
    title: str | None = None,
    **settings: Unpack[Settings],
) -> Comparison:
    """Plans `fn` freely and under every strategy, tracing it once.

    Args:
      fn: The function, such as a whole training step, that takes and returns its state.
      *args: Its positional arguments: pytrees of arrays or `jax.ShapeDtypeStruct`. Nothing is allocated.
      strategies: Which strategies; None for all of `autoshard.baselines.ALL` that apply to the function.
      pins: Shardings that autoshard's own plan must have, as for `autoshard.plan`.
      title: What is compared, for people; the function's name by default.
      **settings: See `autoshard.baselines.Settings`. Without `mesh`, autoshard searches its meshes, and each strategy
        has the meshes that suit it.

    The first Ctrl-C ends the search for the plan at hand with the best so far, and leaves out the strategies that
    follow; the second one ends it all.

    Returns:
      The comparison. A contender that exceeds the memory limit, or that cannot be written down, is in it all the same,
      with the reason.

    Raises:
      ClusterError, LayoutError, MeshError, PinError, TraceError: The inputs do not fit together.
    """
    options = settings.get("options") or PlanOptions()
    subject = prepare_subject(fn, *args, **settings)
    hardware = homogeneous_slice(subject.cluster)
    limit = budget_of(hardware.device_type, settings.get("memory_budget_bytes"), options)
    with stop_on_signals() as stop:
        contenders = [_own(subject, pins, limit, _told(settings, options, NAME))]
        for strategy in suited(subject) if strategies is None else strategies:
            contenders.append(_strategy(strategy, subject, _told(settings, options, strategy.name), stop))
    return Comparison(
        title or getattr(fn, "__name__", "the function"),
        subject.cluster.name,
        hardware.device_type.name,
        hardware.num_devices,
        None if math.isinf(limit) else limit,
        tuple(contenders),
    )


def _strategy(strategy: Strategy, subject: Subject, settings: Settings, stop: StopRequest) -> Contender:
    """A strategy's plan, or why there is none."""
    untried = Contender(strategy.name, None, False, "Not tried: stopped.")
    if stop.requested:
        return untried
    try:
        outcome = try_baseline(strategy, subject, **settings)
    except KeyboardInterrupt:  # stopped before anything was found
        if stop.is_urgent:
            raise
        return untried
    return Contender(strategy.name, outcome.plan, outcome.fits, outcome.reason)


def _own(
    subject: Subject, pins: Mapping[str, PartitionSpec] | None, limit_bytes: float, settings: Settings
) -> Contender:
    """autoshard's plan, or why there is none; without a plan under the limit, the fastest one that ignores it."""

    def planned(budget_bytes: float | None) -> Plan:
        mesh, options = settings.get("mesh"), settings["options"]
        return plan_program(
            subject.traced, subject.program, subject.cluster, mesh, subject.donated, budget_bytes, pins, options
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
