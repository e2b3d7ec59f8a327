"""One generation of a run: its workers, what they said, and how it ended."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import pydantic

from autoshard.launch import events
from autoshard.launch.engines.protocol import Exit, Line, Process
from autoshard.launch.failures import STALLED, Loss, cause_of, origin
from autoshard.launch.messages import (
    Committed,
    Drain,
    Drained,
    Failed,
    Finished,
    FromWorker,
    Heartbeat,
    NotSaved,
    Phase,
    Planned,
    Rejected,
    Restored,
    Straggler,
    Tier,
    read_from_worker,
)
from autoshard.launch.progress import LearntLimits, Progress

GRACE_S = 0.15
"""How long to wait after a loss for others, which tells those that fell from those that were pulled along."""

ORIGIN_S = 3.0
"""How long instead, where all so far were pulled along: a lost host is noticed later than what it does to others."""

FAREWELL_S = 10.0
"""Time for workers to end by themselves after the first of them told that the run is complete."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How a generation ended: complete, drained, or by losses; none of them if it was given up before its first step.

    Attributes:
        finished, drained: what the first worker told.
        preempted: slots whose workers were told by a signal of their own to end.
        losses: the workers that failed, without those that only followed.
    """

    finished: Finished | None = None
    drained: Drained | None = None
    preempted: tuple[int, ...] = ()
    losses: tuple[Loss, ...] = ()


class Generation:
    """The running workers of one generation."""

    def __init__(
        self, number: int, workers: Sequence[Process], limits: LearntLimits, write: Callable[[events.Event], None]
    ):
        """Args:
        number: the generation's.
        workers: by rank.
        limits: of the run.
        write: takes events.
        """
        self.number = number
        self.workers = tuple(workers)
        self.last_committed: int | None = None
        """The newest step that this generation made safe; None before the first."""
        self.last_on_disk: int | None = None
        """Likewise, on disk."""
        self.planned: events.Replanned | None = None
        """The plan of this generation, once it is known."""
        self.is_training = False
        """Whether it is past everything that comes before its first step."""
        self.is_draining = False
        self._write = write
        self._ranks = {worker.number: rank for rank, worker in enumerate(workers)}
        self._limits = limits
        self._progress = Progress(limits, tuple(self._ranks), time.monotonic())
        self._phase = Phase.STARTUP
        self._reports: dict[int, Failed] = {}
        self._losses: list[Loss] = []
        self._lost_s = 0.0
        self._ended: set[int] = set()
        self._memory_parts: dict[int, set[int]] = {}
        self._drained: dict[int, Drained] = {}
        self._finished: Finished | None = None
        self._complete_s: float | None = None
        write(events.PhaseStarted(time=time.time(), generation=number, phase=Phase.STARTUP, step=0))

    def has(self, process: int) -> bool:
        """Whether a process is one of its workers."""
        return process in self._ranks

    def take(self, news: Line | Exit) -> None:
        """Takes what a worker said, or its end."""
        if isinstance(news, Exit):
            self._took_exit(news)
            return
        try:
            message = read_from_worker(news.text)
        except pydantic.ValidationError:  # a line cut short by a kill
            return
        self._progress.heard(news.process, message if isinstance(message, Heartbeat) else None, time.monotonic())
        self._took(news.process, message)

    def outcome(self) -> Outcome | None:
        """How the generation ended; None while it goes on."""
        now_s = time.monotonic()
        is_left = len(self._ended) < len(self.workers)
        if self._complete_s is not None:
            if is_left and now_s - self._complete_s < FAREWELL_S:
                return None
            if self._finished is not None:
                return Outcome(finished=self._finished)
            first = self._drained[self.workers[0].number]
            preempted = tuple(w.slot.number for w in self.workers if self._was_preempted(w.number))
            return Outcome(drained=first, preempted=preempted)
        if not self._losses:
            self._look_for_stalls(now_s)
        grace_s = ORIGIN_S if all(loss.is_consequence for loss in self._losses) else GRACE_S
        if self._losses and (now_s - self._lost_s >= grace_s or not is_left):
            return Outcome(losses=origin(self._losses))
        return None

    def drain_message(self, why: str) -> str | None:
        """What to send to all workers to drain them; None if that was done."""
        if self.is_draining:
            return None
        self.is_draining = True
        self._write(events.DrainStarted(time=time.time(), generation=self.number, why=why))
        return Drain(why=why).line()

    def _was_preempted(self, process: int) -> bool:
        return process in self._drained and self._drained[process].by_signal

    def _took(self, process: int, message: FromWorker) -> None:
        stamp: dict[str, Any] = {"time": time.time(), "generation": self.number}
        is_first = self._ranks[process] == 0
        match message:
            case Heartbeat(phase=phase, step=step) if is_first and phase is not self._phase:
                self._phase = phase
                self.is_training = self.is_training or phase is Phase.TRAINING
                self._write(events.PhaseStarted(**stamp, phase=phase, step=step))
            case Planned():
                self.planned = events.Replanned(**stamp, **_fields(message))
                self._write(self.planned)
            case Restored():
                self._write(events.Restored(**stamp, **_fields(message)))
            case Committed():
                self._took_commit(process, message)
            case Rejected():
                self._write(events.CheckpointRejected(**stamp, **_fields(message)))
            case NotSaved():
                self._write(events.CheckpointNotSaved(**stamp, **_fields(message)))
            case Straggler():
                self._write(events.StragglerFound(**stamp, **_fields(message)))
            case Failed():
                self._reports[process] = message
            case Drained():
                self._drained[process] = message
                if is_first:
                    self._complete_s = time.monotonic()
            case Finished() if is_first:
                self._finished, self._complete_s = message, time.monotonic()

    def _took_commit(self, process: int, message: Committed) -> None:
        """On disk the first worker tells for all; in memory each tells for its part."""
        if message.tier is Tier.MEMORY:
            parts = self._memory_parts.setdefault(message.step, set())
            parts.add(process)
            if len(parts) < len(self.workers):
                return
            self._memory_parts = {step: told for step, told in self._memory_parts.items() if step > message.step}
        else:
            self.last_on_disk = max(message.step, self.last_on_disk or 0)
        self.last_committed = max(message.step, self.last_committed or 0)
        self._write(events.StepCommitted(time=time.time(), generation=self.number, **_fields(message)))

    def _took_exit(self, news: Exit) -> None:
        self._ended.add(news.process)
        if self._complete_s is None and not (news.status == 0 and news.process in self._drained):
            self._lose(news.process, cause_of(news.status), "")

    def _look_for_stalls(self, now_s: float) -> None:
        for stall in self._progress.stalls(now_s):
            if stall.process not in self._ended:
                self._lose(stall.process, STALLED, stall.detail)
        if self._losses:
            self._limits.stalled()
            self._lost_s = now_s - ORIGIN_S  # nobody else is expected

    def _lose(self, process: int, cause: str, detail: str) -> None:
        worker, report = self.workers[self._ranks[process]], self._reports.get(process)
        phase, step, changed_s = self._progress.where(process)
        if not self._losses:
            self._lost_s = time.monotonic()
        if report is not None:
            step, detail = report.step, f"{report.error}: {report.message}"
        self._losses.append(
            Loss(
                rank=self._ranks[process],
                pid=worker.pid,
                slot=worker.slot.number,
                host=worker.slot.host,
                cause=cause,
                phase=phase,
                step=step,
                since_progress_s=time.monotonic() - changed_s,
                report=report,
                detail=detail,
            )
        )


def _fields(message: pydantic.BaseModel) -> dict[str, Any]:
    """The fields that an event shares with the message it records."""
    return message.model_dump(exclude={"kind"})
