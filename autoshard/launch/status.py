"""The state of a run, read from its output folder: while it goes on, and after it has ended."""

import collections
import dataclasses
import enum
import json
import pathlib
import socket
import time
from collections.abc import Sequence

import psutil
import pydantic

from autoshard.errors import FileFormatError
from autoshard.launch.events import (
    EVENTS,
    Drained,
    DrainStarted,
    Event,
    EventReader,
    Finished,
    GenerationStarted,
    PhaseStarted,
    Replanned,
    Restored,
    RunFailed,
    StepCommitted,
    Stopped,
    SupervisorStarted,
    WorkerEntry,
    WorkerLost,
)
from autoshard.launch.goodput import Activity, Goodput, goodput
from autoshard.launch.messages import Phase, Tier
from autoshard.launch.metrics_reader import METRICS, StepMetrics, last_metrics

_RECENT = 10
"""Events that are kept for people."""

_CLOCK_S = 1.0
"""Start times of processes are known to about a hundredth of a second; a number is not used again that soon."""


class RunState(enum.StrEnum):
    """What is the matter with a run."""

    RUNNING = "running"
    DRAINING = "saving, to end its generation"
    RESTARTING = "restarting"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    ABANDONED = "left by its supervisor"
    """The supervisor is gone, and said nothing; `autoshard launch` continues the run."""


ENDED = (RunState.FINISHED, RunState.STOPPED, RunState.FAILED, RunState.ABANDONED)
"""Nothing more will happen, unless someone continues the run."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker of the last generation.

    Attributes:
        rank, slot, host, pid: which one, and where.
        state: `alive`; `gone`, or `ended` with the run; `lost: <cause>`; empty on another host, which cannot be seen
            from here.
    """

    rank: int
    slot: int
    host: str
    pid: int
    state: str


@dataclasses.dataclass(frozen=True, slots=True)
class SavedStep:
    """The newest step that is safe in a tier, and when it was committed (seconds since 1970)."""

    tier: Tier
    step: int
    time_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class RunStatus:
    """A run as its files tell.

    Attributes:
        state: what is the matter with it.
        engine: where its workers run: `local` or `ray`.
        least_workers, most_workers: how many it may have.
        generation: the last one, and `why` it was started, at `started_s` (seconds since 1970).
        workers: of that generation.
        plan, mesh: of that generation; None before they are known.
        phase: what the worker of rank 0 is at; None while no generation runs.
        step: the last one known to be taken.
        saved: the newest committed step of each tier.
        metrics: the last report of a training step.
        goodput: where the time went.
        recent: the last events, oldest first, without commits and phases.
        now_s: when this was read, in seconds since 1970.
    """

    state: RunState
    engine: str
    least_workers: int
    most_workers: int
    generation: int
    why: str
    started_s: float
    workers: tuple[WorkerStatus, ...]
    plan: str | None
    mesh: str | None
    phase: Phase | None
    step: int
    saved: tuple[SavedStep, ...]
    metrics: StepMetrics | None
    goodput: Goodput
    recent: tuple[Event, ...]
    now_s: float


class StatusReader:
    """Reads the state of a run, again and again."""

    def __init__(self, run_dir: pathlib.Path):
        """Looks into the output folder of a run.

        Raises:
            FileFormatError: it holds no log of a run.
        """
        if not (run_dir / EVENTS).is_file():
            inside = sorted(str(path.parent) for path in run_dir.glob(f"*/{EVENTS}"))
            there = f" In it are the folders of these runs: {', '.join(inside)}." if inside else ""
            if (last := last_metrics(run_dir)) is not None:
                raise FileFormatError(
                    f"{run_dir}: `autoshard status` tells of runs under `autoshard launch`, which write {EVENTS}; this "
                    f"one trains, or trained, without a supervisor, and its last reported step is {last.step}. See its "
                    f"{METRICS}, or `autoshard report {run_dir}`; `autoshard launch` with train.resume=true continues "
                    "it under a supervisor."
                )
            raise FileFormatError(
                f"{run_dir}: the output folder of a run that `autoshard launch` started holds {EVENTS}; there is none."
                f"{there} Name the folder that is train.output_dir of the run, or wait until the run has begun."
            )
        self._run_dir, self._reader = run_dir, EventReader(run_dir)
        self._events: list[Event] = []
        self._facts = _Facts()

    def read(self) -> RunStatus:
        """The state now.

        Raises:
            FileFormatError: the log does not begin with the start of a supervisor.
        """
        for event in self._reader.new():
            self._facts.read(event)
            if self._events and _continues(self._events[-1], event):
                self._events.pop()  # there may be a commit for every step: of a series, the last tells all
            self._events.append(event)
        if self._facts.supervisor is None:
            raise FileFormatError(
                f"{self._run_dir / EVENTS}: the log of a run begins with `supervisor_started`; there is no such event. "
                "If the run has just begun, try again; otherwise the file is damaged."
            )
        return self._facts.status(self._events, last_metrics(self._run_dir), time.time())


