"""A plan with tables in host memory on a page: tables and their places, memory of each level, batches over time."""

import math
from typing import Any

from bokeh.models import BoxZoomTool, HoverTool
from bokeh.models.tickers import FixedTicker

from autoshard.offloading.hosted_plan import HostTablesPlan
from autoshard.offloading.pace import Span, pace
from autoshard.offloading.search import STAGE_NAMES
from autoshard.printing import amount, seconds
from autoshard.report.colours import OTHERS, SERIES
from autoshard.report.figures import axis_range, byte_bars, plain_figure, source_of
from autoshard.report.overview import warning_parts
from autoshard.report.parts import Figure, Figures, Paragraph, Part, Table
from autoshard.report.units import time_unit

_MOST_BARS = 24
_STEADY, _SHOWN = 12, 8
"""Batches until the pipeline runs evenly, and those that are drawn."""
_ROW_PIXELS = 34
_ON_HOSTS, _ON_DEVICES, _UNDER_WAY = SERIES[0], SERIES[1], SERIES[4]


def hosted_overview_parts(plan: HostTablesPlan) -> tuple[Part, ...]:
    """Its first figures."""
    own, placed, s = plan.predicted, plan.placed, plan.placed.situation
    if plan.on_devices_s is None:
        beside = ""
    elif math.isinf(plan.on_devices_s):
        beside = "all tables on the devices: does not fit"
    else:
        beside = f"all tables on the devices: {seconds(plan.on_devices_s)}"
    cards = (
        ("step, predicted", seconds(own.step_s), beside),
        ("throughput", f"{s.batch_size / own.step_s:,.0f}", f"examples a second; busiest: the {own.stages.busiest}"),
        ("tables in host memory", f"{len(plan.tables)} of {len(s.tables)}", plan.execution.outline),
        ("memory of an accelerator", amount(own.device_bytes), f"of {amount(s.budget_bytes)} allowed"),
        ("memory of a host", amount(own.host_bytes), f"of {amount(s.host_budget_bytes)} allowed"),
        ("workers of a host", str(own.num_workers), f"{s.most_workers} CPUs could serve"),
    )
    proof = f"By the prices of the search, no placement is more than {placed.gap:.2%} better."
    return (
        Figures(cards),
        Paragraph(f"{plan.update[:1].upper()}{plan.update[1:]}. {proof}"),
        *warning_parts(plan.warnings),
    )


def table_parts(plan: HostTablesPlan) -> tuple[Part, ...]:
    """Where tables live, and what fills the memory of an accelerator and of a host."""
    placed = plan.placed.tables
    kinds = {"in host memory": _ON_HOSTS, "on accelerators": _ON_DEVICES}
    kind_of = lambda one: "in host memory" if one.choice.place.is_on_host else "on accelerators"
    shown = placed[:_MOST_BARS]
    model, legend = byte_bars(
        [one.use.path for one in shown], [{kind_of(one): one.use.size_bytes} for one in shown], kinds
    )
    columns = ("table", "rows", "size", "ids a step", "lives in", "elsewhere")
    rows = tuple(
        (t.use.path, f"{t.use.num_rows:,}", amount(t.use.size_bytes), f"{t.use.num_ids:,}", t.place, t.elsewhere)
        for t in placed
    )
    in_host = frozenset(n for n, one in enumerate(placed) if one.choice.place.is_on_host)
    note = "Sizes are those of rows and of what the optimizer keeps for them; marked rows live in host memory."
    return (
        Figure("tables", "Size of each table with the optimizer's state, by where it lives", model, legend),
        Table("Tables, the largest first", columns, rows, frozenset({1, 2, 3}), in_host, note),
        *_memory(plan),
    )


