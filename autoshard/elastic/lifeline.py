"""A worker's line to its supervisor: messages out, assignment and drain in, and death together.

Whatever happens to the supervisor, its workers do not outlive it: the end of standard input ends the process, and
where the system can (Linux), the kernel kills it before (`launch.engines.parent_death`).
"""

import collections
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

import pydantic

from autoshard.errors import ElasticError
from autoshard.launch.messages import (
    MESSAGES_FD,
    Assignment,
    Drain,
    FromSupervisor,
    FromWorker,
    Heartbeat,
    Phase,
    Ready,
    read_from_supervisor,
)

HEARTBEAT_S = 0.25
"""Time between two heartbeats without a change; also the longest time that a change of the step waits to be told."""

_STEP_S = 0.1
"""Least time between two heartbeats of steps: each costs the worker and the supervisor some tenths of a millisecond."""

_FLUSH_S = 5.0


class Lifeline:
    """The line of this process to the supervisor that started it."""

    def __init__(self, messages: int):
        """Takes over the message pipe and standard input.

        Args:
            messages: file descriptor of the message pipe.
        """
        self._messages = messages
        os.set_inheritable(messages, False)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._outgoing: collections.deque[str] = collections.deque()
        self._phase, self._step = Phase.STARTUP, 0
        self._told_s = 0.0
        self._drain: Drain | None = None
        self._is_closing = False
        self._threads: list[threading.Thread] = []

    @staticmethod
    def of_this_process() -> "Lifeline | None":
        """The line, if a supervisor started this process; None otherwise. It can be asked for once."""
        number = os.environ.pop(MESSAGES_FD, None)
        return None if number is None else Lifeline(int(number))

    def await_assignment(self) -> Assignment:
        """Tells that the process is ready, and waits for its part in a generation.

        Raises:
            ElasticError: the supervisor says something else first.
        """
        os.write(self._messages, Ready().line().encode())
        first = self._read()
        if not isinstance(first, Assignment):
            raise ElasticError(f"A worker is told its assignment first; received {first!r}. Use one version for all.")
        for target in (self._listen, self._speak):
            self._threads.append(threading.Thread(target=target, name=f"lifeline-{target.__name__}", daemon=True))
            self._threads[-1].start()
        return first

    @property
    def drain(self) -> Drain | None:
        """What the supervisor wants ended and why, if it does."""
        return self._drain

    @property
    def step(self) -> int:
        """Steps taken, as told last."""
        return self._step

    @property
    def phase(self) -> Phase:
        """What the worker is at, as told last."""
        return self._phase

    def at(self, phase: Phase, step: int | None = None) -> None:
        """Tells that the worker is at something else now."""
        step = self._step if step is None else step
        with self._lock:
            is_new_phase = phase is not self._phase
            self._phase, self._step = phase, step
        if is_new_phase or time.monotonic() - self._told_s > _STEP_S:
            self._wake.set()

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Within the block the worker is at `phase`, and then again at what it was at before."""
        before = self._phase
        self.at(phase)
        yield
        self.at(before)

    def tell(self, message: FromWorker) -> None:
        """Sends a message; it does not wait for the supervisor to read it."""
        with self._lock:
            self._outgoing.append(message.line())
        self._wake.set()

    def close(self) -> None:
        """Waits, for some seconds at most, until all messages are sent."""
        self._is_closing = True
        self._wake.set()
        for thread in self._threads[1:]:
            thread.join(_FLUSH_S)

    def _read(self) -> FromSupervisor:
        """The next line of the supervisor; ends the process when there is none."""
        line = sys.stdin.readline()
        if not line:
            os._exit(1)
        try:
            return read_from_supervisor(line)
        except pydantic.ValidationError as error:
            raise ElasticError(f"The supervisor says {line[:200]!r}, which this version does not know.") from error

    def _listen(self) -> None:
        while True:
            message = self._read()
            if isinstance(message, Drain):
                self._drain = message

    def _speak(self) -> None:
        while not (self._is_closing and not self._outgoing):
            self._wake.wait(HEARTBEAT_S)
            self._wake.clear()
            with self._lock:
                lines = [*self._outgoing, Heartbeat(phase=self._phase, step=self._step).line()]
                self._outgoing.clear()
            self._told_s = time.monotonic()
            content = "".join(lines).encode()
            while content:
                try:
                    content = content[os.write(self._messages, content) :]
                except BrokenPipeError:
                    return  # standard input ends as well
