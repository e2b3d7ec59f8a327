"""A run on a page: loss, throughput, where its time went, and what happened."""

import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from bokeh.models import BoxZoomTool, DataRange1d, FactorRange, HoverTool

from autoshard.launch.events import Event, PhaseStarted, StepCommitted, WorkerLost, read_events
from autoshard.launch.goodput import Activity, Goodput, goodput
from autoshard.launch.metrics_reader import StepMetrics, read_metrics
from autoshard.launch.picture import ACTIVITY_COLOURS, heading
from autoshard.launch.report import event_words
from autoshard.printing import amount, duration, seconds
from autoshard.report.colours import LIMIT, SERIES
from autoshard.report.figures import axis_range, plain_figure, source_of, time_bars
from autoshard.report.parts import Figure, Figures, Paragraph, Part, Section, Table
from autoshard.report.units import time_unit

_MOST_EVENTS, _MOST_POINTS = 400, 4000


@dataclasses.dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run's folder tells: its name, the reports of training steps, and the log of `autoshard launch`, if any."""

    name: str
    metrics: tuple[StepMetrics, ...]
    events: tuple[Event, ...]


def read_run(folder: pathlib.Path) -> RunRecord:
    """Reads a run's folder."""
    return RunRecord(folder.resolve().name, read_metrics(folder), tuple(read_events(folder)))


def run_sections(run: RunRecord) -> tuple[Section, ...]:
    """The sections of a run."""
    sections = []
    if run.metrics:
        sections.append(
            Section(
                "training",
                "Training",
                "Loss and throughput as the run reported them, by step.",
                (_cards(run.metrics), *_curves(run.metrics)),
            )
        )
    if run.events:
        measured = goodput(run.events)
        lead = "Goodput is the share of time that went into steps that count; colours say what took the rest."
        sections.append(Section("goodput", "Where the time went", lead, _goodput(run.events, measured)))
        sections.append(Section("events", "Events", "What the supervisor wrote down.", _events(run.events)))
    return tuple(sections)


