"""A plan in stages on a page: a lane for each place, its stages, and what crosses between them."""

import math
from typing import Any

from bokeh.models import BoxZoomTool, HoverTool
from bokeh.models.tickers import FixedTicker

from autoshard.pipelines.plan.equal_pipelines import crossing, equal_pipelines
from autoshard.pipelines.plan.pipeline_plan import PipelinePlan
from autoshard.pipelines.schedule.gantt import GanttChart, gantt_chart, meaning, short_name
from autoshard.printing import amount, seconds
from autoshard.report.figures import axis_range, plain_figure, source_of, unique_labels
from autoshard.report.parts import Figure, Paragraph, Part, Table
from autoshard.report.units import time_unit

_ROW_PIXELS, _WORK = 40, 0.58


def pipeline_parts(plan: PipelinePlan) -> tuple[Part, ...]:
    """The lanes, the submeshes, the stages and the transfers."""
    timeline = plan.timeline
    chart = gantt_chart(timeline)
    legend = tuple((meaning(colour), colour.value) for colour in chart.colours)
    caption = f"Step of {seconds(timeline.step_s)}, as simulated: a lane for each submesh"
    parts: list[Part] = [Figure("lanes", caption, _lanes(chart), legend)]
    parts += [Paragraph(note) for note in chart.notes if not note.startswith("Numbers")]  # none are written here
    if not chart.is_summed:
        paler = any(bar.fade for row in chart.rows for bar in row.work)
        told = " Paler tasks are those of later stages on the same submesh." if paler else ""
        parts.append(Paragraph(f"Move over a task to see which micro-batch and stage it is of.{told}"))
    rows = tuple(
        (
            str(s.pipeline),
            s.name,
            seconds(s.busy_s),
            f"{s.bubble_share:.1%}",
            amount(s.peak_bytes),
            amount(s.limit_bytes) if math.isfinite(s.limit_bytes) else "unknown",
            str(s.most_in_flight),
        )
        for s in timeline.submeshes
    )
    columns = ("pipeline", "submesh", "busy", "idle", "memory", "limit", "micro-batches in flight")
    parts.append(Table("Submeshes over the step", columns, rows, frozenset({2, 3, 4, 5, 6})))
    parts += _stages(plan)
    return tuple(parts)


def _lanes(chart: GanttChart) -> Any:
    unit = time_unit(chart.step_s)
    made = plain_figure(
        60 + _ROW_PIXELS * len(chart.rows),
        x_range=axis_range(0, chart.step_s / unit.size, bounds=(0, chart.step_s / unit.size)),
        y_range=axis_range(len(chart.rows), 0),
    )
    columns: dict[str, list] = {c: [] for c in ("left", "right", "top", "bottom", "colour", "tip")}
    for n, row in enumerate(chart.rows):
        below = (1 - _WORK - 0.1) / max(len(row.lanes), 1)
        strips = [(0.06, _WORK, row.work)]
        strips += [(0.06 + _WORK + k * below, below, lane) for k, lane in enumerate(row.lanes)]
        for top, height, bars in strips:
            for bar in bars:
                columns["left"].append(bar.start_s / unit.size)
                columns["right"].append(bar.stop_s / unit.size)
                columns["top"].append(n + top + height * (1 - bar.high))
                columns["bottom"].append(n + top + height * (1 - bar.low))
                columns["colour"].append(bar.fill)
                columns["tip"].append(bar.tip.replace("\n", ": ") or "a share of time")
    made.quad(
        left="left", right="right", top="top", bottom="bottom", fill_color="colour", line_color=None,
        source=source_of(columns),
    )  # fmt: skip
    made.add_tools(HoverTool(tooltips=[("", "@tip")]), BoxZoomTool(dimensions="width"))
    labels = unique_labels([short_name(row.submesh.name) for row in chart.rows], 16)
    made.yaxis.ticker = FixedTicker(ticks=[n + 0.5 for n in range(len(chart.rows))])
    made.yaxis.major_label_overrides = {n + 0.5: label for n, label in enumerate(labels)}
    made.ygrid.visible = False
    made.xaxis.axis_label = unit.name
    return made


def _stages(plan: PipelinePlan) -> list[Part]:
    """A table of stages for each kind of pipeline, and one of what crosses between them."""
    parts: list[Part] = []
    crossings = []
    for group in equal_pipelines(plan):
        pipeline, durations = plan.pipeline(group.first), plan.durations.pipelines[group.first]
        rows, splits = [], durations.schedule.splits_backward
        for s, part in enumerate(pipeline.stages):
            submesh = durations.schedule.submesh_of(s)
            times, layers = durations.stages[s], plan.layers.names[part.start : part.stop]
            rows.append(
                (
                    str(s),
                    layers[0] if len(layers) == 1 else f"{layers[0]} .. {layers[-1]} ({len(layers)})",
                    plan.meshes[group.first][submesh].name,
                    ", ".join(f"{a}={n}" for a, n in plan.meshes[group.first][submesh].axes),
                    seconds(times.forward_s),
                    *map(
                        seconds, (times.backward_s, times.weight_s) if splits else (times.backward_s + times.weight_s,)
                    ),
                    "yes" if part.rematerialise else "no",
                    str(plan.program_of[group.first][s]),
                )
            )
        timed = ("forward", "backward", "weights") if splits else ("forward", "backward")
        columns = ("stage", "layers", "submesh", "mesh", *timed, "computed again", "program")
        note = f"{pipeline.num_examples} examples as {pipeline.num_micro_batches} x {pipeline.micro_batch_size}, "
        note += f"{pipeline.schedule.value}; times are those of a micro-batch."
        numbers = frozenset(range(4, 4 + len(timed)))
        parts.append(Table(group.name, columns, tuple(rows), numbers, note=note))
        for transfer in durations.transfers:
            sent = crossing(plan.layers, pipeline, transfer.source, transfer.target)
            crossings.append(
                (
                    group.short_name,
                    f"{transfer.source} \N{RIGHTWARDS ARROW} {transfer.target}",
                    amount(sent.forward_bytes),
                    seconds(transfer.forward_s),
                    amount(sent.backward_bytes),
                    seconds(transfer.backward_s),
                    ", ".join(plan.layers.names[layer] for layer in sent.makers),
                )
            )
    if crossings:
        columns = ("pipeline", "stages", "sent", "in", "sent back", "in", "made by")
        parts.append(
            Table(
                "What crosses between stages, for each micro-batch", columns, tuple(crossings), frozenset({2, 3, 4, 5})
            )
        )
    return parts
