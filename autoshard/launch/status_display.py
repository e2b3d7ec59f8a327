"""The state of a run on a terminal."""

import dataclasses
import pathlib
from collections.abc import Iterator

import rich.bar
import rich.box
import rich.console
import rich.panel
import rich.progress_bar
import rich.table
import rich.text

from autoshard.launch.goodput import Activity, Goodput
from autoshard.launch.report import event_line, place, sizes
from autoshard.launch.status import RunState, RunStatus
from autoshard.printing import counted, duration

_COLOURS = {
    Activity.PRODUCTIVE: "green",
    Activity.STARTUP: "yellow",
    Activity.PLANNING: "magenta",
    Activity.COMPILE: "cyan",
    Activity.RESTORE: "blue",
    Activity.REDONE: "red",
    Activity.STALL: "bright_red",
    Activity.EVALUATION: "bright_cyan",
    Activity.SAVING: "bright_blue",
    Activity.DOWN: "bright_black",
}
_STATES = {
    RunState.RUNNING: "green",
    RunState.DRAINING: "yellow",
    RunState.RESTARTING: "yellow",
    RunState.FINISHED: "green",
    RunState.STOPPED: "yellow",
    RunState.FAILED: "bold red",
    RunState.ABANDONED: "bold red",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """How many there may be of each kind."""

    workers: int = 8
    activities: int = len(Activity)
    events: int = 10


_LESS = (
    *(Rows(events=events) for events in range(10, 2, -1)),
    *(Rows(workers=workers, events=3) for workers in (4, 2, 0)),
    *(Rows(workers=0, activities=activities, events=3) for activities in (6, 4, 3, 2)),
)
"""From what is shown where there is room for everything to what fits a terminal of 24 lines."""


def display(
    status: RunStatus, run_dir: pathlib.Path, total_steps: int | None, rows: Rows | None = None
) -> rich.console.RenderableType:
    """The state of a run.

    Args:
        status: what is known of it.
        run_dir: its output folder.
        total_steps: steps that it is to take, if that is known.
        rows: how much of it to show.
    """
    state = (status.state.value, _STATES[status.state])
    return rich.panel.Panel(
        rich.console.Group(*_parts(status, run_dir, total_steps, rows or Rows())),
        title=rich.text.Text.assemble((str(run_dir), "bold"), ": ", state),
        title_align="left",
        box=rich.box.ROUNDED,
    )


def fitted(
    console: rich.console.Console, status: RunStatus, run_dir: pathlib.Path, total_steps: int | None
) -> rich.console.RenderableType:
    """The state of a run, with as much as the console has lines for."""
    for rows in _LESS:
        shown = display(status, run_dir, total_steps, rows)
        if len(console.render_lines(shown)) < console.height:
            return shown
    return display(status, run_dir, total_steps, Rows(workers=0, activities=1, events=1))


def _parts(
    status: RunStatus, run_dir: pathlib.Path, total_steps: int | None, rows: Rows
) -> Iterator[rich.console.RenderableType]:
    yield _facts(status, run_dir, total_steps)
    if status.workers and rows.workers:
        yield _heading("Workers")
        yield from _workers(status, rows.workers)
    if status.goodput.total_s:
        measured = status.goodput
        yield _heading(f"Goodput {measured.fraction:.1%} of {duration(measured.total_s)}")
        yield _goodput(measured, rows.activities)
    yield _heading("Last events")
    events = _grid()
    for event in status.recent[-rows.events :]:
        events.add_row(*event_line(event).split("  ", 1))
    yield events


def _facts(status: RunStatus, run_dir: pathlib.Path, total_steps: int | None) -> rich.table.Table:
    grid = _grid("dim")
    if status.generation:
        began = f"{status.generation}, started {duration(status.now_s - status.started_s)} ago: {status.why}"
        grid.add_row("generation", began)
    wanted = sizes(status.least_workers, status.most_workers)
    grid.add_row("workers", f"{len(status.workers)} of {wanted}, engine {status.engine}")
    if status.mesh:
        grid.add_row("mesh", status.mesh)
    if status.plan:
        plan, folder = pathlib.Path(status.plan), run_dir.absolute()
        grid.add_row("plan", str(run_dir / plan.relative_to(folder) if plan.is_relative_to(folder) else plan))
    grid.add_row("step", _step(status, total_steps))
    if status.saved:
        ago = lambda time_s: duration(status.now_s - time_s)
        saved = (f"step {one.step:,} {place(one.tier)}, {ago(one.time_s)} ago" for one in status.saved)
        grid.add_row("saved", "; ".join(saved))
    if (metrics := status.metrics) is not None:
        loss = "not finite" if metrics.loss is None else f"{metrics.loss:.4f}"
        grid.add_row("loss", f"{loss} after step {metrics.step:,}")
        if metrics.items_per_s is not None:
            compiling = ", compiling included" if metrics.compiled else ""
            grid.add_row("speed", f"{metrics.items_per_s:,.0f} {metrics.item}/s{compiling}")
    return grid


def _step(status: RunStatus, total_steps: int | None) -> rich.console.RenderableType:
    phase = f" {status.phase.value}" if status.phase else ""
    if total_steps is None:
        return f"{status.step:,}{phase}"
    row = rich.table.Table.grid(padding=(0, 1))
    bar = rich.progress_bar.ProgressBar(total=total_steps, completed=status.step, width=24)
    row.add_row(f"{status.step:,} of {total_steps:,}", bar, phase)
    return row


def _workers(status: RunStatus, most: int) -> Iterator[rich.console.RenderableType]:
    """Those that are not well come first, if there are too many for all of them."""
    is_well = lambda state: state in ("alive", "")
    chosen = sorted(status.workers, key=lambda worker: (is_well(worker.state), worker.rank))[:most]
    table = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("rank", "slot", "pid"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("host", overflow="ellipsis", no_wrap=True)
    table.add_column("state", overflow="fold")
    for worker in sorted(chosen, key=lambda worker: worker.rank):
        state = rich.text.Text(worker.state, style="" if is_well(worker.state) else "red")
        table.add_row(str(worker.rank), str(worker.slot), str(worker.pid), worker.host, state)
    yield table
    if more := status.workers[len(chosen) :]:
        yield rich.text.Text(f"and {counted(len(more), 'more worker')}", style="dim")


def _goodput(measured: Goodput, most: int) -> rich.table.Table:
    """A row for each activity that took time, the productive one first, then by time; the last ones together."""
    table = rich.table.Table.grid(padding=(0, 2, 0, 0), expand=True)
    for justify in ("left", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    table.add_column(ratio=1)
    took = {activity: took_s for activity in Activity if (took_s := measured.seconds(activity))}
    ranked = sorted(took, key=lambda one: (one is not Activity.PRODUCTIVE, -took[one]))
    shown, others = (ranked, []) if len(ranked) <= most else (ranked[: most - 1], ranked[most - 1 :])
    parts = [(activity.value, took[activity], _COLOURS[activity]) for activity in shown]
    if others:
        parts.append(("others", sum(took[activity] for activity in others), "white"))
    for name, took_s, colour in parts:
        bar = rich.bar.Bar(measured.total_s, 0, took_s, color=colour)
        table.add_row(name, duration(took_s), f"{took_s / measured.total_s:.1%}", bar)
    return table


def _heading(text: str) -> rich.text.Text:
    return rich.text.Text(f"\n{text}", style="bold")


def _grid(style: str = "") -> rich.table.Table:
    """Names or times at the left, what there is to say beside them."""
    grid = rich.table.Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style=style, no_wrap=True)
    grid.add_column(overflow="fold")
    return grid
