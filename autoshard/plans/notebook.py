"""A plan in a notebook: a few lines of HTML without scripts, in the colours of the notebook."""

import html
import math
from collections.abc import Sequence

from autoshard.plans.explain import explain, in_best_schedule, tensor_rows
from autoshard.plans.program_plan import ProgramPlan
from autoshard.printing import amount, seconds

_MOST_TENSORS = 10
_PART, _WAITED, _MEMORY = "#5b6b82", "#d55e00", "#0072b2"


def plan_html(plan: ProgramPlan) -> str:
    """What `plan._repr_html_()` shows: the figures, bars of time and memory, the largest tensors, the whole text."""
    e, c = plan.estimate, plan.certificate
    gap = f"{c.gap:.2%}" if math.isfinite(c.gap) else "unknown"
    limit = f" of {amount(plan.budget_bytes)} allowed" if plan.budget_bytes else ""
    hidden = f", {seconds(e.hidden_s)} hidden" if e.hidden_s else ""
    parts = f"{seconds(e.compute_s)} computing, {seconds(e.exposed_s)} waiting{hidden}"
    times = [(e.compute_s, _PART, "computing"), (e.exposed_s, _WAITED, "waiting for collectives")]
    most_bytes = plan.budget_bytes or e.peak_bytes
    figures = [
        ("step", f"{seconds(e.step_s)} predicted: {parts}", bar(times, e.step_s)),
        (
            "memory",
            f"{amount(e.peak_bytes)} per device at the peak{limit}",
            bar([(e.peak_bytes, _MEMORY, "at the peak")], most_bytes),
        ),
        ("traffic", f"{amount(e.comm_bytes)} sent per device", ""),
        ("proof", f"{c.status.value}{in_best_schedule(plan)}, gap {gap}", ""),
    ]
    tensors = tensor_rows(plan, _MOST_TENSORS)
    return framed(
        f"Plan {plan.name} for cluster {plan.cluster}: {plan.logical_mesh}",
        html_table((), figures, raw=2)
        + html_table(("path", "n", "shape", "layout", "its optimizer state"), tensors)
        + "".join(f"<div>warning: {html.escape(text)}</div>" for text in plan.warnings[:3]),
        explain(plan, full=True),
    )


def framed(title: str, body: str, text: str) -> str:
    """A title, what is below it, and the whole account to be unfolded."""
    return (
        f'<div style="max-width:70em"><strong>{html.escape(title)}</strong>{body}'
        f'<details><summary>everything</summary><pre style="overflow-x:auto">{html.escape(text)}</pre></details></div>'
    )


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]], raw: int | None = None) -> str:
    """Rows of text; those of column `raw` are HTML already."""
    cell = '<td style="text-align:left;vertical-align:middle">{}</td>'
    head = "".join(f'<th style="text-align:left">{html.escape(name)}</th>' for name in columns)
    body = "".join(
        "<tr>" + "".join(cell.format(text if n == raw else html.escape(text)) for n, text in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<table style="margin:0.5em 0">{f"<tr>{head}</tr>" if head else ""}{body}</table>'


def bar(parts: Sequence[tuple[float, str, str]], whole: float) -> str:
    """Coloured parts of a whole, 12 em wide: (how much, colour, what)."""
    pieces = "".join(
        f'<span title="{html.escape(what)}" style="display:inline-block;height:0.9em;background:{colour};'
        f'width:{12 * min(size / whole, 1.0) if whole else 0:.2f}em"></span>'
        for size, colour, what in parts
    )
    return f'<span style="display:inline-block;width:12em;background:#8883;line-height:0">{pieces}</span>'
