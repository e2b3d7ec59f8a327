"""What a run reports: a line of JSON per logged step in a file, and the same on the terminal."""

import dataclasses
import json
import pathlib

import rich.console
import rich.progress


@dataclasses.dataclass(frozen=True, slots=True)
class StepMetrics:
    """Measurements over the steps since the last report.

    Attributes:
        step: the last step measured, counted from 1.
        loss: its loss, in nats per token.
        step_time_s: mean wall-clock time per step.
        tokens_per_s: tokens read per second of that time.
        compiled: the time includes compiling the step.
    """

    step: int
    loss: float
    step_time_s: float
    tokens_per_s: float
    compiled: bool


class MetricsFile:
    """Appends measurements to a file of JSON lines."""

    def __init__(self, path: pathlib.Path, after_step: int):
        """Opens `path`, dropping lines of steps after `after_step`, which the run is about to take again."""
        kept = []
        if after_step and path.exists():
            kept = [line for line in path.read_text().splitlines() if _step_of(line) <= after_step]
        path.write_text("".join(f"{line}\n" for line in kept))
        self._path = path

    def write(self, metrics: StepMetrics) -> None:
        """Adds one line, complete on disk when this returns to readers of the file."""
        with self._path.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(metrics)) + "\n")


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # a line cut short when a run was killed
        return float("inf")


class Display:
    """Progress on the terminal: a live bar where there is one, and a line per report. A context manager."""

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

    def report(self, metrics: StepMetrics) -> None:
        """Shows a measurement."""
        rate = f"{metrics.step_time_s * 1e3:,.1f} ms/step, {metrics.tokens_per_s:,.0f} tokens/s"
        timing = f"{metrics.step_time_s:.1f} s, with compilation" if metrics.compiled else rate
        text = f"loss {metrics.loss:.3f}  {timing}"
        self._progress.update(self._task, report=text)
        self._console.print(f"step {metrics.step:>6}  {text}", highlight=False)
