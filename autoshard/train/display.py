"""Progress of a run on the terminal: a live bar where there is one, and a line for each report."""

import rich.console
import rich.progress

from autoshard.train.metrics import EvalReport, Report, StepReport


class Display:
    """A context manager; the bar is there while it is open."""

    def __init__(self, console: rich.console.Console, total_steps: int, done_steps: int):
        self._console = console
        self._progress = rich.progress.Progress(
            rich.progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            rich.progress.BarColumn(),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("{task.fields[report]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=done_steps, report="compiling")

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def advance(self) -> None:
        """One more step is done."""
        self._progress.advance(self._task)

    def report(self, report: Report) -> None:
        """Shows a report: on a line, and in short beside the bar."""
        match report:
            case StepReport(compiled=False):
                rate = f"{report.work.items / report.step_time_s:,.0f} {report.work.item}/s"
                self._progress.update(self._task, report=f"loss {report.metrics['loss']:.3f}, {rate}")
            case StepReport() | EvalReport():
                self._progress.update(self._task, report=f"loss {report.metrics['loss']:.3f}")
        self.say(report.line())

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
