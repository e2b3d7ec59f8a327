"""The supervisor of a run: starts generations of workers until the run is complete.

A change of the workers, wanted or not, ends a generation: all of its processes are stopped, and the next one starts
with fresh processes, a fresh coordinator, and ranks counted anew, from the newest state that is safe. So does torchrun;
JAX itself cannot take a lost process back into a running group.
"""

import contextlib
import dataclasses
import enum
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TypedDict

from autoshard.errors import ElasticError
from autoshard.interrupts import StopRequest, stop_on_signals
from autoshard.launch import events
from autoshard.launch.dry_run import NICENESS, DryRun
from autoshard.launch.engines.protocol import Engine, Process, Slot
from autoshard.launch.failures import FailureCount, Loss
from autoshard.launch.generation import Generation, Outcome
from autoshard.launch.membership import Membership, with_ranks_kept
from autoshard.launch.messages import Assignment, Tier
from autoshard.launch.planning_ahead import likely_sizes
from autoshard.launch.progress import LearntLimits
from autoshard.launch.report import event_line
from autoshard.launch.requests import take_scale_request
from autoshard.launch.settings import LaunchSettings
from autoshard.launch.standbys import Standbys

POLL_S = 0.1
"""Longest time between two looks at limits."""

REQUESTS_S = 0.25
"""Least time between two looks for what a user asks for: each asks the file system, which may be slow."""

WAIT_REPORT_S = 10.0
"""Time between two lines that tell what the run waits for."""

_SAID = (
    events.GenerationStarted,
    events.Replanned,
    events.Restored,
    events.CheckpointRejected,
    events.CheckpointNotSaved,
    events.StragglerFound,
    events.WorkerLost,
    events.WorkerJoined,
    events.WorkerExcluded,
    events.DrainStarted,
    events.Drained,
    events.PlannedAhead,
)
"""Events that people are told as they happen: what changes the course of the run, but no step and no phase."""


class Ending(enum.Enum):
    """How a run ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended.

    Attributes:
        ending: complete, stopped by its user and saved, or failed.
        step: steps taken, as far as known.
        loss: the last loss; None where it is not known.
        error: why it failed.
        is_in_memory: whether the state of `step` lies in the memory of hosts alone.
    """

    ending: Ending
    step: int = 0
    loss: float | None = None
    error: str = ""
    is_in_memory: bool = False


class _Stamp(TypedDict):
    time: float
    generation: int


