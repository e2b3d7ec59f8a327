"""How workers ended, who of them was the first to fail, and whether the run may go on."""

import collections
import dataclasses
import signal
from collections.abc import Sequence

from autoshard.launch.messages import Failed, Phase
from autoshard.launch.settings import Budgets


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """The end of a worker that should not have ended.

    Attributes:
        rank, pid, slot, host: which worker it was, and where.
        cause: `signal 9`, `exit status 1`, `stalled` or `host lost`.
        phase, step: what it was at, and steps taken.
        since_progress_s: time since it changed either.
        report: what it told before it ended, if it could.
        detail: more in words.
    """

    rank: int
    pid: int
    slot: int
    host: str
    cause: str
    phase: Phase
    step: int
    since_progress_s: float
    report: Failed | None = None
    detail: str = ""

    @property
    def error(self) -> str:
        """What went wrong in the worker's own program; empty if it was ended from outside."""
        if self.report is not None:
            return f"{self.report.error}: {self.report.message}"
        if not self.cause.startswith(EXIT_STATUS):
            return ""
        return f"a worker ended by itself with {self.cause}; what it printed is in the folder logs of the run"

    @property
    def is_preemption(self) -> bool:
        """Its host went away or was told to end it, which is nobody's fault."""
        return self.cause in (HOST_LOST, f"signal {signal.SIGTERM.value}")

    @property
    def is_consequence(self) -> bool:
        """It looks like what happens to a worker whose peer is gone; so ends JAX's client when it loses others."""
        return self.cause == f"signal {signal.SIGABRT.value}" or (self.report is not None and self.report.is_peer_loss)


HOST_LOST = "host lost"
STALLED = "stalled"
EXIT_STATUS = "exit status"


def cause_of(status: int | None) -> str:
    """The cause of an exit in words, by its status; None where the host is gone."""
    if status is None:
        return HOST_LOST
    return f"signal {-status}" if status < 0 else f"{EXIT_STATUS} {status}"


def origin(losses: Sequence[Loss]) -> tuple[Loss, ...]:
    """Of workers that ended at about the same time, those that others followed; the first if all look like followers.

    Args:
        losses: in the order in which they were noticed; not empty.
    """
    return tuple(loss for loss in losses if not loss.is_consequence) or (losses[0],)


class FailureCount:
    """The failures of a run so far, against its budgets."""

    def __init__(self, budgets: Budgets):
        self._budgets = budgets
        self._preemptions = self._crashes = 0
        self._at_step: collections.Counter[tuple[int, str]] = collections.Counter()
        self._at_slot: collections.Counter[int] = collections.Counter()

    def add(self, losses: Sequence[Loss]) -> str | None:
        """Counts the losses that ended a generation.

        Returns:
            Why the run must end, or None if it may go on.
        """
        for loss in losses:
            if loss.report is not None and loss.report.is_final:
                return f"{loss.report.error}: {loss.report.message}"
            if loss.is_preemption:
                self._preemptions += 1
            else:
                self._crashes += 1
            self._at_slot[loss.slot] += 1
        budgets = self._budgets
        if budgets.preemptions is not None and self._preemptions > budgets.preemptions:
            return f"{self._preemptions} workers were preempted, and --max-preemptions is {budgets.preemptions}."
        if self._crashes > budgets.crashes:
            return f"{self._crashes} workers crashed or stalled, and --max-crashes is {budgets.crashes}."
        for key in {(loss.step, loss.error) for loss in losses if loss.error and not loss.is_consequence}:
            self._at_step[key] += 1
            if self._at_step[key] >= budgets.at_one_step:
                step, error = key
                return f"Step {step + 1} failed {budgets.at_one_step} times with the same error: {error}"
        return None

    def made_progress(self) -> None:
        """A step was committed that had not been: what failed before is no longer in a row."""
        self._at_slot.clear()

    def failures_of(self, slot: int) -> int:
        """Failures in a row of the workers at a slot."""
        return self._at_slot[slot]
