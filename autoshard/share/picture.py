"""Pictures: who had which devices when, under several policies, and who has them now.

Needs matplotlib, which `pip install 'autoshard[pictures]'` brings.
"""

import colorsys
import html
import io
import pathlib
from collections.abc import Sequence
from typing import Any

from autoshard.errors import ConfigError
from autoshard.files import write_bytes_atomically
from autoshard.pictures import require_matplotlib
from autoshard.share.explain import Explained
from autoshard.share.pool import Node
from autoshard.share.report import explained_rows, figure_rows
from autoshard.share.simulation.outcome import Simulated, Span

FORMATS = ("html", "png", "svg")
_WIDTH_INCHES, _ROW_INCHES, _LEAST_INCHES = 11.0, 0.055, 2.2
_LONGEST_NAME_SPAN = 0.035
"""Share of the width that a bar must have to bear its job's name."""


def check_picture(path: pathlib.Path) -> None:
    """Refuses at once what `write_picture` could not write at the end.

    Raises:
        ConfigError: another ending than those of `FORMATS`.
        MissingExtraError: matplotlib is not installed.
    """
    if path.suffix.removeprefix(".") not in FORMATS:
        raise ConfigError(f"--picture: a file that ends in .html, .png or .svg; received {path.name!r}. Rename it.")
    require_matplotlib()


def write_picture(
    path: pathlib.Path, nodes: Sequence[Node], runs: Sequence[Simulated], explained: Sequence[Explained] = ()
) -> None:
    """Draws runs of the same jobs over time, one below the other, and how many jobs waited or ran.

    Args:
        path: ends in `.html`, `.png` or `.svg`; the page has the figures and the reasons as tables, too.
        nodes: the cluster.
        runs: under one policy each.
        explained: a decision, for the page.

    Raises:
        ConfigError, MissingExtraError: as `check_picture`.
        FileFormatError: the file cannot be written.
    """
    check_picture(path)
    kind = path.suffix.removeprefix(".")
    figure = _figure(nodes, runs)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg" if kind == "html" else kind, dpi=130)
    content = drawn.getvalue()
    if kind == "html":
        content = _page(content.decode(), runs, explained).encode()
    write_bytes_atomically(path, content)


def _figure(nodes: Sequence[Node], runs: Sequence[Simulated]) -> Any:
    matplotlib = require_matplotlib()
    devices = sum(node.num_devices for node in nodes)
    height = max(devices * _ROW_INCHES, _LEAST_INCHES)
    figure = matplotlib.figure.Figure(figsize=(_WIDTH_INCHES, (height + 0.55) * len(runs) + 2.6), layout="constrained")
    ratios = [*([height] * len(runs)), 1.6]
    axes = figure.subplots(len(runs) + 1, 1, sharex=True, height_ratios=ratios)
    begin = min(job.arrival_s for run in runs for job in run.jobs)
    end = max(job.end_s for run in runs for job in run.jobs)
    scale, unit = _unit(end - begin)
    names = sorted({job.name for run in runs for job in run.jobs})
    colours = {name: _colour(number) for number, name in enumerate(names)}
    for run, axis in zip(runs, axes, strict=False):
        _draw_run(matplotlib, axis, nodes, run, colours, begin, scale, (end - begin) * scale)
        own = run.figures
        axis.set_title(
            f"{run.policy}: mean completion {own.mean_completion_s * scale:.3g} {unit}, "
            f"{own.utilisation:.0%} of the devices in use",
            loc="left",
            fontsize=10,
        )
    for run in runs:
        times, counts = _present(run)
        axes[-1].step([(t - begin) * scale for t in times], counts, where="post", label=run.policy, linewidth=1.3)
    axes[-1].set_ylabel("jobs there")
    axes[-1].set_xlabel(f"time ({unit})")
    axes[-1].legend(frameon=False, fontsize=9)
    axes[-1].set_xlim(0, (end - begin) * scale)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_run(
    matplotlib: Any,
    axis: Any,
    nodes: Sequence[Node],
    run: Simulated,
    colours: dict[str, tuple[float, float, float]],
    begin: float,
    scale: float,
    width: float,
) -> None:
    rows, ticks, row = {}, [], 0
    for node in nodes:
        rows[node.number] = row
        if not ticks or ticks[-1][1] != node.group:
            ticks.append((row, node.group))
        axis.axhline(row, color="#d8d8d8", linewidth=0.5, zorder=0)
        row += node.num_devices
    for span, node, lane, count in lanes(nodes, run.spans):
        left, right = (span.start_s - begin) * scale, (span.end_s - begin) * scale
        bottom = rows[node] + lane
        axis.add_patch(
            matplotlib.patches.Rectangle((left, bottom), right - left, count, facecolor=colours[span.job], linewidth=0)
        )
        paused = (min(span.paused_until_s, span.end_s) - span.start_s) * scale
        axis.add_patch(
            matplotlib.patches.Rectangle((left, bottom), paused, count, facecolor="#222222", alpha=0.75, linewidth=0)
        )
        if right - left > _LONGEST_NAME_SPAN * width and count >= 2:
            middle = (left + right) / 2
            axis.text(middle, bottom + count / 2, span.job, fontsize=6, ha="center", va="center", clip_on=True)
    axis.set_ylim(row, 0)
    axis.set_yticks([at for at, _ in ticks], [name for _, name in ticks], va="top")
    axis.tick_params(axis="y", length=0)


