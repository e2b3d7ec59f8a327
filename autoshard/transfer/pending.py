"""Watches what other processes owe this one, so that waiting for it ends."""

import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax

from autoshard.errors import TransferError
from autoshard.transfer.shard_programs import plain

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1e-5, 1e-3
"""Between two looks whether an array is ready: short at first, so that little is lost where it nearly is. After the
longest, a thread waits for it, and tells at once."""

_LOOK_S = 0.02
"""Between two looks at what is owed, while that thread waits."""

MOST_PENDING = 8
"""Parts that may be on their way to this process at a time. JAX takes about 32 computations for a device that cannot
run yet, then handing it more blocks, without end if a process stalls. For each part there are at most three: the
look whether it is there, its joining with others, and a sum."""

_BLAME_S = 1.0
"""How long a failed computation waits to learn whether a failed transfer was the cause."""


@dataclasses.dataclass(frozen=True, slots=True)
class PendingTransfer:
    """A part that was asked of another process, or the result of a program that runs on devices of several.

    Attributes:
      name: Of the tensor.
      processes: Who sends it, or who else runs the program.
      asked_s: When it was asked for, on the monotonic clock.
      marker: A small array that is ready when the part is, and fails when it does. The part itself is not kept: its
        memory may be needed, and it may be donated.
    """

    name: str
    processes: tuple[int, ...]
    asked_s: float
    marker: jax.Array

    @property
    def who(self) -> str:
        """The processes, for a message."""
        numbers = ", ".join(map(str, self.processes))
        return f"process {numbers}" if len(self.processes) == 1 else f"processes {numbers}"


class PendingTransfers:
    """What is owed to this process.

    Args:
      timeout_s: How long a process may let this one wait without sending anything.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._pending: list[PendingTransfer] = []
        self._latest_s: dict[int, float] = {}
        self._marker_of = jax.jit(lambda part: part[(slice(0, 1),) * part.ndim])

    def expect(self, name: str, processes: Sequence[int], part: jax.Array) -> None:
        """Watches `part`, which `processes` send or help to make. Waits if too much is on its way already.

        Raises:
          TransferError: It has failed already; or the wait was too long, see `wait`.
        """
        if len(self._pending) >= MOST_PENDING:
            self.wait([one.marker for one in self._pending[: 1 - MOST_PENDING]])
        now_s = time.monotonic()
        try:
            self._pending.append(PendingTransfer(name, tuple(processes), now_s, self._marker_of(part)))
        except jax.errors.JaxRuntimeError as error:
            raise _lost(PendingTransfer(name, tuple(processes), now_s, part), 0.0, error) from error

    def look(self) -> None:
        """Strikes out what has arrived, without waiting.

        Raises:
          TransferError: Something failed to arrive.
        """
        now_s = time.monotonic()
        pending, self._pending = self._pending, []
        for one in pending:
            if not _is_ready(one.marker):
                self._pending.append(one)
                continue
            try:
                one.marker.block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                self._pending = pending  # whoever asks again is told again
                raise _lost(one, now_s - one.asked_s, error) from error
            self._latest_s.update(dict.fromkeys(one.processes, now_s))

    def wait(self, arrays: Any, timeout_s: float | None = None) -> None:
        """Blocks until all `arrays` are ready.

        Args:
          arrays: A pytree of arrays, received ones or what was computed from them. Leaves that are no arrays count
            as ready.
          timeout_s: Instead of the usual one.

        Raises:
          TransferError: Something that this process needs failed to arrive, or its sender let it wait for too long.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        begin_s = time.monotonic()
        pause_s = _SHORTEST_PAUSE_S
        waiting = [plain(leaf) for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array)]
        while pause_s < _LONGEST_PAUSE_S and (waiting := [array for array in waiting if not _is_ready(array)]):
            self.look()
            time.sleep(pause_s)
            pause_s *= 2
        if waiting and self._pending:  # if nothing is owed, it is this process that makes them
            is_over = _when_ready(waiting)
            while not is_over.wait(_LOOK_S):
                self.look()
                self._tell_of_silence(begin_s, timeout_s)
        self.look()
        try:
            jax.block_until_ready(arrays)
        except jax.errors.JaxRuntimeError:
            self.blame()
            raise

    def blame(self) -> None:
        """To be called when JAX raised an error: returns if no transfer can be the cause.

        Raises:
          TransferError: A transfer failed, or fails within a moment.
        """
        end_s = time.monotonic() + _BLAME_S
        while self._pending and time.monotonic() < end_s:
            self.look()
            time.sleep(_LOOK_S)

    def _tell_of_silence(self, begin_s: float, timeout_s: float) -> None:
        now_s = time.monotonic()
        for one in self._pending:
            silent_s = now_s - max(one.asked_s, begin_s, *(self._latest_s.get(p, begin_s) for p in one.processes))
            if silent_s > timeout_s:
                raise TransferError(
                    f"{one.name} must come from {one.who}, which has sent nothing for {silent_s:.1f} s "
                    f"(it was asked {now_s - one.asked_s:.1f} s ago, and {len(self._pending)} parts are awaited). "
                    "Look whether that process still runs, what it does, and whether this host can reach it; all "
                    "processes must make the same moves in the same order. If it is only slow, allow more than "
                    f"timeout_s={timeout_s:g}."
                )


def _is_ready(array: jax.Array) -> bool:
    return array.is_ready()  # pyright: ignore[reportAttributeAccessIssue] - missing in jax.Array's stub


def _when_ready(arrays: Sequence[jax.Array]) -> threading.Event:
    """Set when all `arrays` are ready or have failed. What waits for them is a thread that nobody waits for."""
    is_over = threading.Event()

    def wait() -> None:
        try:
            jax.block_until_ready(arrays)
        except jax.errors.JaxRuntimeError:
            pass  # whoever waits for the event asks the arrays themselves
        finally:
            is_over.set()

    threading.Thread(target=wait, daemon=True).start()
    return is_over


def _lost(one: PendingTransfer, after_s: float, error: Exception) -> TransferError:
    reason = str(error).strip().split("\n")[0].rstrip(".")
    return TransferError(
        f"{one.name} must come from {one.who}, but the transfer failed {after_s:.1f} s after it was asked for: "
        f"{reason}. That process has ended, or what it should send failed there: look at the end of its log for the "
        "cause, then start all processes again."
    )