class Supervisor:
    """Runs the generations of one run; `run` returns when it is over."""

    def __init__(
        self,
        settings: LaunchSettings,
        engine: Engine,
        log: events.EventLog,
        run_id: str,
        earlier: Sequence[events.Event],
        say: Callable[[str], None],
    ):
        """Args:
        settings: the run.
        engine: where its workers run.
        log: takes its events.
        run_id: tells the run from others that had the same folder before.
        earlier: the events of the run before, oldest first.
        say: shows a line to people.
        """
        self._settings, self._engine, self._log, self._say = settings, engine, log, say
        self._run_id = run_id
        self._number = max((event.generation for event in earlier), default=0)
        self._plans = _plans_by_size(earlier)
        self._membership = Membership(settings.least_workers, settings.most_workers, settings.rejoin_after_s)
        self._failures = FailureCount(settings.budgets)
        self._limits = LearntLimits(settings.stall_limit_s)
        self._standbys = Standbys(engine, settings.command)
        self._looked_s = -math.inf
        """When a user's requests were last looked for."""
        self._dry_run: DryRun | None = None
        self._ahead: set[int] = set()
        self._ranks: dict[int, int] = {}
        made_safe = [event for event in earlier if isinstance(event, events.StepCommitted)]
        self._newest_step = max((event.step for event in made_safe), default=-1)
        self._on_disk_step = max((event.step for event in made_safe if event.tier is Tier.DISK), default=-1)
        self._grow = threading.Event()
        self._has_warned = False
        """That events cannot be written."""

    def run(self) -> RunOutcome:
        """Starts generations until the run is complete, is stopped, or may not go on.

        The first SIGINT or SIGTERM saves the run and ends it, the second ends it at once; SIGUSR1 saves it and goes on
        with as many workers as there are places.
        """
        try:
            with stop_on_signals((signal.SIGINT, signal.SIGTERM)) as stop, _on_signal(signal.SIGUSR1, self._grow.set):
                outcome = self._generations(stop)
        except ElasticError as error:
            outcome = RunOutcome(Ending.FAILED, error=str(error))
        finally:
            self._engine.close()
        self._write_ending(outcome)
        return outcome

    def _generations(self, stop: StopRequest) -> RunOutcome:
        why = "start"
        while True:
            slots = self._slots(stop)
            if slots is None:
                is_in_memory = self._newest_step > self._on_disk_step
                return RunOutcome(Ending.STOPPED, max(self._newest_step, 0), is_in_memory=is_in_memory)
            outcome = self._generation(slots, why, stop)
            if outcome.finished is not None:
                self._engine.forget_memory()
                return RunOutcome(Ending.FINISHED, outcome.finished.step, outcome.finished.loss)
            if outcome.drained is not None:
                if stop.requested:
                    return RunOutcome(Ending.STOPPED, outcome.drained.step)
                for slot in outcome.preempted:
                    self._membership.lost(slot, time.monotonic())
                why = "preempted" if outcome.preempted else "resized"
                continue
            if error := self._count(outcome.losses):
                return RunOutcome(Ending.FAILED, max(self._newest_step, 0), error=error)
            why = "; ".join(f"worker {loss.rank} lost: {loss.cause}" for loss in outcome.losses)

    def _slots(self, stop: StopRequest) -> tuple[Slot, ...] | None:
        """The slots of the next generation, once there are enough; None if the user stops the run before."""
        told_s = 0.0
        while not stop.requested:
            self._take_requests()
            slots = self._membership.usable(self._engine.capacity())
            if self._membership.is_enough(slots):
                return with_ranks_kept(slots, self._ranks)
            if self._membership.recall():
                continue
            if time.monotonic() - told_s > WAIT_REPORT_S:
                told_s = time.monotonic()
                found = f"Waiting for workers: {len(slots)} can run, {self._settings.least_workers} are needed."
                self._say(f"{found} {self._engine.why_few()}".rstrip())
            self._engine.poll(POLL_S)
        return None

    def _generation(self, slots: Sequence[Slot], why: str, stop: StopRequest) -> Outcome:
        self._number += 1
        self._ranks = {slot.number: rank for rank, slot in enumerate(slots)}
        workers = [self._standbys.take(slot) or self._engine.start(slot, self._settings.command) for slot in slots]
        plan = self._plans.get(len(workers))
        self._write(
            events.GenerationStarted(
                **self._stamp(),
                workers=tuple(map(_entry, range(len(slots)), workers)),
                why=why,
                plan=None if plan is None else plan.plan,
                mesh=None if plan is None else plan.mesh,
            )
        )
        self._assign(workers)
        running = Generation(self._number, workers, self._limits, self._write)
        try:
            while (outcome := running.outcome()) is None:
                for news in self._engine.poll(POLL_S):
                    if running.has(news.process):
                        running.take(news)
                    elif self._dry_run is not None and self._dry_run.has(news.process):
                        self._dry_run.take(news)
                    else:
                        self._standbys.take_news(news)
                self._note_progress(running)
                if stop.requested and not running.is_training:
                    outcome = Outcome()  # what was reached before is safe, on disk or in the memory of hosts
                    break
                if why_drain := self._reason_to_drain(running, stop):
                    self._drain(running, why_drain)
                if running.is_training and not running.is_draining:
                    self._use_idle_time(running)
            self._write_losses(outcome.losses)
            if running.planned is not None:
                self._plans[len(workers)] = running.planned
        finally:
            self._end_dry_run()
            self._engine.stop([worker.number for worker in workers])
        if outcome.drained is not None:
            self._write(events.Drained(**self._stamp(), step=outcome.drained.step))
            self._newest_step = max(self._newest_step, outcome.drained.step)
            self._on_disk_step = max(self._on_disk_step, outcome.drained.step)
        return outcome

    def _assign(self, workers: Sequence[Process]) -> None:
        coordinator = self._engine.free_address(workers[0].slot)
        for rank, worker in enumerate(workers):
            self._engine.send(worker.number, self._assignment(worker.slot, rank, len(workers), coordinator).line())

    def _assignment(self, slot: Slot, rank: int, num_workers: int, coordinator: str) -> Assignment:
        return Assignment(
            run_dir=str(self._settings.run_dir),
            run_id=self._run_id,
            generation=self._number,
            rank=rank,
            num_workers=num_workers,
            coordinator=coordinator,
            slot=slot.number,
            host=slot.host,
            memory_dir=slot.memory_dir,
            devices_per_worker=self._settings.devices_per_worker,
        )

    def _note_progress(self, running: Generation) -> None:
        self._on_disk_step = max(self._on_disk_step, -1 if running.last_on_disk is None else running.last_on_disk)
        if running.last_committed is not None and running.last_committed > self._newest_step:
            self._newest_step = running.last_committed
            self._failures.made_progress()
            self._limits.made_progress()
        for slot in self._membership.joined(self._engine.capacity(), time.monotonic()):
            self._write(events.WorkerJoined(**self._stamp(), slot=slot.number, host=slot.host))

    def _reason_to_drain(self, running: Generation, stop: StopRequest) -> str | None:
        """Why the generation should save and end now; None if it should go on."""
        self._take_requests()
        if stop.requested:
            return "stopped by its user"
        if not running.is_training or running.is_draining:
            return None
        now, then = len(running.workers), len(self._membership.usable(self._engine.capacity()))
        if then != now and (then > now or then == self._membership.wanted):
            return f"from {now} to {then} workers"
        return None

    def _drain(self, running: Generation, why: str) -> None:
        message = running.drain_message(why)
        if message is None:
            return
        self._end_dry_run()
        for worker in running.workers:
            self._engine.send(worker.number, message)

    def _take_requests(self) -> None:
        if time.monotonic() - self._looked_s < REQUESTS_S:
            return
        self._looked_s = time.monotonic()
        if self._grow.is_set():
            self._grow.clear()
            self._membership.want(self._settings.most_workers)
        try:
            request = take_scale_request(self._settings.run_dir)
        except ElasticError as error:
            self._say(f"warning: {error}")
            return
        if request is None:
            return
        if request.workers > self._settings.most_workers:
            self._say(f"warning: {request.workers} workers were asked for; the most is {self._settings.most_workers}.")
        self._membership.want(min(request.workers, self._settings.most_workers))

    def _use_idle_time(self, running: Generation) -> None:
        """Gets the next generation ready while this one trains: processes first, then its plan and executable."""
        if self._settings.has_standbys and not self._standbys.complete([worker.slot for worker in running.workers]):
            return
        if self._dry_run is not None:
            if self._dry_run.is_over:
                self._end_dry_run()
            return
        if not self._settings.plans_ahead or self._settings.devices_per_worker is None:
            return  # accelerators cannot be shared with the processes that train on them
        current, least = len(running.workers), self._settings.least_workers
        sizes = likely_sizes(current, least, self._settings.most_workers)
        size = next((size for size in sizes if size not in self._ahead), None)
        if size is None:
            return
        self._ahead.add(size)
        slots = self._engine.capacity()[:size]
        if len(slots) == size:
            command = dataclasses.replace(self._settings.command, niceness=NICENESS)
            workers = [self._engine.start(slot, command) for slot in slots]
            coordinator = self._engine.free_address(slots[0])
            for rank, worker in enumerate(workers):
                assignment = self._assignment(worker.slot, rank, size, coordinator)
                self._engine.send(worker.number, assignment.model_copy(update={"is_dry_run": True}).line())
            self._dry_run = DryRun(workers)

    def _end_dry_run(self) -> None:
        if self._dry_run is None:
            return
        self._engine.stop(self._dry_run.processes)
        size = len(self._dry_run.processes)
        if self._dry_run.is_complete:
            self._write(events.PlannedAhead(**self._stamp(), num_workers=size, seconds=self._dry_run.seconds))
        elif self._dry_run.is_over:
            self._say(f"warning: planning ahead for {size} workers failed: {self._dry_run.error}")
        else:  # it was disturbed, and may try again
            self._ahead.discard(size)
        self._dry_run = None

    def _count(self, losses: Sequence[Loss]) -> str | None:
        """Counts losses; returns why the run must end, if so."""
        error = self._failures.add(losses)
        for loss in losses:
            failures = self._failures.failures_of(loss.slot)
            is_bad = failures >= self._settings.budgets.at_one_slot and self._settings.is_elastic
            if is_bad and self._membership.can_spare(loss.slot, self._engine.capacity()):
                self._membership.exclude(loss.slot)
                self._write(events.WorkerExcluded(**self._stamp(), slot=loss.slot, host=loss.host, failures=failures))
            else:
                self._membership.lost(loss.slot, time.monotonic())
        return error

    def _write_losses(self, losses: Sequence[Loss]) -> None:
        for loss in losses:
            self._write(
                events.WorkerLost(
                    **self._stamp(),
                    rank=loss.rank,
                    pid=loss.pid,
                    slot=loss.slot,
                    cause=loss.cause,
                    phase=loss.phase,
                    step=loss.step,
                    since_progress_s=loss.since_progress_s,
                    detail=loss.detail,
                )
            )

    def _write_ending(self, outcome: RunOutcome) -> None:
        match outcome.ending:
            case Ending.FINISHED:
                self._write(events.Finished(**self._stamp(), step=outcome.step, loss=outcome.loss))
            case Ending.STOPPED:
                self._write(events.Stopped(**self._stamp(), step=outcome.step))
            case Ending.FAILED:
                self._write(events.RunFailed(**self._stamp(), error=outcome.error))

    def _write(self, event: events.Event) -> None:
        try:
            self._log.write(event)
        except OSError as error:
            if not self._has_warned:
                self._say(f"warning: the events of the run cannot be written: {error}. The run goes on.")
            self._has_warned = True
        if isinstance(event, _SAID):
            self._say(event_line(event))

    def _stamp(self) -> _Stamp:
        return {"time": time.time(), "generation": max(self._number, 0)}


def _plans_by_size(earlier: Sequence[events.Event]) -> dict[int, events.Replanned]:
    """The last plan for each number of workers."""
    sizes = {e.generation: len(e.workers) for e in earlier if isinstance(e, events.GenerationStarted)}
    plans = (e for e in earlier if isinstance(e, events.Replanned))
    return {sizes[plan.generation]: plan for plan in plans if plan.generation in sizes}


def _entry(rank: int, worker: Process) -> events.WorkerEntry:
    return events.WorkerEntry(rank=rank, pid=worker.pid, slot=worker.slot.number, host=worker.slot.host)


@contextlib.contextmanager
def _on_signal(number: int, act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` at a signal while the block runs; only Python's main thread receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        act()

    before = signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, before)
