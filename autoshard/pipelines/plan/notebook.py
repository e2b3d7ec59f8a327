"""A plan in stages in a notebook: a few lines of HTML without scripts."""

import math

from autoshard.pipelines.plan.equal_pipelines import equal_pipelines
from autoshard.pipelines.plan.explain import explain
from autoshard.pipelines.plan.pipeline_plan import PipelinePlan
from autoshard.plans.notebook import bar, framed, html_table
from autoshard.printing import amount, counted, seconds

_BUSY = "#009e73"
_MOST_SUBMESHES = 16


def staged_plan_html(plan: PipelinePlan) -> str:
    """What `plan._repr_html_()` shows: the step, its pipelines, and how busy and full each submesh is."""
    timeline, groups = plan.timeline, equal_pipelines(plan)
    devices = ", ".join(f"{s.num_devices} x {s.device}" for s in plan.slices)
    pipelines = [
        (
            group.name,
            f"{own.num_examples} examples as {own.num_micro_batches} x {own.micro_batch_size}",
            f"{counted(len(own.stages), 'stage')}, {own.schedule.value}",
        )
        for group, own in ((group, plan.pipeline(group.first)) for group in groups)
    ]
    submeshes = [
        (
            s.name,
            f"{seconds(s.busy_s)} busy, {s.bubble_share:.0%} idle",
            bar([(s.busy_s, _BUSY, "busy")], timeline.step_s),
            amount(s.peak_bytes) + (f" of {amount(s.limit_bytes)}" if math.isfinite(s.limit_bytes) else ""),
        )
        for s in timeline.submeshes[:_MOST_SUBMESHES]
    ]
    left = len(timeline.submeshes) - len(submeshes)
    return framed(
        f"Plan in stages for cluster {plan.cluster}: {devices}; step {seconds(timeline.step_s)} predicted",
        html_table((), pipelines)
        + html_table(("submesh", "step", "", "memory"), submeshes, raw=2)
        + (f"<div>and {left} more submeshes</div>" if left else ""),
        explain(plan, full=True),
    )
