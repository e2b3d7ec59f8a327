"""The log of a run, `events.jsonl` in its output folder: what happened when, one JSON object on each line.

Only the supervisor writes it, a whole line at a time. A line that a killed supervisor cut short is left out by readers.
"""

import json
import pathlib
from collections.abc import Iterator
from typing import Annotated, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from autoshard.files import LineFile
from autoshard.launch.messages import Phase, SlowDevices, Tier

EVENTS = "events.jsonl"
"""Name of the log in the output folder."""


class _Event(BaseModel):
    """Attributes:
    time: seconds since 1970.
    generation: of which it tells; 0 before the first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    time: NonNegativeFloat
    generation: NonNegativeInt


class WorkerEntry(BaseModel):
    """A worker of a generation: its rank, the process, and the place where it runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: NonNegativeInt
    pid: int
    slot: NonNegativeInt
    host: str


class SupervisorStarted(_Event):
    """`autoshard launch` was called: for a new run, or to continue one (`resumed`)."""

    kind: Literal["supervisor_started"] = "supervisor_started"
    pid: int
    host: str = ""
    engine: str
    least_workers: PositiveInt
    most_workers: PositiveInt
    resumed: bool


class GenerationStarted(_Event):
    """Workers were started and told their ranks. `plan` and `mesh` are None where they are not known yet."""

    kind: Literal["generation_started"] = "generation_started"
    workers: tuple[WorkerEntry, ...]
    why: str
    plan: str | None = None
    mesh: str | None = None


class PhaseStarted(_Event):
    """The worker of rank 0 began something else."""

    kind: Literal["phase_started"] = "phase_started"
    phase: Phase
    step: NonNegativeInt


class Replanned(_Event):
    """The plan of this generation: made in `seconds`, or found (`from_cache`)."""

    kind: Literal["replanned"] = "replanned"
    plan: str
    mesh: str
    seconds: NonNegativeFloat
    from_cache: bool


class Restored(_Event):
    """The state from which the generation goes on; `source` is None for the initial one."""

    kind: Literal["restored"] = "restored"
    step: NonNegativeInt
    source: Tier | None
    seconds: NonNegativeFloat


class StepCommitted(_Event):
    """The state after `step` is safe in `tier`."""

    kind: Literal["step_committed"] = "step_committed"
    step: NonNegativeInt
    tier: Tier


class CheckpointRejected(_Event):
    """A checkpoint is damaged and was set aside: `path` as it is called now, the `file` in it at fault, and why."""

    kind: Literal["checkpoint_rejected"] = "checkpoint_rejected"
    path: str
    file: str
    why: str


class CheckpointNotSaved(_Event):
    """A checkpoint could not be written; the run goes on."""

    kind: Literal["checkpoint_not_saved"] = "checkpoint_not_saved"
    step: NonNegativeInt
    why: str


class StragglerFound(SlowDevices, _Event):
    """Devices of an axis were found to be slow, or no longer, and shares set; what shares gained is told later."""

    kind: Literal["straggler_found"] = "straggler_found"


class WorkerLost(_Event):
    """A worker ended that should not have, or made no progress; those that only followed it are not named.

    Attributes:
        cause: `signal 9`, `exit status 1`, `stalled`, or `host lost`.
        phase, step: where it was.
        since_progress_s: time since its last progress: a step, or another phase.
        detail: the error it reported, or which limit it exceeded.
    """

    kind: Literal["worker_lost"] = "worker_lost"
    rank: NonNegativeInt
    pid: int
    slot: NonNegativeInt
    cause: str
    phase: Phase
    step: NonNegativeInt
    since_progress_s: NonNegativeFloat = 0.0
    detail: str = ""


class WorkerJoined(_Event):
    """A place for a worker is there again."""

    kind: Literal["worker_joined"] = "worker_joined"
    slot: NonNegativeInt
    host: str


class WorkerExcluded(_Event):
    """A place is used no more, since its workers failed repeatedly."""

    kind: Literal["worker_excluded"] = "worker_excluded"
    slot: NonNegativeInt
    host: str
    failures: PositiveInt


class DrainStarted(_Event):
    """The workers were asked to save and end, and why: another size, a notice of preemption, or the user's stop."""

    kind: Literal["drain_started"] = "drain_started"
    why: str


class Drained(_Event):
    """All workers have saved `step` and ended, as asked."""

    kind: Literal["drained"] = "drained"
    step: NonNegativeInt


class PlannedAhead(_Event):
    """A number of workers that may be next is planned and compiled for."""

    kind: Literal["planned_ahead"] = "planned_ahead"
    num_workers: PositiveInt
    seconds: NonNegativeFloat


class Finished(_Event):
    """The run is complete."""

    kind: Literal["finished"] = "finished"
    step: NonNegativeInt
    loss: float | None = None


class Stopped(_Event):
    """The run was stopped by its user, and saved."""

    kind: Literal["stopped"] = "stopped"
    step: NonNegativeInt


class RunFailed(_Event):
    """The run ended with an error."""

    kind: Literal["run_failed"] = "run_failed"
    error: str


Event = (
    SupervisorStarted
    | GenerationStarted
    | PhaseStarted
    | Replanned
    | Restored
    | StepCommitted
    | CheckpointRejected
    | CheckpointNotSaved
    | StragglerFound
    | WorkerLost
    | WorkerJoined
    | WorkerExcluded
    | DrainStarted
    | Drained
    | PlannedAhead
    | Finished
    | Stopped
    | RunFailed
)

_ANY: pydantic.TypeAdapter[Event] = pydantic.TypeAdapter(Annotated[Event, Field(discriminator="kind")])


class EventLog:
    """Appends to the log of a run."""

    def __init__(self, run_dir: pathlib.Path):
        """Opens the log in `run_dir`, ending a line that was cut short."""
        path = run_dir / EVENTS
        self._lines = LineFile(path)
        if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
            with path.open("ab") as file:
                file.write(b"\n")

    def write(self, event: Event) -> None:
        """Adds one event; it is complete for readers of the file when this returns.

        Raises:
            OSError: it cannot be written, as on a full disk; it will be added with the next one.
        """
        self._lines.add(event.model_dump_json())


class EventReader:
    """Reads the log of a run as it grows."""

    def __init__(self, run_dir: pathlib.Path):
        """Begins with the first event of the run in `run_dir`, which need not have a log yet."""
        self._path = run_dir / EVENTS
        self._position = 0

    def new(self) -> Iterator[Event]:
        """The events since the last call, oldest first. Lines that were cut short are left out."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):  # being written
                    return
                self._position += len(line)
                try:
                    yield _ANY.validate_python(json.loads(line), strict=False)
                except ValueError:  # also pydantic.ValidationError
                    continue


def read_events(run_dir: pathlib.Path) -> Iterator[Event]:
    """The events of a run, oldest first; none if it has no log. Lines that were cut short are left out."""
    return EventReader(run_dir).new()
