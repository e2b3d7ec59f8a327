"""A comparison as a picture: what a step's time and a device's memory are made of, a bar for each contender.

Needs matplotlib, which `pip install 'autoshard[pictures]'` brings.
"""

import html
import io
import pathlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard.comparison.comparison import Comparison, Contender, heading, ranked, verdict
from autoshard.errors import ConfigError
from autoshard.files import write_bytes_atomically
from autoshard.pictures import require_matplotlib
from autoshard.printing import amount, seconds
from autoshard.strategies.hand_written import in_form

FORMATS = ("html", "png", "svg")

COMPUTE = "computation"
TIME_COLOURS = {
    COMPUTE: "#b8c0cc",
    "all-reduce": "#d55e00",
    "all-gather": "#0072b2",
    "reduce-scatter": "#009e73",
    "all-to-all": "#cc79a7",
    "collective-permute": "#e69f00",
}
MEMORY_COLOURS = {
    "state": "#0072b2",
    "intermediates": "#e69f00",
    "inputs": "#56b4e9",
    "partial sums": "#009e73",
    "resharded copies": "#cc79a7",
    "workspaces": "#d55e00",
}
"""Colours that people with colour blindness can tell apart (Okabe and Ito, "Color Universal Design", 2008)."""
_OTHER_COLOUR = "#777777"
_TEXT, _FAINT, _LIMIT = "#222222", "#dddddd", "#c00000"
_ROW_INCHES = 0.46
_TITLE_LETTERS = 150
"""In a line of the title, which are as wide as the picture."""
_CUT = 4.0
"""Bars end at this multiple of autoshard's step time or of the memory limit; an arrow says that they go on."""


def check_picture(path: pathlib.Path) -> None:
    """Refuses at once what `write_picture` could not write at the end.

    Raises:
      MissingExtraError: matplotlib is not installed.
      ConfigError: The file's name has another ending than those of `FORMATS`.
    """
    if path.suffix[1:].lower() not in FORMATS:
        endings = ", ".join(f".{f}" for f in FORMATS)
        raise ConfigError(f"The file name of a picture ends in one of {endings}; received {str(path)!r}. Rename it.")
    require_matplotlib()


def write_picture(comparison: Comparison, path: pathlib.Path) -> None:
    """Draws `comparison` into a file: PNG, SVG, or an HTML page that also holds the table. Errors: `check_picture`."""
    check_picture(path)
    form = path.suffix[1:].lower()
    if form == "html":
        write_bytes_atomically(path, page(comparison).encode())
    else:
        write_bytes_atomically(path, drawn(comparison, form))


def page(comparison: Comparison) -> str:
    """A self-contained HTML page: the picture, and the table below it."""
    svg = drawn(comparison, "svg").decode()
    text = html.escape
    head = "".join(f"<th>{text(name)}</th>" for name in comparison.columns)
    rows = "\n".join(
        f"<tr class={'fits' if c.fits else 'no'}>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>"
        for c, row in zip(ranked(comparison), comparison.rows(), strict=True)
    )
    notes = "\n".join(f"<p><b>{text(c.name)}</b>: {text(c.reason)}</p>" for c in ranked(comparison) if c.reason)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{text(comparison.title)}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; color: {_TEXT}; background: white; max-width: 1180px; margin: 2em auto }}
