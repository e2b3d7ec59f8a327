"""Figures of Bokeh in one style. Colours of axes and grids are set by the page's script, for light and dark screens."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, FactorRange, Range1d, Span
from bokeh.plotting import figure

from autoshard.report.colours import LIMIT, OTHER
from autoshard.report.units import Unit, byte_unit, time_unit

_BAR_PIXELS = 26


def plain_figure(height: int, **settings: Any) -> Any:
    """An empty figure as wide as its place."""
    made = figure(
        height=height,
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools="",
        output_backend="canvas",
        min_border_left=4,
        min_border_right=14,
        **settings,
    )
    made.background_fill_alpha = made.border_fill_alpha = 0.0
    made.outline_line_alpha = 0.0
    made.axis.major_label_text_font_size = made.axis.axis_label_text_font_size = "12px"
    made.xaxis.axis_label_text_font_style = made.yaxis.axis_label_text_font_style = "normal"
    return made


def source_of(columns: Mapping[str, Sequence[Any] | np.ndarray], name: str | None = None) -> Any:
    """The data of a figure, by column."""
    make: Any = ColumnDataSource  # its types know no columns that are lists
    return make(dict(columns), name=name)


def axis_range(start: float, end: float, **settings: Any) -> Any:
    """What an axis spans."""
    make: Any = Range1d  # its types know no numbers without names
    return make(start, end, **settings)


def stacked_bars(
    names: Sequence[str], parts: Sequence[dict[str, float]], colours: dict[str, str], unit: Unit, limit: float | None
) -> tuple[Any, tuple[tuple[str, str], ...]]:
    """A bar from left to right for each name, of coloured parts; and the legend.

    Args:
      names: From top to bottom. parts: Of each, how much of what, in seconds or bytes.
      unit: Of the axis. limit: Where a line is drawn; None for none.
    """
    kinds = [k for k in colours if any(p.get(k) for p in parts)]
    kinds += sorted({k for p in parts for k in p} - set(colours))
    labels = unique_labels(names)
    made = plain_figure(70 + _BAR_PIXELS * len(names), y_range=FactorRange(factors=labels[::-1], range_padding=0.08))
    starts = [0.0] * len(names)
    for kind in kinds:
        ends = [start + part.get(kind, 0.0) / unit.size for start, part in zip(starts, parts, strict=True)]
        source = source_of({"y": labels, "left": starts, "right": ends})
        made.hbar(y="y", left="left", right="right", height=0.7, color=colours.get(kind, OTHER), source=source)
        starts = ends
    end = max(starts, default=1.0) or 1.0
    if limit is not None and limit / unit.size <= 4 * end:
        end = max(end, limit / unit.size)
        made.add_layout(
            Span(location=limit / unit.size, dimension="height", line_color=LIMIT, line_width=2, line_dash="dashed")
        )
    made.x_range = axis_range(0, 1.06 * end)
    made.xaxis.axis_label = unit.name
    made.ygrid.visible = False
    legend = [(kind, colours.get(kind, OTHER)) for kind in kinds]
    return made, tuple(legend + ([("limit", LIMIT)] if limit is not None and end >= limit / unit.size else []))


def unique_labels(names: Sequence[str], most: int = 26) -> list[str]:
    """Names short enough for an axis, and distinct."""
    short = [n if len(n) <= most else n[: most - 1] + "\N{HORIZONTAL ELLIPSIS}" for n in names]
    return [n if short.count(n) == 1 else f"{k + 1}: {n}" for k, n in enumerate(short)]


def time_bars(
    names: Sequence[str], parts: Sequence[dict[str, float]], colours: dict[str, str]
) -> tuple[Any, tuple[tuple[str, str], ...]]:
    """Stacked bars of seconds."""
    return stacked_bars(names, parts, colours, time_unit(max((sum(p.values()) for p in parts), default=0.0)), None)


def byte_bars(
    names: Sequence[str], parts: Sequence[dict[str, float]], colours: dict[str, str], limit_bytes: float | None = None
) -> tuple[Any, tuple[tuple[str, str], ...]]:
    """Stacked bars of bytes."""
    unit = byte_unit(max((sum(p.values()) for p in parts), default=0.0))
    return stacked_bars(names, parts, colours, unit, limit_bytes)
