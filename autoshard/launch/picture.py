"""A run as a picture: what each generation did over time, with lost workers marked, and the loss by step.

Needs matplotlib, which `pip install 'autoshard[pictures]'` brings.
"""

import io
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

from autoshard.errors import ConfigError
from autoshard.files import write_bytes_atomically
from autoshard.launch.events import Event, GenerationStarted, Replanned, WorkerLost, read_events
from autoshard.launch.goodput import Activity, Goodput, goodput
from autoshard.launch.metrics_reader import StepMetrics, read_metrics
from autoshard.pictures import require_matplotlib
from autoshard.printing import counted, duration

FORMATS = ("png", "svg")

ACTIVITY_COLOURS = {
    Activity.PRODUCTIVE: "#009e73",
    Activity.STARTUP: "#f0e442",
    Activity.PLANNING: "#cc79a7",
    Activity.COMPILE: "#56b4e9",
    Activity.RESTORE: "#0072b2",
    Activity.REDONE: "#d55e00",
    Activity.STALL: "#7a0000",
    Activity.EVALUATION: "#b2df8a",
    Activity.SAVING: "#e69f00",
    Activity.DOWN: "#999999",
}
_GENERATIONS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Both: colours that people with colour blindness can tell apart (Okabe and Ito, "Color Universal Design", 2008)."""
_TEXT, _FAINT, _LOST = "#222222", "#dddddd", "#c00000"
_ROW_INCHES, _MOST_ROWS_INCHES, _LOSS_INCHES = 0.4, 8.0, 4.0
_TICKS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200)
_MOST_NAMED = 20
"""More generations than these have no names, since there is no room for them."""


def check_picture(path: pathlib.Path) -> None:
    """Refuses at once what `write_picture` could not write at the end.

    Raises:
      MissingExtraError: matplotlib is not installed.
      ConfigError: The file's name has another ending than those of `FORMATS`.
    """
    if path.suffix[1:].lower() not in FORMATS:
        endings = " or ".join(f".{f}" for f in FORMATS)
        raise ConfigError(f"The file name of this picture ends in {endings}; received {str(path)!r}. Rename it.")
    require_matplotlib()


def write_picture(
    run_dir: pathlib.Path, path: pathlib.Path, title: str | None = None, undisturbed: pathlib.Path | None = None
) -> None:
    """Draws the run of an output folder into a file, PNG or SVG.

    Args:
        run_dir: the output folder.
        path: the file.
        title: by default the folder's name.
        undisturbed: the output folder of a run without losses, whose loss is drawn behind.

    Raises:
        MissingExtraError, ConfigError: as `check_picture`.
        FileFormatError: the file cannot be written.
    """
    check_picture(path)
    beside = () if undisturbed is None else read_metrics(undisturbed)
    drawn_run = drawn(
        tuple(read_events(run_dir)), read_metrics(run_dir), title or run_dir.name, path.suffix[1:].lower(), beside
    )
    write_bytes_atomically(path, drawn_run)


def drawn(
    events: Sequence[Event],
    metrics: Sequence[StepMetrics],
    title: str,
    form: str,
    undisturbed: Sequence[StepMetrics] = (),
) -> bytes:
    """The picture as a file of `form`, `png` or `svg`."""
    matplotlib = require_matplotlib()
    measured = goodput(events)
    generations = _generations(events)
    rows_inches = min(max(_ROW_INCHES * len(generations), 1.0), _MOST_ROWS_INCHES)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "autoshard", "font.size": 11}):
        heights = (rows_inches, _LOSS_INCHES) if metrics else (rows_inches,)
        figure = matplotlib.figure.Figure(figsize=(14, 2.0 + sum(heights)), layout="constrained", facecolor="white")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, hspace=0.04)
        figure.suptitle(f"{title}\n{heading(measured)}", x=0.01, ha="left", fontsize=12, color=_TEXT)
        axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        _draw_time(axes[0], events, generations, measured)
        if metrics:
            _draw_loss(axes[1], metrics, generations, undisturbed)
        for one in axes:
            one.tick_params(length=0)
            for side in ("top", "right"):
                one.spines[side].set_visible(False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=form, dpi=120, metadata={"Date": None} if form == "svg" else None)
    return buffer.getvalue()


def heading(measured: Goodput) -> str:
    """The run in a sentence."""
    lost = sum(loss.times for loss in measured.losses)
    return (
        f"Goodput {measured.fraction:.1%} of {duration(measured.total_s)}; "
        f"{counted(measured.generations, 'generation')}, {counted(lost, 'worker')} lost, "
        f"{counted(measured.steps_redone, 'step')} taken again"
    )


def _generations(events: Sequence[Event]) -> dict[int, str]:
    """What each generation is called: its number, its workers, and its mesh once that is known."""
    found: dict[int, str] = {}
    for event in events:
        if isinstance(event, GenerationStarted):
            mesh = f", {event.mesh}" if event.mesh else ""
            found[event.generation] = f"{event.generation}: {counted(len(event.workers), 'worker')}{mesh}"
        elif isinstance(event, Replanned) and "," not in found.get(event.generation, ","):
            found[event.generation] += f", {event.mesh}"
    return found


def _draw_time(axes: Any, events: Sequence[Event], generations: dict[int, str], measured: Goodput) -> None:
    """A row for each generation, from its start to the next one's; what it did, and crosses where workers were lost."""
    if not measured.spans:
        return
    start_s = measured.spans[0].start_s
    row_of = {number: row for row, number in enumerate(generations)}
    row = lambda generation: row_of.get(generation, 0)  # before the first there is none: it belongs to the first
    for activity in Activity:
        spans = [span for span in measured.spans if span.activity is activity]
        if spans:
            bars = axes.barh(
                [row(span.generation) for span in spans],
                [span.end_s - span.start_s for span in spans],
                left=[span.start_s - start_s for span in spans],
                height=0.8,
                color=ACTIVITY_COLOURS[activity],
                label=f"{activity.value}: {duration(measured.seconds(activity))}",
            )
            bars[0].set_zorder(2)
    lost = [event for event in events if isinstance(event, WorkerLost)]
    if lost:
        axes.plot(
            [event.time - start_s for event in lost],
            [row(event.generation) for event in lost],
            linestyle="none",
            marker="X",
            markersize=8,
            markerfacecolor=_LOST,
            markeredgecolor="white",
            label="worker lost",
            zorder=4,
            clip_on=False,
        )
    if len(generations) <= _MOST_NAMED:
        for event in lost:
            at_s = event.time - start_s
            is_late = at_s > 0.8 * (measured.spans[-1].end_s - start_s)
            axes.annotate(
                f"worker {event.rank}: {event.cause}",
                (at_s, row(event.generation)),
                xytext=(-8 if is_late else 8, 0),
                textcoords="offset points",
                ha="right" if is_late else "left",
                va="center",
                fontsize=9,
                color=_LOST,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85},
                zorder=3,
            )
        axes.set_yticks(range(len(generations)), list(generations.values()))
    else:
        numbers = list(generations)
        axes.set_ylabel("generation")
        axes.set_yticks(range(0, len(numbers), -(-len(numbers) // _MOST_NAMED)))
        axes.yaxis.set_major_formatter(lambda value, _: str(numbers[int(value)]))
    axes.set_ylim(max(len(generations), 1) - 0.4, -0.6)
    axes.set_xlim(0, measured.spans[-1].end_s - start_s)
    total_s = measured.spans[-1].end_s - start_s
    axes.set_xticks([n * step_s for step_s in [_tick_s(total_s)] for n in range(int(total_s / step_s) + 1)])
    axes.xaxis.set_major_formatter(lambda value, _: _tick_text(value))
    axes.grid(axis="x", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title("what each generation did", loc="left", fontsize=11, color=_TEXT)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)


def _tick_s(total_s: float) -> float:
    """A round time, of which at most ten lie in `total_s`."""
    days = itertools.count(1)
    return next(step_s for step_s in itertools.chain(_TICKS_S, (n * 86400 for n in days)) if total_s <= 10 * step_s)


def _tick_text(value_s: float) -> str:
    """`90 s` is `1 min 30 s`; round minutes, hours and days go without what is zero."""
    return duration(value_s).replace(".0 s", " s").replace(" 00 s", "").replace(" 00 min", "").replace(" 0 h", "")


def _draw_loss(
    axes: Any, metrics: Sequence[StepMetrics], generations: dict[int, str], undisturbed: Sequence[StepMetrics]
) -> None:
    """The loss of every reported step, in a colour for each generation."""
    if undisturbed:
        axes.plot(
            [one.step for one in undisturbed],
            [one.loss for one in undisturbed],
            color="#bbbbbb",
            linewidth=5,
            label="undisturbed run",
            solid_capstyle="round",
        )
    is_named = len(generations) <= _MOST_NAMED
    last: StepMetrics | None = None
    for place, number in enumerate(sorted({one.generation for one in metrics})):
        own = [one for one in metrics if one.generation == number]
        if last is not None and is_named:
            axes.axvline((last.step + own[0].step) / 2, color="#999999", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        joined = own if last is None else [last, *own]
        axes.plot(
            [one.step for one in joined],
            [one.loss for one in joined],
            color=_GENERATIONS[place % len(_GENERATIONS)],
            linewidth=1.6,
            label=generations.get(number, "loss") if is_named else None,
        )
        last = own[-1]
    axes.set_xlabel("step")
    axes.set_title("loss", loc="left", fontsize=11, color=_TEXT)
    axes.grid(color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
