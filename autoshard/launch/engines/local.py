"""Workers as processes of this machine: the default, and what other engines start on each of their hosts."""

import contextlib
import pathlib
import selectors
import socket
import time
from collections.abc import Sequence

from autoshard.launch.engines.host_memory import close_host_memory, forget_host_memory, open_host_memory
from autoshard.launch.engines.protocol import Command, Exit, Line, Process, Slot
from autoshard.launch.engines.worker_process import WorkerProcess

LOOPBACK = "127.0.0.1"

_EXIT_CHECK_S = 0.05
"""The end of a process closes its pipe, which is noticed at once; this is for one whose children keep it open."""


class LocalEngine:
    """Processes of this machine."""

    name = "local"

    def __init__(self, run_dir: pathlib.Path, num_slots: int, host: str | None = None, address: str = LOOPBACK):
        """Offers `num_slots` places for the run in `run_dir`.

        Args:
            run_dir: the run's output folder.
            num_slots: how many workers may run.
            host: this machine's name for people, one name for one memory; None for its host name.
            address: at which the workers reach each other.

        Raises:
            FolderError: the run's folder in this host's memory could be written to by others.
        """
        host = host or socket.gethostname()
        self._address = address
        self._memory_dir = open_host_memory(run_dir, host)
        self._slots = tuple(Slot(number, host, str(self._memory_dir)) for number in range(num_slots))
        self._processes: dict[int, WorkerProcess] = {}
        self._started = 0

    def capacity(self) -> Sequence[Slot]:
        return self._slots

    def why_few(self) -> str:
        return ""

    def free_address(self, slot: Slot) -> str:
        with socket.socket() as found:
            found.bind((self._address, 0))
            return f"{self._address}:{found.getsockname()[1]}"

    def start(self, slot: Slot, command: Command) -> Process:
        self._started += 1
        process = WorkerProcess(command, f"slot-{slot.number}.log")
        self._processes[self._started] = process
        return Process(self._started, process.pid, slot)

    def send(self, process: int, text: str) -> None:
        if process in self._processes:
            self._processes[process].send(text)

    def terminate(self, process: int) -> None:
        if process in self._processes:
            self._processes[process].terminate()

    def poll(self, timeout_s: float) -> Sequence[Line | Exit]:
        until = time.monotonic() + timeout_s
        while True:
            news = [item for number in tuple(self._processes) for item in self._news(number)]
            left_s = until - time.monotonic()
            if news or left_s <= 0:
                return news
            self._wait(min(left_s, _EXIT_CHECK_S))

    def stop(self, processes: Sequence[int]) -> None:
        for number in processes:
            if process := self._processes.pop(number, None):
                process.kill()

    def close(self) -> None:
        self.stop(tuple(self._processes))
        close_host_memory(self._memory_dir)

    def forget_memory(self) -> None:
        forget_host_memory(self._memory_dir)

    def _news(self, number: int) -> list[Line | Exit]:
        process = self._processes[number]
        status = process.exit_status()  # before the last lines are read, so that none is missed
        news: list[Line | Exit] = [Line(number, text) for text in process.lines()]
        if status is not None:
            self.stop([number])
            news.append(Exit(number, status))
        return news

    def _wait(self, timeout_s: float) -> None:
        with selectors.DefaultSelector() as selector:
            for process in self._processes.values():
                with contextlib.suppress(ValueError, KeyError):
                    selector.register(process.messages, selectors.EVENT_READ)
            selector.select(timeout_s)
