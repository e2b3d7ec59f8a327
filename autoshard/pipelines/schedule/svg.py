"""A timeline as an SVG drawing: a row for each submesh, and its memory beside it."""

import html
import math
from collections.abc import Sequence

from autoshard.pipelines.schedule.gantt import Bar, GanttChart, GanttRow, meaning, short_name, ticks
from autoshard.printing import amount, seconds

_LEFT, _CHART, _GAP, _MEMORY, _RIGHT = 210, 920, 30, 120, 150
"""Widths: names, times, a gap, bars of memory, their figures."""
_WORK, _LANE, _BETWEEN, _TOP, _TITLE = 28, 6, 12, 44, 26
"""Heights: what a submesh computes, a lane below it, between rows, above all rows, above the rows of a pipeline."""
_DIGIT = 6.2
"""Width of a digit in a task."""

_STYLE = """
text { font: 12px system-ui, 'DejaVu Sans', sans-serif; fill: #222222 }
.name { font-weight: 600 } .faint { font-size: 11px; fill: #555555 } .over { fill: #b00000; font-weight: 600 }
.in { font-size: 10px; text-anchor: middle; pointer-events: none } .in.dark { fill: #ffffff }
.tick { font-size: 11px; fill: #555555; text-anchor: middle } .grid { stroke: #d0d0d0; stroke-width: 0.7 }
.task rect { stroke: #ffffff; stroke-width: 0.5 } .task rect:hover { stroke: #000000; stroke-width: 1.5 }
.frame { fill: url(#idle); stroke: #b5b5b5; stroke-width: 0.6 } .limit { stroke: #222222; stroke-width: 2 }
"""


def svg(rows: GanttChart) -> str:
    """The drawing, without a title; it may stand in an HTML page or in a file of its own."""
    scale = _CHART / rows.step_s if rows.step_s > 0 else 0.0
    several = len({r.submesh.pipeline for r in rows.rows}) > 1
    parts, y, pipeline = [], _TOP, -1
    for row in rows.rows:
        if several and row.submesh.pipeline != pipeline:
            pipeline = row.submesh.pipeline
            parts.append(f'<text class="name" x="4" y="{y + 14}">Pipeline {pipeline}</text>')
            y += _TITLE
        parts.append(_row(row, y, scale, rows.is_summed))
        parts.append(_memory(row, y, rows.most_bytes))
        y += _WORK + _LANE * len(row.lanes) + _BETWEEN
    axis = [_tick(t, _LEFT + t * scale, y) for t in ticks(rows.step_s)]
    height = y + 56
    memory_x = _LEFT + _CHART + _GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_width()} {height}" '
            f'width="{_width()}" height="{height}">',
            f"<style>{_STYLE}</style>",
            '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="6" height="6" fill="#f7f7f7"/>'
            '<rect width="1.2" height="6" fill="#dcdcdc"/></pattern></defs>',
            f'<rect width="{_width()}" height="{height}" fill="#ffffff"/>',
            f'<text class="faint" x="{memory_x}" y="{_TOP - 12}">peak memory of a device (line: limit)</text>',
            *axis,
            *parts,
            _legend(rows, y + 40),
            "</svg>",
        ]
    )


def _width() -> int:
    return _LEFT + _CHART + _GAP + _MEMORY + _RIGHT


def _row(row: GanttRow, y: float, scale: float, is_summed: bool) -> str:
    submesh = row.submesh
    share = f"{submesh.bubble_share:.0%} idle, {submesh.most_in_flight} in flight"
    name = short_name(submesh.name)
    height = _WORK + _LANE * len(row.lanes)
    tip = (
        f"{submesh.name}\nsubmesh {submesh.submesh} of pipeline {submesh.pipeline}\n"
        f"computes for {seconds(submesh.busy_s)}; {share} at most"
    )
    parts = [
        f'<g><title>{html.escape(tip)}</title><text class="name" x="4" y="{y + 12}">{html.escape(name)}</text>'
        f'<text class="faint" x="4" y="{y + 26}">{share}</text></g>',
        f'<rect class="frame" x="{_LEFT}" y="{y}" width="{_CHART}" height="{height}"/>',
        _pieces(row.work, y, _WORK, scale, is_summed),
    ]
    for i, lane in enumerate(row.lanes):
        parts.append(_pieces(lane, y + _WORK + i * _LANE, _LANE, scale, is_summed))
    return "\n".join(parts)


