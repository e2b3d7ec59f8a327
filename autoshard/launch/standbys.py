"""Warm standbys: processes that have imported everything and wait for an assignment, so that a restart need not.

ByteRobust (Wan et al. 2025, arXiv:2509.16293) keeps warm standby machines for the same reason; here each slot keeps a
process, which costs its memory and no time of the accelerator: no backend of JAX is started before the assignment.
"""

from collections.abc import Sequence

from autoshard.launch.engines.protocol import Command, Engine, Exit, Line, Process, Slot
from autoshard.launch.messages import Ready

_MOST_FAILURES = 3
"""Standbys that end by themselves before no more are started: then imports fail, and the next generation will tell."""


class Standbys:
    """The standbys of a run, at most one at each slot."""

    def __init__(self, engine: Engine, command: Command):
        """Args:
        engine: starts them.
        command: of a worker.
        """
        self._engine, self._command = engine, command
        self._at_slot: dict[int, Process] = {}
        self._ready: set[int] = set()
        self._failures = 0

    def take(self, slot: Slot) -> Process | None:
        """The standby at a slot, which is one no more; None without one."""
        return self._at_slot.pop(slot.number, None)

    def complete(self, slots: Sequence[Slot]) -> bool:
        """Whether each slot has one that is ready; starts the next one if not, one after another."""
        if any(process.number not in self._ready for process in self._at_slot.values()):
            return False
        missing = next((slot for slot in slots if slot.number not in self._at_slot), None)
        if missing is None or self._failures >= _MOST_FAILURES:
            return True
        self._at_slot[missing.number] = self._engine.start(missing, self._command)
        return False

    def take_news(self, news: Line | Exit) -> None:
        """Takes what a standby said, or its end; news of others changes nothing."""
        if isinstance(news, Line):
            if news.text == Ready().line().encode().rstrip():
                self._ready.add(news.process)
            return
        gone = [slot for slot, process in self._at_slot.items() if process.number == news.process]
        for slot in gone:
            del self._at_slot[slot]
            self._failures += 1
