"""What the supervisor asks of an engine: places for workers, processes there, and what they say."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """A place where one worker may run.

    Attributes:
        number: keeps naming the same place.
        host: name of the host, for people; slots of one host share its memory.
        memory_dir: folder in the host's memory that outlives the worker.
    """

    number: int
    host: str
    memory_dir: str


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """How the process of a worker is started.

    Attributes:
        arguments: the command line.
        environment: variables beside those that the engine's own processes have.
        log_dir: folder of the file `slot-<number>.log`, to which its output is appended.
        niceness: added to the priority's value; more than 0 for work that should not disturb the others.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    log_dir: str
    niceness: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """A process that an engine started: `number` is the engine's own, `pid` that of its host."""

    number: int
    pid: int
    slot: Slot


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One line that a process wrote to its message pipe."""

    process: int
    text: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Exit:
    """The end of a process: its exit status, negative for the signal that ended it; None if its host is gone."""

    process: int
    status: int | None


class Engine(Protocol):
    """Starts, watches and stops processes at slots."""

    @property
    def name(self) -> str:
        """`local` or `ray`."""
        ...

    def capacity(self) -> Sequence[Slot]:
        """The slots at which a worker can run now, in the order of preference; taken ones are among them."""
        ...

    def why_few(self) -> str:
        """A sentence on what a slot takes, for a person who waits for more of them; empty if there is none to tell."""
        ...

    def free_address(self, slot: Slot) -> str:
        """`host:port` of a free port at a slot, which the other slots reach."""
        ...

    def start(self, slot: Slot, command: Command) -> Process:
        """Starts a process, which waits for its assignment on its standard input."""
        ...

    def send(self, process: int, text: str) -> None:
        """Writes to the standard input of a process; nothing happens if it has ended."""
        ...

    def terminate(self, process: int) -> None:
        """Sends SIGTERM to a process; nothing happens if it has ended."""
        ...

    def poll(self, timeout_s: float) -> Sequence[Line | Exit]:
        """What processes said and which ended since the last call; waits at most `timeout_s` for the first news.

        Each process ends with exactly one `Exit`, after all of its lines.
        """
        ...

    def stop(self, processes: Sequence[int]) -> None:
        """Kills processes and all that they started, and returns when they are gone; no `Exit` follows."""
        ...

    def forget_memory(self) -> None:
        """Removes the run's folders in the memory of hosts, of those that are there now."""
        ...

    def close(self) -> None:
        """Stops whatever still runs, and frees what the engine holds."""
        ...