svg {{ width: 100%; height: auto }}
table {{ border-collapse: collapse; margin: 1em 0 }}
td, th {{ padding: .25em .8em; border-bottom: 1px solid {_FAINT}; text-align: right }}
td:nth-child(-n+2), th:nth-child(-n+2) {{ text-align: left }}
tr.no {{ color: #888888 }}
</style></head><body>
<h1>{text(comparison.title)}</h1>
<p>{text(heading(comparison))}. {text(verdict(comparison))}</p>
{svg[svg.index("<svg") :]}
<table><tr>{head}</tr>
{rows}
</table>
{notes}
</body></html>
"""


def drawn(comparison: Comparison, form: str) -> bytes:
    """The picture as a file of `form`, `png` or `svg`."""
    matplotlib = require_matplotlib()
    shown = ranked(comparison)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "autoshard", "font.size": 11}):
        figure = matplotlib.figure.Figure(figsize=(14, 2.2 + _ROW_INCHES * len(shown)), layout="constrained")
        figure.set_facecolor("white")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08, wspace=0.03)
        left, right = figure.subplots(1, 2, sharey=True)
        title = [heading(comparison), *textwrap.wrap(verdict(comparison), _TITLE_LETTERS)]
        figure.suptitle("\n".join(title), x=0.01, ha="left", fontsize=12, color=_TEXT)
        own, limit = comparison.own.plan, comparison.limit_bytes
        _bars(
            left,
            shown,
            [_times(c) for c in shown],
            TIME_COLOURS,
            seconds,
            "predicted time of one step",
            None if own is None else _CUT * own.estimate.step_s,
            False,
        )
        _bars(
            right,
            shown,
            [c.memory_bytes for c in shown],
            MEMORY_COLOURS,
            amount,
            "memory of one device at the peak",
            None if limit is None else _CUT * limit,
            True,
        )
        left.get_yticklabels()[0].set_fontweight("bold")
        if limit is not None:
            _mark_limit(right, limit)
        for axes in (left, right):
            below = -0.4 / (_ROW_INCHES * len(shown))
            legend = axes.legend(loc="upper left", bbox_to_anchor=(0, below), ncols=3, frameon=False, fontsize=10)
            for handle in legend.legend_handles:
                handle.set_alpha(1.0)
        buffer = io.BytesIO()
        metadata = {"Date": None} if form == "svg" else None
        figure.savefig(buffer, format=form, dpi=150, metadata=metadata)
    return buffer.getvalue()


def _mark_limit(axes: Any, limit_bytes: float) -> None:
    """A line at the memory limit, or where that would squeeze the bars, words."""
    if limit_bytes > 4 * axes.get_xlim()[1]:
        words = f"{axes.get_title(loc='left')} (limit {amount(limit_bytes)}, far right)"
        axes.set_title(words, loc="left", fontsize=11, color=_TEXT)
        return
    style = {"color": _LIMIT, "linewidth": 1.6, "linestyle": (0, (5, 3))}
    axes.axvline(limit_bytes, label=f"limit {amount(limit_bytes)}", **style)
    axes.set_xlim(0, max(axes.get_xlim()[1], limit_bytes * 1.12))


def _times(contender: Contender) -> dict[str, float]:
    """By what takes it: seconds a step, which add up to its time. What hides behind kernels takes none."""
    if contender.plan is None:
        return {}
    return {COMPUTE: contender.plan.estimate.compute_s} | contender.exposed_s


def _bars(
    axes: Any,
    shown: Sequence[Contender],
    parts: Sequence[Mapping[str, float]],
    colours: Mapping[str, str],
    unit: Callable[[float], str],
    title: str,
    most: float | None,
    says_fits: bool,
) -> None:
    """Stacked bars from left to right, the total at the end of each; longer ones are cut off at `most`."""
    totals = [sum(p.values()) for p in parts]
    end = max([t for t in totals if most is None or t <= most] or [most or 1.0])
    end *= 1.35  # room for the words at the end of the longest bar
    kinds = [k for k in colours if any(k in p for p in parts)]
    kinds += sorted({k for p in parts for k in p} - set(colours))
    starts = [0.0] * len(shown)
    for kind in kinds:
        lengths = [p.get(kind, 0.0) for p in parts]
        bars = axes.barh(
            range(len(shown)),
            lengths,
            left=starts,
            height=0.66,
            color=colours.get(kind, _OTHER_COLOUR),
            label=kind,
        )
        for bar, contender in zip(bars, shown, strict=True):
            bar.set_alpha(1.0 if contender.fits else 0.35)
        starts = [s + l for s, l in zip(starts, lengths, strict=True)]
    for i, (total, contender) in enumerate(zip(totals, shown, strict=True)):
        label = "no plan" if contender.plan is None else unit(total)
        if contender.plan is not None and not contender.fits and says_fits:
            label += ", does not fit"
        is_cut = total > end
        axes.annotate(
            f"{label} \N{RIGHTWARDS ARROW}" if is_cut else label,
            (end if is_cut else total, i),
            xytext=(-6 if is_cut else 6, 0),
            textcoords="offset points",
            ha="right" if is_cut else "left",
            va="center",
            fontsize=10,
            fontweight="bold" if i == 0 else "normal",
            color=_TEXT if contender.fits else "#666666",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85},
            zorder=4,
        )
    axes.set_xlim(0, end)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    names = [shown[0].name, *(in_form(c.name, c.form) for c in shown[1:])]
    axes.set_yticks(range(len(shown)), names)
    axes.xaxis.set_major_formatter(lambda value, _: unit(value) if value else "0")
    axes.set_title(title, loc="left", fontsize=11, color=_TEXT)
    axes.grid(axis="x", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
