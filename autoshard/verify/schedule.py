"""The schedule of a compiled step beside the plan's: its time, and which of its collectives are exposed."""

import collections
import dataclasses
import math
from collections.abc import Sequence

from autoshard.compiler.candidates import Candidate
from autoshard.execution.candidates import Choosing
from autoshard.hlo.beside_products import beside_products
from autoshard.hlo.collectives import compiled_collectives
from autoshard.hlo.compiled_schedule import ScheduledCollective, replay
from autoshard.hlo.module import HloModule
from autoshard.planner.estimate import Estimate
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.text import pattern
from autoshard.verify.compile import CompiledStep
from autoshard.verify.figures import BesideProducts, FlowTimes, ScheduledFlow, ScheduleFigures, StepTimes
from autoshard.verify.gpus import GpuTarget
from autoshard.verify.strays import Origins
from autoshard.verify.targets import CpuTarget, Target
from autoshard.verify.tpus import TpuTarget


def schedule_figures(
    plan: ProgramPlan,
    target: Target,
    module: HloModule,
    compiled: CompiledStep,
    origins: Origins,
) -> ScheduleFigures:
    """What the compiled schedule of a plan comes to.

    Args:
      plan: The plan. target: What it was compiled for.
      module, compiled: The compiled program, as read and as the compiler returned it. origins: What its equations are.
    """
    names, found = beside_products(module, plan.axes), compiled_collectives(module, plan.axes)
    kinds = collections.Counter(c.kind for c in found)
    beside = collections.Counter(c.kind for c in found if c.name in names)
    figures = ScheduleFigures(
        predicted=_predicted(plan.estimate),
        compiled=None,
        not_replayed=_not_replayed(plan, target),
        flow_times=(),
        flows=(),
        beside_products=tuple(BesideProducts(kind, n, beside[kind]) for kind, n in kinds.most_common()),
        candidates=compiled.candidates,
        chosen=compiled.chosen,
    )
    if figures.not_replayed:
        return figures
    step = replay(module, plan.logical_mesh, target.clock_ghz if isinstance(target, TpuTarget) else None)
    flows = _flows(step.collectives, origins)
    exposed_s = math.fsum(f.exposed_s for f in flows)
    times = StepTimes(step.step_s, step.kernel_s, step.collective_s, exposed_s, step.host_s)
    return dataclasses.replace(figures, compiled=times, flow_times=_flow_times(plan, flows), flows=flows)


def choosing_for(plan: ProgramPlan, target: Target, candidates: tuple[Candidate, ...] | None) -> Choosing | None:
    """By what the way to schedule a plan's program for `target` is chosen; None where there is one only.

    Programs in other orders than those that bound the memory are left out: what the plan predicts of memory is not
    about them, and `Plan.jit` takes them only if they fit.

    `candidates`: The ways to try; None for the plan's own.
    """
    choosing = plan.interface.choosing
    if not isinstance(target, GpuTarget) or _not_replayed(plan, target) or not choosing.others:
        return None
    tried = choosing.others if candidates is None else candidates
    return dataclasses.replace(choosing, others=tuple(c for c in tried if c.is_bounded))


def _predicted(estimate: Estimate) -> StepTimes:
    host_s = estimate.host_exposed_s
    own = sum(c.time_s for c in estimate.collectives), estimate.exposed_s - host_s
    return StepTimes(estimate.step_s, estimate.compute_s, *own, host_s)


def _not_replayed(plan: ProgramPlan, target: Target) -> str:
    """Why a schedule cannot be replayed by the plan's figures; empty if it can."""
    if isinstance(target, CpuTarget):
        return "XLA:CPU runs collectives in turn with kernels"
    if isinstance(target, TpuTarget) and target.clock_ghz is None:
        return "of its kernels XLA:TPU tells only the cycles that it expects, and nothing tells how long one is"
    if target.name != plan.device:
        return f"the plan has the rates and links of {plan.device}, not of {target.name}"
    return ""


def _flow_times(plan: ProgramPlan, flows: Sequence[ScheduledFlow]) -> tuple[FlowTimes, ...]:
    """Both sides by kind and axes."""
    order = [name for name, _ in plan.axes]
    sums: dict[tuple[str, tuple[str, ...]], list[float]] = collections.defaultdict(lambda: [0.0] * 4)
    for side, rows in ((0, plan.estimate.collectives), (2, flows)):
        for one in rows:
            row = sums[one.kind, tuple(sorted(one.axes, key=order.index))]
            row[side] += one.time_s
            row[side + 1] += one.exposed_s
    found = [FlowTimes(*key, *row) for key, row in sums.items()]
    return tuple(sorted(found, key=lambda f: -max(f.predicted_exposed_s, f.compiled_exposed_s)))


def _flows(scheduled: Sequence[ScheduledCollective], origins: Origins) -> tuple[ScheduledFlow, ...]:
    """By kind, axes, tensor and line. A collective that the compiler joined is told by the largest of its pieces."""
    sums: dict[tuple[str, tuple[str, ...], str, str], list[float]] = collections.defaultdict(lambda: [0.0] * 3)
    for one in scheduled:
        collective = one.collective
        largest = max(collective.pieces, key=lambda p: p.wire_bytes)
        more = f" and {len(collective.pieces) - 1} more" if len(collective.pieces) > 1 else ""
        tensor = pattern(origins.name(largest)) + more
        row = sums[collective.kind, collective.axes, tensor, origins.source(largest.equations)]
        for k, x in enumerate((collective.times, one.time_s, one.exposed_s)):
            row[k] += x
    flows = [ScheduledFlow(*key, *row) for key, row in sums.items()]
    return tuple(sorted(flows, key=lambda f: (-f.exposed_s, -f.time_s)))
