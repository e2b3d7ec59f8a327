"""Processes beside this one that search meshes, so that a search takes all cores of the machine.

What a search does is mostly Python, which one process runs one line of at a time. Each process is one of its own,
started by its file: it never imports the user's main module, as a forked or spawned one would, and never asks for a
device. `side_by_side.py` shares the meshes out.
"""

import dataclasses
import os

from autoshard.child_process import ChildProcess, packed
from autoshard.planner.program import Program
from autoshard.plans.options import PlanOptions
from autoshard.solver.warm_up import ALWAYS, WITHIN_CAPACITY

LARGE = 10_000
"""Programs of fewer equations are searched in this process alone: a process is ready after some seconds (3.5 s of the
processor for its imports, and one for a program of 30,000 equations)."""

_MOST = 4
"""How many processes search at once, this one included, where nothing is asked for: each takes as much memory as a
search does (1.2 GB for GPT-3 with 96 layers, unrolled)."""


@dataclasses.dataclass(frozen=True, slots=True)
class NewProgram:
    """A program that the requests that follow are about; it takes the place of the one before."""

    program: Program


def processes_of(options: PlanOptions) -> "SearchProcesses":
    """The processes that options allow beside this one; they are not started yet."""
    if options.work_limit is not None:
        return SearchProcesses(0)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return SearchProcesses((options.processes or min(cores, _MOST)) - 1)


class SearchProcesses:
    """Processes that are started once they are needed; a context manager that ends them.

    Attributes:
      count: How many there are beside this one, at most.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._children: list[ChildProcess | None] = [None] * count
        self._known = [-1] * count  # the program that each was told last
        self._number = 0
        self._latest: tuple[Program, bytes] | None = None

    def __enter__(self) -> "SearchProcesses":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in range(self.count):
            self.end(process)
        self.count = 0  # none begins any more, whoever still knows of them

    def begin(self, program: Program) -> bool:
        """Starts them, if a search for this program is worth it and can go on in them at once; whether it is.

        Returns at once but for making the program ready to be sent.
        """
        is_worth = self.count > 0 and len(program.graph.equations) >= LARGE
        # no process waits for kernels that others compile
        if not is_worth or not all(stage.is_on_disk() for stage in (*ALWAYS, *WITHIN_CAPACITY)):
            return False
        for process, child in enumerate(self._children):
            if child is None or not child.is_alive:
                program_of_child = ["-m", "autoshard.plans.search_process"]
                self._children[process] = ChildProcess(program_of_child, {"JAX_PLATFORMS": "cpu"}, is_silent=True)
                self._known[process] = -1
        if self._latest is None or self._latest[0] is not program:
            self._number += 1
            self._latest = program, packed(NewProgram(program))
        return True

    def ask(self, process: int, request: bytes) -> object | None:
        """What a process answers to a request about the program of `begin`; None if it failed, and is gone."""
        child = self._children[process]
        assert child is not None and self._latest is not None
        is_good, answer = True, None
        if self._known[process] != self._number:
            is_good, _ = child.exchange(self._latest[1])
            self._known[process] = self._number
        if is_good:
            is_good, answer = child.exchange(request)
        if not is_good:
            self.end(process)
        return answer if is_good else None

    def end(self, process: int) -> None:
        """Ends a process; another takes its place once it is needed."""
        child, self._children[process] = self._children[process], None
        if child is not None:
            child.end()