def status_json(status: RunStatus, total_steps: int | None) -> str:
    """All figures by name, as JSON; `total_steps` is the number of the last step, if it is known."""
    figures = pydantic.TypeAdapter(RunStatus).dump_python(status, mode="json")
    measured = status.goodput
    figures["total_steps"] = total_steps
    figures["goodput"] |= {
        "fraction": measured.fraction,
        "total_s": measured.total_s,
        "seconds": {activity.value: measured.seconds(activity) for activity in Activity},
    }
    return json.dumps(figures, indent=1) + "\n"


def _continues(last: Event, event: Event) -> bool:
    return (
        isinstance(last, StepCommitted)
        and isinstance(event, StepCommitted)
        and (last.tier, last.generation) == (event.tier, event.generation)
        and last.step < event.step
    )


class _Facts:
    """What the events so far say."""

    def __init__(self) -> None:
        self.supervisor: SupervisorStarted | None = None
        self._state = RunState.RUNNING
        self._generation: GenerationStarted | None = None
        self._plan: str | None = None
        self._mesh: str | None = None
        self._phase: Phase | None = None
        self._step = 0
        self._saved: dict[Tier, SavedStep] = {}
        self._lost: dict[int, str] = {}
        self._recent: collections.deque[Event] = collections.deque(maxlen=_RECENT)

    def read(self, event: Event) -> None:
        if not isinstance(event, StepCommitted | PhaseStarted):
            self._recent.append(event)
        match event:
            case SupervisorStarted():
                self.supervisor, self._state, self._phase = event, RunState.RUNNING, None
            case GenerationStarted():
                self._generation, self._lost, self._state = event, {}, RunState.RUNNING
                self._plan, self._mesh, self._phase = event.plan, event.mesh, Phase.STARTUP
            case Replanned():
                self._plan, self._mesh = event.plan, event.mesh
            case PhaseStarted() if self._state in (RunState.RUNNING, RunState.DRAINING):
                self._phase, self._step = event.phase, event.step
            case Restored():
                self._step = event.step
            case StepCommitted():
                self._step = max(self._step, event.step)
                self._saved[event.tier] = SavedStep(event.tier, event.step, event.time)
            case WorkerLost():
                self._lost[event.pid] = event.cause
                self._state, self._phase = RunState.RESTARTING, None
            case DrainStarted():
                self._state = RunState.DRAINING
            case Drained():
                self._state, self._phase, self._step = RunState.RESTARTING, None, event.step
            case Finished() | Stopped():
                is_finished = isinstance(event, Finished)
                self._state, self._step = RunState.FINISHED if is_finished else RunState.STOPPED, event.step
            case RunFailed():
                self._state = RunState.FAILED
            case _:
                pass

    def status(self, events: Sequence[Event], metrics: StepMetrics | None, now_s: float) -> RunStatus:
        supervisor, generation, state = self.supervisor, self._generation, self._state
        assert supervisor is not None
        if state not in ENDED and _is_alive(supervisor.pid, supervisor.host, supervisor.time) is False:
            state = RunState.ABANDONED
        number = 0 if generation is None else generation.generation
        step = self._step
        if metrics is not None and metrics.generation == number and state not in (RunState.FINISHED, RunState.STOPPED):
            step = max(step, metrics.step)
        started_s = supervisor.time if generation is None else generation.time
        gone = "ended" if state in ENDED else "gone"
        workers = () if generation is None else generation.workers
        return RunStatus(
            state=state,
            engine=supervisor.engine,
            least_workers=supervisor.least_workers,
            most_workers=supervisor.most_workers,
            generation=number,
            why="" if generation is None else generation.why,
            started_s=started_s,
            workers=tuple(self._worker(worker, started_s, gone) for worker in workers),
            plan=self._plan,
            mesh=self._mesh,
            phase=None if state in ENDED else self._phase,
            step=step,
            saved=tuple(self._saved.values()),
            metrics=metrics,
            goodput=goodput(events, None if state in ENDED else now_s),
            recent=tuple(self._recent),
            now_s=now_s,
        )

    def _worker(self, worker: WorkerEntry, started_s: float, gone: str) -> WorkerStatus:
        if cause := self._lost.get(worker.pid):
            state = f"lost: {cause}"
        else:
            state = {True: "alive", False: gone, None: ""}[_is_alive(worker.pid, worker.host, started_s)]
        return WorkerStatus(worker.rank, worker.slot, worker.host, worker.pid, state)


def _is_alive(pid: int, host: str, before_s: float) -> bool | None:
    """Whether a process runs that was started before a time; None if it is on another host."""
    if host != socket.gethostname():
        return None
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() < before_s + _CLOCK_S
    except psutil.Error:
        return False
