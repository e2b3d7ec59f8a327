"""The first figures of a plan, of either kind, and its warnings."""

import math

from autoshard.pipelines.plan.pipeline_plan import PipelinePlan
from autoshard.plans.explain import in_best_schedule
from autoshard.plans.program_plan import ProgramPlan
from autoshard.printing import amount, seconds
from autoshard.report.parts import Figures, Paragraph, Part


def overview_parts(plan: ProgramPlan) -> tuple[Part, ...]:
    """Of a plan of one program."""
    e, c = plan.estimate, plan.certificate
    limit = f"of {amount(plan.budget_bytes)} allowed" if plan.budget_bytes is not None else "without a limit"
    waits = f"{seconds(e.exposed_s)} waiting" + (f", {seconds(e.hidden_s)} hidden" if e.hidden_s else "")
    gap = f"{c.gap:.2%}" if math.isfinite(c.gap) else "unknown"
    bound = f"no plan below {seconds(max(c.bound, 0.0))}{in_best_schedule(plan)}" if math.isfinite(c.bound) else ""
    cards = (
        ("step, predicted", seconds(e.step_s), f"{seconds(e.compute_s)} computing + {waits}"),
        ("memory at the peak", amount(e.peak_bytes), limit),
        ("sent by each device", amount(e.comm_bytes), f"{amount(e.flops, 'FLOP')} computed"),
        ("gap to the optimum", gap, bound),
        ("mesh", ", ".join(f"{a}={n}" for a, n in plan.axes), f"{plan.num_devices} x {plan.device}"),
    )
    peak = f"The peak of memory is at {e.peak_at}. " if e.peak_at else ""
    return Figures(cards), Paragraph(f"{peak}Figures of the hardware: {plan.figures}."), *warning_parts(plan.warnings)


def staged_overview_parts(plan: PipelinePlan) -> tuple[Part, ...]:
    """Of a plan in stages."""
    timeline, c = plan.timeline, plan.certificate
    idle = sum(s.bubble_share for s in timeline.submeshes) / len(timeline.submeshes)
    fullest = timeline.fullest
    limit = f"of {amount(fullest.limit_bytes)}" if math.isfinite(fullest.limit_bytes) else "limit unknown"
    gap = f"{c.gap:.1%}" if c.bound_s and math.isfinite(c.gap) else "unknown"
    cards = (
        ("step, predicted", seconds(timeline.step_s), f"{plan.batch_size} examples"),
        ("idle", f"{idle:.1%}", f"on average of {len(timeline.submeshes)} submeshes"),
        ("memory where it is fullest", amount(fullest.peak_bytes), f"{limit}, on {fullest.name}"),
        ("gap of the search", gap, f"no arrangement below {seconds(c.bound_s)}" if c.bound_s else ""),
        (
            "pipelines",
            str(len(plan.arrangement.pipelines)),
            ", ".join(f"{s.num_devices} x {s.device}" for s in plan.slices),
        ),
    )
    return Figures(cards), *warning_parts(plan.warnings)


def warning_parts(warnings: tuple[str, ...]) -> tuple[Part, ...]:
    """What the reader should act on."""
    return tuple(Paragraph(text, is_warning=True) for text in warnings)