def _cards(metrics: Sequence[StepMetrics]) -> Figures:
    last = metrics[-1]
    steady = [m for m in metrics if not m.compiled and m.step_time_s]
    cards = [("steps reported up to", f"{last.step:,}", "")]
    if last.loss is not None:
        cards.append(("last loss", f"{last.loss:.4g}", f"first {metrics[0].loss:.4g}" if metrics[0].loss else ""))
    if steady:
        middle = sorted(m.step_time_s or 0.0 for m in steady)[len(steady) // 2]
        cards.append(("time of a step", seconds(middle), "median, without those that compiled"))
    rates = sorted(m.items_per_s for m in steady if m.items_per_s)
    if rates:
        cards.append((f"{last.item} a second", amount(rates[len(rates) // 2], "").strip(), "median, of all devices"))
    return Figures(tuple(cards))


def _curves(metrics: Sequence[StepMetrics]) -> tuple[Figure, ...]:
    stride = -(-len(metrics) // _MOST_POINTS)
    shown = metrics[::stride]
    found = []
    finite = [m for m in shown if m.loss is not None]
    if finite:
        found.append(Figure("loss", "Loss by step", *_line(finite, [m.loss for m in finite], "loss")))
    timed = [m for m in shown if m.items_per_s is not None and not m.compiled]
    if timed:
        item = timed[-1].item
        label = f"{item} a second"
        found.append(
            Figure(
                "throughput",
                f"Throughput by step: {label}, of all devices",
                *_line(timed, [m.items_per_s for m in timed], label, from_zero=True),
            )
        )
    return tuple(found)


def _line(
    metrics: Sequence[StepMetrics], values: Sequence[Any], label: str, from_zero: bool = False
) -> tuple[Any, tuple[tuple[str, str], ...]]:
    """Values over steps, in a colour for each generation; and the legend."""
    made = plain_figure(260, x_range=DataRange1d(bounds="auto"))
    generations = sorted({m.generation for m in metrics})
    legend = []
    for place, generation in enumerate(generations):
        colour = SERIES[place % len(SERIES)]
        own = [(m.step, v) for m, v in zip(metrics, values, strict=True) if m.generation == generation]
        source = source_of({"step": [s for s, _ in own], "value": [v for _, v in own]})
        made.line(x="step", y="value", line_color=colour, line_width=2, source=source)
        made.scatter(x="step", y="value", color=colour, size=4 if len(own) < 200 else 0, source=source)
        if len(generations) > 1 and place < len(SERIES):
            legend.append((f"generation {generation}", colour))
    made.add_tools(
        HoverTool(tooltips=[("step", "@step"), (label, "@value")], mode="vline"), BoxZoomTool(dimensions="width")
    )
    made.xaxis.axis_label, made.yaxis.axis_label = "step", label
    if from_zero:
        made.y_range.start = 0
    return made, tuple(legend)


def _goodput(events: Sequence[Event], measured: Goodput) -> tuple[Part, ...]:
    if not measured.spans:
        return (Paragraph("Nothing was measured yet."),)
    begin_s, end_s = measured.spans[0].start_s, measured.spans[-1].end_s
    unit = time_unit(end_s - begin_s)
    first = min((s.generation for s in measured.spans if s.generation), default=0)
    row = lambda generation: f"{generation or first}"  # what comes before the first one belongs to it
    names = list(dict.fromkeys(row(s.generation) for s in measured.spans))
    made = plain_figure(
        70 + min(26 * max(len(names), 2), 600),
        x_range=axis_range(0, (end_s - begin_s) / unit.size, bounds="auto"),
        y_range=FactorRange(factors=names[::-1]),
    )
    columns: dict[str, list] = {"y": [], "left": [], "right": [], "colour": [], "tip": []}
    for span in measured.spans:
        columns["y"].append(row(span.generation))
        columns["left"].append((span.start_s - begin_s) / unit.size)
        columns["right"].append((span.end_s - begin_s) / unit.size)
        columns["colour"].append(ACTIVITY_COLOURS[span.activity])
        columns["tip"].append(f"{span.activity.value}, {duration(span.end_s - span.start_s)}")
    bars = made.hbar(
        y="y", left="left", right="right", height=0.8, fill_color="colour", line_color=None,
        source=source_of(columns),
    )  # fmt: skip
    lost = [e for e in events if isinstance(e, WorkerLost) and row(e.generation) in names]
    made.scatter(
        [(e.time - begin_s) / unit.size for e in lost],
        [row(e.generation) for e in lost],
        marker="x", size=12, line_width=3, color=LIMIT,
    )  # fmt: skip
    made.add_tools(HoverTool(renderers=[bars], tooltips=[("", "@tip")]), BoxZoomTool(dimensions="width"))
    made.xaxis.axis_label, made.yaxis.axis_label = unit.name, "generation"
    legend = [(a.value, ACTIVITY_COLOURS[a]) for a in Activity if measured.seconds(a)]
    if lost:
        legend.append(("worker lost", LIMIT))
    spent = {a: measured.seconds(a) for a in Activity if measured.seconds(a)}
    whole, _ = time_bars(
        ["whole run"], [{a.value: s for a, s in spent.items()}], {a.value: c for a, c in ACTIVITY_COLOURS.items()}
    )
    rows = tuple(
        (a.value, duration(s), f"{s / measured.total_s:.1%}") for a, s in sorted(spent.items(), key=lambda p: -p[1])
    )
    return (
        Paragraph(heading(measured) + "."),
        Figure("generations", "What each generation did over time", made, tuple(legend)),
        Figure("spent", "Where the time of the whole run went", whole, ()),
        Table(
            "Time by activity",
            ("activity", "time", "share"),
            rows,
            frozenset({1, 2}),
            frozenset(n for n, r in enumerate(rows) if r[0] == Activity.PRODUCTIVE),
        ),
    )


def _events(events: Sequence[Event]) -> tuple[Part, ...]:
    told = [e for e in events if not isinstance(e, PhaseStarted | StepCommitted)]
    shown = told[-_MOST_EVENTS:]
    begin_s = events[0].time
    rows = tuple(
        (
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(e.time)),
            duration(e.time - begin_s),
            str(e.generation),
            event_words(e),
        )
        for e in shown
    )
    left = len(told) - len(shown)
    note = "Times are UTC. Phases and saved steps are left out." + (
        f" The first {left} events are left out." if left else ""
    )
    emphasised = frozenset(n for n, e in enumerate(shown) if isinstance(e, WorkerLost))
    columns = ("time", "since start", "generation", "what happened")
    return (Table("What happened when", columns, rows, frozenset({1, 2}), emphasised, note),)
