"""A timeline as a table for a terminal: what each submesh does with its time and its memory."""

import math

from autoshard.pipelines.schedule.timeline import SubmeshSummary, Timeline
from autoshard.printing import TextConsole, amount, seconds, table

_MOST = 32


def timeline_text(timeline: Timeline) -> str:
    """One line for each submesh; of more than 32, only the first."""
    console = TextConsole()
    several = len({p.pipeline for p in timeline.submeshes}) > 1
    columns = [("pipeline", "right")] if several else []
    columns += [("submesh", "left"), ("busy", "right"), ("idle", "right"), ("peak memory", "right"), ("limit", "right")]
    made = table(f"Step of {seconds(timeline.step_s)}, {timeline.origin}", [*columns, ("in flight", "right")])
    for submesh in timeline.submeshes[:_MOST]:
        made.add_row(*([str(submesh.pipeline)] if several else []), *_cells(submesh))
    console.print(made)
    if len(timeline.submeshes) > _MOST:
        console.print(f"and {len(timeline.submeshes) - _MOST} more submeshes")
    return console.text


def _cells(submesh: SubmeshSummary) -> tuple[str, ...]:
    is_over = submesh.peak_bytes > submesh.limit_bytes
    return (
        submesh.name,
        seconds(submesh.busy_s),
        f"{submesh.bubble_share:.1%}",
        amount(submesh.peak_bytes) + (" (over)" if is_over else ""),
        amount(submesh.limit_bytes) if math.isfinite(submesh.limit_bytes) else "unknown",
        str(submesh.most_in_flight),
    )