def lanes(nodes: Sequence[Node], spans: Sequence[Span]) -> list[tuple[Span, int, int, int]]:
    """Rows of a node for every span: the span, the node, its first row there, and how many.

    A span whose devices are not side by side comes in several pieces.
    """
    busy_until = {(node.number, lane): -1.0 for node in nodes for lane in range(node.num_devices)}
    size = {node.number: node.num_devices for node in nodes}
    found = []
    for span in sorted(spans, key=lambda own: (own.start_s, own.job)):
        for taken in span.placement.taken:
            lanes_there = range(size[taken.node])
            free = [lane for lane in lanes_there if busy_until[taken.node, lane] <= span.start_s + 1e-6]
            own = _side_by_side(free, taken.num_devices)
            for lane in own:
                busy_until[taken.node, lane] = span.end_s
            found += [(span, taken.node, first, count) for first, count in _runs(own)]
    return found


def _side_by_side(free: list[int], count: int) -> list[int]:
    """The first run of free rows that is long enough, else the first free rows."""
    for first, length in _runs(free):
        if length >= count:
            return list(range(first, first + count))
    return free[:count]


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and sum(runs[-1]) == row:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((row, 1))
    return runs


def _present(run: Simulated) -> tuple[list[float], list[int]]:
    """How many jobs were there, after each arrival and end."""
    changes = sorted([(job.arrival_s, 1) for job in run.jobs] + [(job.end_s, -1) for job in run.jobs])
    times, counts, count = [], [], 0
    for time_s, change in changes:
        count += change
        times.append(time_s)
        counts.append(count)
    return times, counts


def _unit(span_s: float) -> tuple[float, str]:
    if span_s > 2 * 3600:
        return 1 / 3600, "h"
    return (1 / 60, "min") if span_s > 300 else (1.0, "s")


def _colour(number: int) -> tuple[float, float, float]:
    """Colours that differ as much as they can from those of neighbours: the golden angle around the circle of hues."""
    return colorsys.hls_to_rgb(number * 0.618034 % 1.0, 0.62 + 0.12 * (number % 3 - 1), 0.55)


def _page(svg: str, runs: Sequence[Simulated], explained: Sequence[Explained]) -> str:
    parts = ["<h1>Who gets which devices</h1>", svg[svg.index("<svg") :]]
    if runs:
        parts += ["<h2>Policies</h2>", _table(*figure_rows([run.figures for run in runs]))]
    if explained:
        parts += ["<h2>Now</h2>", _table(*explained_rows(explained))]
    style = (
        "body{font:14px system-ui,sans-serif;margin:2em;color:#222}svg{max-width:100%;height:auto}"
        "table{border-collapse:collapse}td,th{padding:.25em .8em;text-align:left;border-bottom:1px solid #ddd}"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>autoshard share</title>'
        f"<style>{style}</style></head><body>{''.join(parts)}</body></html>"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
