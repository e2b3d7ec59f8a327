"""A generation that only plans and compiles, so that a later one of its size need not."""

import time
from collections.abc import Sequence

import pydantic

from autoshard.launch.engines.protocol import Exit, Line, Process
from autoshard.launch.failures import cause_of
from autoshard.launch.messages import Failed, read_from_worker

NICENESS = 19
"""The lowest priority: a dry run takes what the training processes leave."""


class DryRun:
    """The workers of a dry run: they take one step from the initial state, in the size that may be next, and end."""

    def __init__(self, workers: Sequence[Process]):
        """Args:
        workers: by rank.
        """
        self.processes = tuple(worker.number for worker in workers)
        self._running = set(self.processes)
        self._started_s, self._ended_s = time.monotonic(), 0.0
        self._error = ""

    def has(self, process: int) -> bool:
        """Whether a process is one of its workers."""
        return process in self.processes

    def take(self, news: Line | Exit) -> None:
        """Takes what a worker said, or its end."""
        if isinstance(news, Exit):
            self._running.discard(news.process)
            self._ended_s = time.monotonic()
            if news.status != 0 and not self._error:
                self._error = cause_of(news.status)
            return
        try:
            message = read_from_worker(news.text)
        except pydantic.ValidationError:
            return
        if isinstance(message, Failed) and not message.is_peer_loss:
            self._error = f"{message.error}: {message.message}"

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it."""
        return not self._running or bool(self._error)

    @property
    def is_complete(self) -> bool:
        """Whether all workers planned, compiled and took their step."""
        return not self._running and not self._error

    @property
    def error(self) -> str:
        """Why it failed; empty if it did not."""
        return self._error

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self._ended_s - self._started_s
