"""What a worker and its supervisor tell each other: one JSON object on each line.

The supervisor writes to a worker's standard input: first its `Assignment`, later perhaps `Drain`. The end of that
stream means that the supervisor is gone, and the worker ends itself. The worker writes to a pipe of its own, whose
number is in the environment variable `MESSAGES_FD`.
"""

import enum
from typing import Annotated, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

MESSAGES_FD = "AUTOSHARD_MESSAGES_FD"
"""Environment variable: the file descriptor to which a worker writes; its presence tells a process that it is one."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def line(self) -> str:
        """The message as one line of JSON, its end included."""
        return self.model_dump_json() + "\n"


class Phase(enum.StrEnum):
    """What a worker is at; each has a time limit of its own."""

    STARTUP = "startup"
    """Importing, joining the others, reading data."""
    PLANNING = "planning"
    COMPILE = "compile"
    RESTORE = "restore"
    TRAINING = "training"
    EVALUATION = "evaluation"
    SAVING = "saving"
    """Waiting until a checkpoint is written, before the worker ends."""


class Tier(enum.StrEnum):
    """Where a committed state lies."""

    MEMORY = "memory"
    """In the memory of hosts: that of the worker, and that of a neighbour."""
    DISK = "disk"


class Assignment(_Message):
    """A worker's part in one generation of a run.

    Attributes:
        run_dir: the run's output folder, the same for all.
        run_id: tells the run from others that had the same folder before.
        generation: counted from 1; grows with every restart.
        rank, num_workers: which worker this is, of how many.
        coordinator: `host:port` of the worker of rank 0, new for every generation.
        slot: the place at which the worker runs; it keeps its number over generations.
        host: name of the host; slots of one host share its memory.
        memory_dir: folder in the host's memory that outlives the worker, for the memory tier of checkpoints.
        devices_per_worker: CPU devices of each worker; None for the host's own accelerators.
        is_dry_run: plan and compile for this number of workers, take one step from the initial state, and end; so
            that a later generation finds its plan and its executable.
    """

    kind: Literal["assignment"] = "assignment"
    run_dir: str
    run_id: str
    generation: PositiveInt
    rank: NonNegativeInt
    num_workers: PositiveInt
    coordinator: str
    slot: NonNegativeInt
    host: str
    memory_dir: str
    devices_per_worker: PositiveInt | None = None
    is_dry_run: bool = False


class Drain(_Message):
    """End at the next step that all workers agree on, and save first."""

    kind: Literal["drain"] = "drain"
    why: str


class Ready(_Message):
    """The worker has imported what it needs, and waits for its assignment."""

    kind: Literal["ready"] = "ready"


class Heartbeat(_Message):
    """The worker lives, and this is where it is; sent at every change, and several times a second without one.

    Attributes:
        phase: what it is at.
        step: steps taken, over all generations.
    """

    kind: Literal["heartbeat"] = "heartbeat"
    phase: Phase
    step: NonNegativeInt


class Planned(_Message):
    """The plan of this generation, that of its step.

    Attributes:
        plan: its file.
        mesh: its mesh in words, as `data=4 x tensor=2`.
        seconds: time that it took.
        from_cache: it was made before, by an earlier generation or ahead of time.
    """

    kind: Literal["planned"] = "planned"
    plan: str
    mesh: str
    seconds: NonNegativeFloat
    from_cache: bool


class Restored(_Message):
    """The state that the generation goes on from.

    Attributes:
        step: steps it has taken; 0 for the initial state.
        source: where it comes from; None for the initial state.
        seconds: time that it took.
    """

    kind: Literal["restored"] = "restored"
    step: NonNegativeInt
    source: Tier | None
    seconds: NonNegativeFloat


class Committed(_Message):
    """The state after `step` is safe in `tier`, of all workers."""

    kind: Literal["committed"] = "committed"
    step: NonNegativeInt
    tier: Tier


class Rejected(_Message):
    """A checkpoint is damaged and was set aside.

    Attributes:
        path: the checkpoint, as it is called now.
        file: the file in it at fault, relative to `path`.
        why: what is wrong with it.
    """

    kind: Literal["rejected"] = "rejected"
    path: str
    file: str
    why: str


class NotSaved(_Message):
    """A checkpoint could not be written, as when the disk is full; the run goes on."""

    kind: Literal["not_saved"] = "not_saved"
    step: NonNegativeInt
    why: str


class SlowDevices(BaseModel):
    """What was found of slow devices along a mesh axis, and what is done about them.

    Attributes:
        step: after which it was found.
        axis: the mesh axis whose ranks are told. slow: ranks that are slow, and how many times.
        done: what is done, or since when its gain was measured.
        before_s, after_s: seconds of a step without and with it; predicted when it is done, measured later.
        shares: of the work that can move, what each rank computes from now on.
        wants_plan: the slowdown has lasted longer than shares can even out; another plan would do better.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: NonNegativeInt
    axis: str
    slow: tuple[tuple[NonNegativeInt, float], ...]
    done: str
    before_s: NonNegativeFloat
    after_s: NonNegativeFloat
    shares: tuple[float, ...]
    wants_plan: bool = False


class Straggler(SlowDevices, _Message):
    """Slow devices, told by the worker of rank 0."""

    kind: Literal["straggler"] = "straggler"


class Failed(_Message):
    """The worker ends with an error.

    Attributes:
        step: steps taken.
        error: the type of the exception.
        message: its text.
        traceback: where it arose.
        is_peer_loss: it says only that another worker is gone.
        is_final: the same would happen again: the user's configuration or program is at fault.
    """

    kind: Literal["failed"] = "failed"
    step: NonNegativeInt
    error: str
    message: str
    traceback: str
    is_peer_loss: bool = False
    is_final: bool = False


class Drained(_Message):
    """The worker has ended early, as asked, after `step`, which is saved.

    Attributes:
        by_signal: this worker was told so by a SIGTERM of its own, as at a notice of preemption.
    """

    kind: Literal["drained"] = "drained"
    step: NonNegativeInt
    by_signal: bool = False


class Finished(_Message):
    """The run is complete."""

    kind: Literal["finished"] = "finished"
    step: NonNegativeInt
    loss: float | None = None


FromSupervisor = Assignment | Drain
FromWorker = (
    Ready | Heartbeat | Planned | Restored | Committed | Rejected | NotSaved | Straggler | Failed | Drained | Finished
)

_BY_KIND = Field(discriminator="kind")
_FROM_SUPERVISOR: pydantic.TypeAdapter[FromSupervisor] = pydantic.TypeAdapter(Annotated[FromSupervisor, _BY_KIND])
_FROM_WORKER: pydantic.TypeAdapter[FromWorker] = pydantic.TypeAdapter(Annotated[FromWorker, _BY_KIND])


def read_from_supervisor(line: str | bytes) -> FromSupervisor:
    """What a line of a worker's standard input says. Raises pydantic.ValidationError if it is not a message."""
    return _FROM_SUPERVISOR.validate_json(line)


def read_from_worker(line: str | bytes) -> FromWorker:
    """What a line of a worker's messages says. Raises pydantic.ValidationError if it is not a message."""
    return _FROM_WORKER.validate_json(line)
