"""A timeline as a picture: an HTML page to look into, or a PNG.

The PNG needs matplotlib, which `pip install 'autoshard[pictures]'` brings.
"""

import html
import io
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from autoshard.errors import ConfigError
from autoshard.files import write_bytes_atomically, write_text_atomically
from autoshard.pictures import require_matplotlib
from autoshard.pipelines.schedule.gantt import Bar, Colour, GanttChart, GanttRow, gantt_chart, meaning, short_name
from autoshard.pipelines.schedule.svg import svg
from autoshard.pipelines.schedule.timeline import Timeline
from autoshard.printing import amount, seconds

_TEXT, _FAINT, _GRID, _OVER, _MEMORY = "#222222", "#555555", "#dddddd", "#b00000", "#7d8794"
_INCHES_OF_TIME = 10.0
_INSTEAD = " The HTML page of a timeline does without it."
_ROW_INCHES, _SUMMED_ROW_INCHES = 0.5, 0.26
_WORK, _LANE = 0.62, 0.13
"""Heights, where rows are 1 apart."""


def draw_timeline(timeline: Timeline, path: pathlib.Path, title: str) -> None:
    """Draws a timeline into an .html or .png file.

    Raises:
      ConfigError: The file has another ending.
      MissingExtraError: A PNG needs matplotlib, which is not installed.
    """
    if path.suffix.lower() == ".html":
        write_text_atomically(path, timeline_html(timeline, title))
    elif path.suffix.lower() == ".png":
        timeline_png(timeline, path, title)
    else:
        raise ConfigError(f"--timeline: the file must end in .html or .png; received {path}. Rename it.")


def timeline_html(timeline: Timeline, title: str) -> str:
    """A page that needs nothing besides: one row for each submesh, with what it computes, sends and holds.

    Args:
      timeline: Predicted or recorded.
      title: Its heading.
    """
    rows = gantt_chart(timeline)
    said = "\n".join(f"<p>{html.escape(one)}</p>" for one in (heading(timeline), *rows.notes))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>
