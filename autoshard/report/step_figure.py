"""The two figures of a step over time, which share their axis: memory, and what runs. The page's script fills them."""

from typing import Any

from bokeh.layouts import column
from bokeh.models import BoxZoomTool, Span
from bokeh.models.tickers import FixedTicker

from autoshard.report.colours import LIMIT, MEMORY, OTHER
from autoshard.report.figures import axis_range, plain_figure, source_of

LANES = ("products", "other kernels", "waited for", "hidden")
"""Of the second figure, from top to bottom: kernels run one after another; collectives are waited for, or hide."""
_MOST_CLASSES = 10
_LEFT = 92


def step_figure() -> Any:
    """Both figures, empty; their models are found by name."""
    span = axis_range(0, 1, name="time", bounds=(0, 1))
    memory = plain_figure(300, x_range=span, y_range=axis_range(0, 1, name="bytes"))
    edges = source_of({"t": [], **{f"e{k}": [] for k in range(_MOST_CLASSES + 1)}}, name="memory")
    colours = [*MEMORY.values()]
    for k in range(_MOST_CLASSES):
        colour = colours[k] if k < len(colours) else OTHER
        memory.varea(x="t", y1=f"e{k}", y2=f"e{k + 1}", fill_color=colour, fill_alpha=0.85, source=edges)
    memory.add_layout(
        Span(location=0, dimension="width", line_color=LIMIT, line_width=2, line_dash="dashed", name="budget")
    )
    memory.yaxis.axis_label = "memory"
    memory.yaxis.name = "bytes axis"
    work = plain_figure(190, x_range=span, y_range=axis_range(len(LANES), 0))
    runs = source_of({c: [] for c in ("left", "right", "top", "bottom", "colour", "alpha")}, name="runs")
    work.quad(
        left="left", right="right", top="top", bottom="bottom", fill_color="colour", fill_alpha="alpha",
        line_color=None, source=runs,
    )  # fmt: skip
    work.yaxis.ticker = FixedTicker(ticks=[k + 0.5 for k in range(len(LANES))])
    work.yaxis.major_label_overrides = {k + 0.5: name for k, name in enumerate(LANES)}
    work.ygrid.visible = False
    work.xaxis.name = "time axis"
    for made in (memory, work):
        made.min_border_left = _LEFT
        made.add_layout(Span(location=0, dimension="height", line_width=1, name="cursor"))
        made.add_tools(BoxZoomTool(dimensions="width"))
    memory.name, work.name = "memory figure", "work figure"
    return column(memory, work, sizing_mode="stretch_width")
