"""Where reports go: the terminal, `metrics.jsonl`, and TensorBoard if it is asked for."""

import contextlib
import pathlib

import rich.console

from autoshard.train.config import TrainSection
from autoshard.train.display import Display
from autoshard.train.metrics import MetricsFile, Report
from autoshard.train.tensorboard import TensorBoard


class Reports:
    """All that a process says while it trains. A context manager."""

    def __init__(
        self,
        section: TrainSection,
        folder: pathlib.Path | None,
        console: rich.console.Console,
        after_step: int,
        generation: int = 0,
    ):
        """Opens the files in `folder`; what they tell of steps after `after_step` is forgotten.

        Args:
            section: which reports are wanted.
            folder: the run's folder; None for a process that leaves the files to another.
            console: where to print.
            after_step: the step that the run continues from, or 0.
            generation: of a supervised run, which the lines of the file tell; 0 without a supervisor.
        """
        self._display = Display(console, section.steps, after_step)
        self._file = None if folder is None else MetricsFile(folder / "metrics.jsonl", after_step, generation)
        self._board = TensorBoard(folder / "tensorboard", after_step) if folder and section.tensorboard else None
        self._open = contextlib.ExitStack()
        self._has_warned = False

    def __enter__(self) -> "Reports":
        self._open.enter_context(self._display)
        if self._board is not None:
            self._open.enter_context(self._board)
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def advance(self) -> None:
        """One more step is done."""
        self._display.advance()

    def report(self, report: Report) -> None:
        """Writes and shows a report. A file that cannot be written costs a warning, and no training step."""
        for file in (self._file, self._board):
            if file is not None:
                try:
                    file.write(report)
                except OSError as error:
                    if not self._has_warned:
                        self.say(f"warning: the metrics cannot be written: {error}. The run goes on.")
                    self._has_warned = True
        self._display.report(report)

    def say(self, text: str) -> None:
        """Shows a line of text."""
        self._display.say(text)