:root {{ color-scheme: light }}
body {{ font: 15px/1.45 system-ui, sans-serif; color: {_TEXT}; background: white; margin: 1.5em 2em }}
h1 {{ font-size: 1.35em; margin: 0 0 .4em }} p {{ margin: .2em 0; max-width: 75em }}
svg {{ width: 100%; height: auto; min-width: 900px; max-width: 1900px; margin-top: .6em }}
</style></head><body>
<h1>{html.escape(title)}</h1>
{said}
{svg(rows)}
</body></html>
"""


def timeline_png(timeline: Timeline, path: str | os.PathLike[str], title: str) -> None:
    """Draws a timeline into a PNG file.

    Raises:
      MissingExtraError: matplotlib is not installed.
      FileFormatError: The file cannot be written.
    """
    matplotlib = require_matplotlib(_INSTEAD)
    rows = gantt_chart(timeline)
    num_rows = max(1, len(rows.rows))
    height = 1.6 + num_rows * (_SUMMED_ROW_INCHES if rows.is_summed else _ROW_INCHES)
    with matplotlib.rc_context({"font.size": 10, "text.color": _TEXT}):
        figure = matplotlib.figure.Figure(figsize=(16, height), layout="constrained", facecolor="white")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08, wspace=0.02)
        times, memory = figure.subplots(1, 2, sharey=True, width_ratios=(_INCHES_OF_TIME, 2.2))
        words = " ".join((heading(timeline), *rows.notes))
        figure.suptitle(f"{title}\n{words}", x=0.01, ha="left", fontsize=11)
        _draw_times(times, rows)
        _draw_memory(memory, rows)
        for axes in (times, memory):
            axes.set_ylim(num_rows - 0.1, -0.2)
            axes.tick_params(length=0)
            for side in ("top", "right", "bottom", "left"):
                axes.spines[side].set_visible(False)
        patch = matplotlib.patches.Patch
        marks = [patch(color=c.value, label=meaning(c)) for c in rows.colours]
        marks.append(patch(facecolor="#f2f2f2", edgecolor="#bbbbbb", label="idle"))
        figure.legend(handles=marks, loc="outside lower left", ncols=len(marks), frameon=False, fontsize=9)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
    write_bytes_atomically(path, buffer.getvalue())


def heading(timeline: Timeline) -> str:
    """The step in a sentence."""
    submeshes = timeline.submeshes
    idle = sum(p.bubble_share for p in submeshes) / len(submeshes) if submeshes else 0.0
    step = f"One step takes {seconds(timeline.step_s)} ({timeline.origin})"
    return f"{step}; on average a submesh is idle for {idle:.1%} of it."


def _draw_times(axes: Any, rows: GanttChart) -> None:
    matplotlib = require_matplotlib(_INSTEAD)
    corners, fills = [], []
    for y, row in enumerate(rows.rows):
        height = _WORK + _LANE * len(row.lanes)
        corners.append(_corners(Bar(Colour.FORWARD, 0.0, rows.step_s), y, height))
        fills.append("#f2f2f2")
        for top, tall, pieces in _strips(y, row):
            corners += [_corners(p, top, tall) for p in pieces]
            fills += [p.fill for p in pieces]
        if not rows.is_summed:
            _number(axes, y, row, rows.step_s)
    line = 0.0 if rows.is_summed else 0.4
    axes.add_collection(
        matplotlib.collections.PolyCollection(corners, facecolors=fills, edgecolors="white", linewidths=line)
    )
    axes.set_xlim(0, rows.step_s or 1.0)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=_GRID, linewidth=0.8)
    axes.set_yticks([y + _WORK / 2 for y in range(len(rows.rows))], [_name(r, rows.is_summed) for r in rows.rows])
    axes.xaxis.set_major_formatter(lambda value, _: seconds(value) if value > 0 else "0")


def _draw_memory(axes: Any, rows: GanttChart) -> None:
    for y, row in enumerate(rows.rows):
        submesh, words = row.submesh, amount(row.submesh.peak_bytes)
        is_over = submesh.peak_bytes > submesh.limit_bytes
        axes.barh(y + _WORK / 2, rows.most_bytes, height=_WORK * 0.5, color="#eeeeee")
        axes.barh(y + _WORK / 2, submesh.peak_bytes, height=_WORK * 0.5, color=_OVER if is_over else _MEMORY)
        if submesh.limit_bytes < float("inf"):
            words += f" of {amount(submesh.limit_bytes)}"
            axes.plot([submesh.limit_bytes] * 2, [y + 0.05, y + _WORK - 0.05], color=_TEXT, linewidth=2)
        colour = _OVER if is_over else _TEXT
        axes.text(rows.most_bytes * 1.06, y + _WORK / 2, words, va="center", fontsize=9, color=colour)
    axes.set_xlim(0, rows.most_bytes * 2.2)
    axes.set_xticks([])
    axes.tick_params(labelleft=False)
    axes.set_title("peak memory (line: limit)", loc="left", fontsize=9, color=_FAINT)


def _strips(y: float, row: GanttRow) -> list[tuple[float, float, Sequence[Bar]]]:
    """Top, height and pieces of a row's work and of its lanes."""
    lanes = [(y + _WORK + i * _LANE, _LANE, lane) for i, lane in enumerate(row.lanes)]
    return [(y, _WORK, row.work), *lanes]


def _corners(piece: Bar, top: float, height: float) -> list[tuple[float, float]]:
    low, high = top + height * (1 - piece.low), top + height * (1 - piece.high)
    return [(piece.start_s, low), (piece.start_s, high), (piece.stop_s, high), (piece.stop_s, low)]


def _number(axes: Any, y: float, row: GanttRow, step_s: float) -> None:
    """Micro-batches in the tasks that have room for them."""
    for p in row.work:
        inches = (p.stop_s - p.start_s) / (step_s or 1.0) * _INCHES_OF_TIME
        if p.label and inches > 0.075 * len(p.label) + 0.03:
            colour, middle = "white" if p.is_dark else _TEXT, (p.start_s + p.stop_s) / 2
            axes.text(middle, y + _WORK / 2, p.label, ha="center", va="center_baseline", fontsize=7.5, color=colour)


def _name(row: GanttRow, is_short: bool) -> str:
    submesh = row.submesh
    name = short_name(submesh.name)
    return name if is_short else f"{name}\n{submesh.bubble_share:.0%} idle, {submesh.most_in_flight} in flight"
