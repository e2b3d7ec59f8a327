"""What runs on a node of a Ray cluster for one worker there: the actor that owns the worker's processes.

It starts, hears and kills them as the local engine does, by the same code. It dies with its node and with the driver;
its processes then see their standard input end, and end themselves.
"""

import asyncio
import dataclasses
import os
import pathlib
import socket
import time
from collections.abc import Sequence

from autoshard.launch.engines.local import LocalEngine
from autoshard.launch.engines.protocol import Command, Exit, Line, Process, Slot

_LOOK_S = 0.02
"""Time between two looks at pipes and processes while nobody has said anything."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where an actor runs: its node's number in Ray, and what a `Slot` tells of it."""

    node_id: str
    host: str
    memory_dir: str


class WorkerActor:
    """Methods take turns on one event loop, so that none needs a lock; `open` comes first.

    Processes have the numbers of the actor's own engine here.
    """

    _engine: LocalEngine

    async def open(self, run_dir: str, working_dir: str) -> Place:
        """Where the actor runs.

        Args:
            run_dir: the run's output folder, the same on all nodes.
            working_dir: working directory of the processes, that of the driver.

        Raises:
            OSError: there is no such working directory on this node.
        """
        import ray  # pyright: ignore[reportMissingImports]

        os.chdir(working_dir)
        node_id = ray.get_runtime_context().get_node_id()
        host = f"{socket.gethostname()}-{node_id[:8]}"  # on one machine there may be several nodes, as in tests
        self._engine = LocalEngine(pathlib.Path(run_dir), 1, host=host, address=ray.util.get_node_ip_address())
        return Place(node_id, host, self._engine.capacity()[0].memory_dir)

    async def free_address(self, slot: Slot) -> str:
        """As of `Engine`."""
        return self._engine.free_address(slot)

    async def start(self, slot: Slot, command: Command) -> Process:
        """As of `Engine`."""
        return self._engine.start(slot, command)

    async def send(self, process: int, text: str) -> None:
        """As of `Engine`."""
        self._engine.send(process, text)

    async def terminate(self, process: int) -> None:
        """As of `Engine`."""
        self._engine.terminate(process)

    async def poll(self, timeout_s: float) -> Sequence[Line | Exit]:
        """As of `Engine`; other methods run while it waits."""
        until = time.monotonic() + timeout_s
        while not (news := self._engine.poll(0)) and time.monotonic() < until:
            await asyncio.sleep(_LOOK_S)
        return news

    async def stop(self, processes: Sequence[int]) -> None:
        """As of `Engine`."""
        self._engine.stop(processes)

    async def forget_memory(self) -> None:
        """As of `Engine`."""
        self._engine.forget_memory()

    async def close(self) -> None:
        """As of `Engine`."""
        self._engine.close()
