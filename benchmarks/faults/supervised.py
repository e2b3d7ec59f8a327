"""A run under `autoshard launch` as processes of this machine, followed by its log."""

import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import psutil

from autoshard.launch.events import Event, EventReader, GenerationStarted, WorkerEntry
from autoshard.run_processes import RUN_VARIABLE

POLL_S = 0.005
"""Between two looks at the log: a phase of a small run may last for some hundredths of a second."""


class SupervisedRun:
    """A supervisor and what it started.

    Attributes:
        run_dir: the run's output folder.
        events: all that the log holds so far.
    """

    def __init__(self, config: pathlib.Path, run_dir: pathlib.Path, options: Sequence[str]):
        """Args:
        config: the run's configuration, whose output folder is `run_dir`.
        options: of `autoshard launch`.
        """
        self.run_dir = run_dir
        self.events: list[Event] = []
        self._command = [sys.executable, "-m", "autoshard", "launch", str(config), *options]
        self._reader = EventReader(run_dir)
        self._supervisor: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts a supervisor, the first one or the next one."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with (self.run_dir / "supervisor.log").open("ab") as log:
            self._supervisor = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def supervisor(self) -> int:
        """The process number of the supervisor."""
        assert self._supervisor is not None
        return self._supervisor.pid

    @property
    def exit_status(self) -> int | None:
        """Of the supervisor; None while it runs."""
        assert self._supervisor is not None
        return self._supervisor.poll()

    def read(self) -> list[Event]:
        """What is new in the log."""
        new = list(self._reader.new())
        self.events += new
        return new

    def wait(self, is_there: Callable[[], bool], timeout_s: float) -> bool:
        """Reads the log until a condition holds, the supervisor ends, or time is up; whether the condition holds."""
        until_s = time.monotonic() + timeout_s
        while True:
            self.read()
            if is_there():
                return True
            if time.monotonic() > until_s or self.exit_status is not None:
                self.read()
                return is_there()
            time.sleep(POLL_S)

    def workers(self) -> tuple[WorkerEntry, ...]:
        """The workers of the newest generation."""
        started = [event for event in self.events if isinstance(event, GenerationStarted)]
        return started[-1].workers if started else ()

    def processes(self) -> list[psutil.Process]:
        """The processes of the run that live, without its supervisor: workers, standbys, and whatever they started."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(RUN_VARIABLE) == str(self.run_dir) and process.status() != "zombie":
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def await_ready_processes(self, timeout_s: float) -> bool:
        """Waits until there is a process kept ready for each worker, and these have nothing to do any more."""
        until_s, used_s = time.monotonic() + timeout_s, math.inf
        while time.monotonic() < until_s:
            workers = {worker.pid for worker in self.workers()}
            others = [process for process in self.processes() if process.pid not in workers]
            before_s, used_s = used_s, sum(sum(process.cpu_times()[:2]) for process in others)
            if len(others) >= len(workers) and used_s - before_s < 0.02:
                return True
            time.sleep(1.0)
            self.read()
        return False

    def left_after(self, timeout_s: float) -> list[str]:
        """The processes of the run that are still there so long after its supervisor ended."""
        until_s = time.monotonic() + timeout_s
        while (left := self.processes()) and time.monotonic() < until_s:
            time.sleep(0.05)
        return [f"{process.pid}: {' '.join(process.cmdline()[:5])}" for process in left if process.is_running()]

    def kill_supervisor(self) -> None:
        """Kills the supervisor alone, as a machine that runs out of memory would."""
        assert self._supervisor is not None
        self._supervisor.kill()
        self._supervisor.wait()

    def end(self) -> None:
        """Kills whatever of the run is left."""
        if self._supervisor is not None and self._supervisor.poll() is None:
            self.kill_supervisor()
        for process in self.processes():
            try:
                process.kill()
            except psutil.Error:
                continue


def signal_process(pid: int, number: signal.Signals) -> bool:
    """Sends a signal; whether the process was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