def _pieces(pieces: Sequence[Bar], y: float, height: float, scale: float, is_summed: bool) -> str:
    """Rectangles by colour, each with what it is; or, where they are sums, one path for each colour."""
    fills: dict[str, list[Bar]] = {}
    for piece in pieces:
        fills.setdefault(piece.fill, []).append(piece)
    parts = []
    for fill, same in fills.items():
        if is_summed:
            lines = "".join(_outline(p, y, height, scale) for p in same)
            tip = f"<title>{meaning(same[0].colour)}</title>"
            parts.append(f'<path fill="{fill}" d="{lines}">{tip}</path>')
        else:
            parts.append(f'<g class="task" fill="{fill}">{"".join(_rect(p, y, height, scale) for p in same)}</g>')
    if not is_summed:
        parts += [_label(p, y, scale) for p in pieces if (p.stop_s - p.start_s) * scale >= len(p.label) * _DIGIT + 2]
    return "\n".join(p for p in parts if p)


def _outline(piece: Bar, y: float, height: float, scale: float) -> str:
    left, right = _LEFT + piece.start_s * scale, _LEFT + piece.stop_s * scale
    top, tall = y + height * (1 - piece.high), height * (piece.high - piece.low)
    return f"M{_short(left)} {_short(top)}h{_short(right - left)}v{_short(tall)}H{_short(left)}z"


def _rect(piece: Bar, y: float, height: float, scale: float) -> str:
    left, wide = _LEFT + piece.start_s * scale, max(0.4, (piece.stop_s - piece.start_s) * scale)
    return (
        f'<rect x="{_short(left)}" y="{_short(y)}" width="{_short(wide)}" height="{_short(height)}">'
        f"<title>{html.escape(piece.tip)}</title></rect>"
    )


def _label(piece: Bar, y: float, scale: float) -> str:
    if not piece.label:
        return ""
    middle = _LEFT + (piece.start_s + piece.stop_s) / 2 * scale
    dark = " dark" if piece.is_dark else ""
    return f'<text class="in{dark}" x="{_short(middle)}" y="{_short(y + _WORK / 2 + 3.5)}">{piece.label}</text>'


def _memory(row: GanttRow, y: float, most_bytes: float) -> str:
    submesh = row.submesh
    x, height = _LEFT + _CHART + _GAP, 14
    is_over = submesh.peak_bytes > submesh.limit_bytes
    words, limit = amount(submesh.peak_bytes), ""
    if math.isfinite(submesh.limit_bytes):
        words += f" of {amount(submesh.limit_bytes)}"
        at = _short(x + _MEMORY * submesh.limit_bytes / most_bytes)
        limit = f'<line class="limit" x1="{at}" x2="{at}" y1="{y + 4}" y2="{y + 10 + height}"/>'
    wide = _short(_MEMORY * submesh.peak_bytes / most_bytes)
    kind = ' class="over"' if is_over else ""
    return (
        f'<rect x="{x}" y="{y + 7}" width="{_MEMORY}" height="{height}" fill="#eeeeee"/>'
        f'<rect x="{x}" y="{y + 7}" width="{wide}" height="{height}" fill="{"#b00000" if is_over else "#7d8794"}"/>'
        f'{limit}<text{kind} x="{x + _MEMORY + 8}" y="{y + 18}">{words}</text>'
    )


def _tick(time_s: float, x: float, bottom: float) -> str:
    label = seconds(time_s)
    return (
        f'<line class="grid" x1="{_short(x)}" x2="{_short(x)}" y1="{_TOP - 6}" y2="{bottom - 4}"/>'
        f'<text class="tick" x="{_short(x)}" y="{_TOP - 12}">{label}</text>'
        f'<text class="tick" x="{_short(x)}" y="{bottom + 9}">{label}</text>'
    )


def _legend(rows: GanttChart, y: float) -> str:
    parts, x = [], _LEFT
    entries = [(c.value, meaning(c)) for c in rows.colours] + [("url(#idle)", "idle")]
    for fill, words in entries:
        parts.append(
            f'<rect x="{x}" y="{y - 10}" width="14" height="12" fill="{fill}" stroke="#b5b5b5" stroke-width="0.6"/>'
            f'<text x="{x + 19}" y="{y}">{words}</text>'
        )
        x += 40 + round(6.6 * len(words))
    return "".join(parts)


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