def _memory(plan: HostTablesPlan) -> tuple[Part, ...]:
    own, s = plan.predicted, plan.placed.situation
    slots = plan.execution.num_slots
    under_way = f"rows of {slots} batches" if slots > 1 else "rows of a batch"
    device = {
        "tables": sum(c.device_bytes for c in own.choices),
        under_way: slots * sum(c.in_flight_bytes for c in own.choices),
        "all else": s.dense.memory_bytes,
    }
    host = {
        "tables": sum(c.host_bytes for c in own.choices),
        under_way: slots * sum(c.host_in_flight_bytes for c in own.choices),
    }
    colours = {"tables": _ON_HOSTS, under_way: _UNDER_WAY, "all else": OTHERS}
    parts: list[Part] = []
    for name, caption, of, limit in (
        ("device-memory", "Memory of an accelerator", device, s.budget_bytes),
        ("host-memory", "Memory of a host", host, s.host_budget_bytes),
    ):
        model, legend = byte_bars([caption.rpartition(" ")[2]], [of], colours, limit)
        parts.append(
            Figure(name, f"{caption}, as placed: {amount(sum(of.values()))} of {amount(limit)}", model, legend)
        )
    return tuple(parts)


def pace_parts(plan: HostTablesPlan) -> tuple[Part, ...]:
    """Batches over time, the stages, and the other modes and ways."""
    own, placed = plan.predicted, plan.placed
    spans = [span for span in pace(plan.execution, own.stages, _STEADY + _SHOWN) if span.batch >= _STEADY]
    busy = tuple(
        (name, seconds(takes_s), f"{takes_s / own.step_s:.0%}")
        for name, takes_s in zip(STAGE_NAMES, own.stages.all_s, strict=True)
    )
    longest = max(range(len(busy)), key=lambda n: own.stages.all_s[n])
    modes = tuple(
        (one.execution.outline, seconds(one.step_s), one.stages.busiest, str(one.execution.staleness))
        for one in placed.found.considered
    )
    chosen = frozenset(n for n, one in enumerate(placed.found.considered) if one.execution == own.execution)
    ways = tuple((w.name, seconds(w.step_s) if not w.why_not else "does not fit", w.why_not) for w in placed.compared)
    caption = f"{_SHOWN} batches one after another, {plan.execution.outline}: one leaves every {seconds(own.step_s)}"
    told = (
        "Look-ups and write-backs share the host's CPUs and are drawn as one stage. Move over a bar to see whose batch "
        "it is."
    )
    return (
        Figure("pace", caption, _lanes(spans)),
        Paragraph(told),
        Table("Stages of a step", ("stage", "time", "of the step"), busy, frozenset({1, 2}), frozenset({longest})),
        Table("The best of every mode", ("mode", "step", "busiest", "stale"), modes, frozenset({1, 3}), chosen),
        Table("Compared", ("way", "step", "why not"), ways, frozenset({1})),
    )


def _lanes(spans: list[Span]) -> Any:
    """A lane for each stage that takes any time, a colour for each batch."""
    lanes = sorted({span.stage for span in spans if span.stop_s > span.start_s})
    begin_s, end_s = min(s.start_s for s in spans), max(s.stop_s for s in spans)
    unit = time_unit(end_s - begin_s)
    made = plain_figure(
        60 + _ROW_PIXELS * len(lanes),
        x_range=axis_range(0, (end_s - begin_s) / unit.size, bounds=(0, (end_s - begin_s) / unit.size)),
        y_range=axis_range(len(lanes), 0),
    )
    columns: dict[str, list] = {c: [] for c in ("left", "right", "top", "bottom", "colour", "tip")}
    for span in spans:
        if span.stage not in lanes:
            continue
        lane = lanes.index(span.stage)
        columns["left"].append((span.start_s - begin_s) / unit.size)
        columns["right"].append((span.stop_s - begin_s) / unit.size)
        columns["top"].append(lane + 0.12)
        columns["bottom"].append(lane + 0.88)
        columns["colour"].append(SERIES[span.batch % len(SERIES)])
        columns["tip"].append(f"{STAGE_NAMES[span.stage]}, batch {span.batch}: {seconds(span.stop_s - span.start_s)}")
    made.quad(
        left="left", right="right", top="top", bottom="bottom", fill_color="colour", line_color=None,
        source=source_of(columns),
    )  # fmt: skip
    made.add_tools(HoverTool(tooltips=[("", "@tip")]), BoxZoomTool(dimensions="width"))
    made.yaxis.ticker = FixedTicker(ticks=[n + 0.5 for n in range(len(lanes))])
    made.yaxis.major_label_overrides = {n + 0.5: STAGE_NAMES[lane] for n, lane in enumerate(lanes)}
    made.ygrid.visible = False
    made.xaxis.axis_label = unit.name
    return made
