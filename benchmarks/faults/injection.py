"""Faults drawn at random: what is done to a run, and the moment at which it is done."""

import dataclasses
import enum
import pathlib
import random
import shutil
import signal
import socket
import time

from autoshard.launch.engines.host_memory import host_memory_dir
from autoshard.launch.events import GenerationStarted, PhaseStarted, StepCommitted
from autoshard.launch.messages import Phase
from faults.supervised import SupervisedRun, signal_process


class Kind(enum.StrEnum):
    """What is done."""

    WORKER = "SIGKILL of a worker"
    COORDINATOR = "SIGKILL of the coordinator"
    TWO_WORKERS = "SIGKILL of two workers"
    SUPERVISOR = "SIGKILL of the supervisor"
    STOP = "SIGSTOP of a worker"
    PREEMPTION = "SIGTERM of a worker"
    READY_PROCESS = "SIGKILL of a process that is kept ready"
    DAMAGED_DISK = "a bit of the newest checkpoint flipped, the memory of the host lost, and SIGKILL of a worker"
    DELETED_DISK = "the newest checkpoint deleted, the memory of the host lost, and SIGKILL of a worker"
    DAMAGED_MEMORY = "a bit in each worker's memory flipped, and SIGKILL of a worker"


WEIGHTS = {
    Kind.WORKER: 7,
    Kind.COORDINATOR: 4,
    Kind.TWO_WORKERS: 4,
    Kind.SUPERVISOR: 4,
    Kind.STOP: 2,
    Kind.PREEMPTION: 1,
    Kind.READY_PROCESS: 1,
    Kind.DAMAGED_DISK: 1,
    Kind.DELETED_DISK: 1,
    Kind.DAMAGED_MEMORY: 1,
}

DAMAGES = (Kind.DAMAGED_DISK, Kind.DELETED_DISK, Kind.DAMAGED_MEMORY)


class Moment(enum.StrEnum):
    """When it is done: some time after that has begun."""

    STARTUP = "startup"
    PLANNING = "planning"
    RESTORE = "restore"
    COMPILE = "compile"
    TRAINING = "training"
    SAVING = "saving"


BEFORE_STEPS = {Moment.STARTUP: 3, Moment.PLANNING: 1, Moment.RESTORE: 2, Moment.COMPILE: 2}
WHILE_TRAINING = {Moment.TRAINING: 2, Moment.SAVING: 1}
"""Moments and their weights: of a generation that has not committed a step yet, and of one that has."""

BEFORE_STEPS_SHARE = 0.45
"""Share of faults that come before the last one is recovered from."""

LONGEST_DELAY_S = {
    Moment.STARTUP: 2.0,
    Moment.PLANNING: 0.1,
    Moment.RESTORE: 0.2,
    Moment.COMPILE: 0.5,
    Moment.TRAINING: 3.0,
    Moment.SAVING: 0.3,
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault to come.

    Attributes:
        kind, moment: what and when.
        delay_s: from the beginning of the moment.
    """

    kind: Kind
    moment: Moment
    delay_s: float

    @property
    def comes_before_steps(self) -> bool:
        """Whether it does not wait until the last fault is recovered from."""
        return self.moment in BEFORE_STEPS


@dataclasses.dataclass(frozen=True)
class Injected:
    """A fault that was done.

    Attributes:
        fault: which.
        time: seconds since 1970.
        generation: the newest one then.
        phase: what its coordinator was at.
        target: to what it was done, in words.
    """

    fault: Fault
    time: float
    generation: int
    phase: str
    target: str


def draw(random_numbers: random.Random) -> Fault:
    """A fault at random; one that comes before the newest generation has committed a step damages no checkpoint."""
    before_steps = random_numbers.random() < BEFORE_STEPS_SHARE
    weights = {kind: weight for kind, weight in WEIGHTS.items() if not (before_steps and kind in DAMAGES)}
    moments = BEFORE_STEPS if before_steps else WHILE_TRAINING
    kind = random_numbers.choices(list(weights), list(weights.values()))[0]
    moment = random_numbers.choices(list(moments), list(moments.values()))[0]
    return Fault(kind, moment, random_numbers.uniform(0, LONGEST_DELAY_S[moment]))


def has_come(run: SupervisedRun, moment: Moment, after: int, disk_every: int) -> bool:
    """Whether the newest generation is at `moment` or past it, and has a number above `after`."""
    own = [event for event in run.events if event.generation > after]
    newest = max((event.generation for event in own if isinstance(event, GenerationStarted)), default=None)
    if newest is None:
        return False
    own = [event for event in own if event.generation == newest]
    phase = next((event.phase for event in reversed(own) if isinstance(event, PhaseStarted)), None)
    if moment is Moment.SAVING:
        steps = [event.step for event in own if isinstance(event, StepCommitted)]
        return phase is Phase.SAVING or bool(steps and steps[-1] % disk_every == 0)
    is_training = any(isinstance(event, StepCommitted) for event in own)
    return is_training or (phase is not None and phase.value == moment.value)


def inject(run: SupervisedRun, fault: Fault, random_numbers: random.Random) -> Injected:
    """Does it, to whatever is there now."""
    run.read()
    workers = run.workers()
    pids = [worker.pid for worker in workers]
    some = random_numbers.sample(range(len(pids)), min(2, len(pids)))
    phase = next((e.phase.value for e in reversed(run.events) if isinstance(e, PhaseStarted)), "")
    generation = max((event.generation for event in run.events), default=0)
    now_s = time.time()
    match fault.kind:
        case Kind.WORKER | Kind.STOP | Kind.PREEMPTION:
            sent = {Kind.STOP: signal.SIGSTOP, Kind.PREEMPTION: signal.SIGTERM}.get(fault.kind, signal.SIGKILL)
            target = _sent(pids, some[:1], sent)
        case Kind.COORDINATOR:
            target = _sent(pids, [0], signal.SIGKILL)
        case Kind.TWO_WORKERS:
            target = _sent(pids, some, signal.SIGKILL)
        case Kind.SUPERVISOR:
            run.kill_supervisor()
            target = f"supervisor {run.supervisor}"
        case Kind.READY_PROCESS:
            others = [process for process in run.processes() if process.pid not in pids]
            target = _sent([process.pid for process in others], [0] if others else [], signal.SIGKILL)
        case Kind.DAMAGED_DISK | Kind.DELETED_DISK:
            damaged = _damage_disk(run.run_dir, fault.kind is Kind.DELETED_DISK, random_numbers)
            _lose_memory(run)
            target = f"{damaged}; {_sent(pids, some[:1], signal.SIGKILL)}"
        case Kind.DAMAGED_MEMORY:
            files = [flip_a_bit(file, random_numbers) for file in _memory_files(run)]
            target = f"{len(files)} files in memory; {_sent(pids, some[:1], signal.SIGKILL)}"
    return Injected(fault, now_s, generation, phase, target)


def flip_a_bit(file: pathlib.Path, random_numbers: random.Random) -> str:
    """Flips one bit of a file in place; its name."""
    try:
        with file.open("r+b") as opened:
            size = file.stat().st_size
            if size:
                position = random_numbers.randrange(size)
                opened.seek(position)
                byte = opened.read(1)[0]
                opened.seek(position)
                opened.write(bytes([byte ^ 1 << random_numbers.randrange(8)]))
    except FileNotFoundError:  # an older checkpoint, deleted meanwhile
        return f"{file.name} (gone)"
    return file.name


def _sent(pids: list[int], ranks: list[int], number: signal.Signals) -> str:
    found = [f"{rank} ({pids[rank]})" for rank in ranks if rank < len(pids) and signal_process(pids[rank], number)]
    return f"{number.name} to {' and '.join(found) or 'nobody'}"


def _damage_disk(run_dir: pathlib.Path, deletes: bool, random_numbers: random.Random) -> str:
    """Damages the newest checkpoint on disk; what it did."""
    steps = sorted((int(path.name), path) for path in (run_dir / "checkpoints").glob("*") if path.name.isdecimal())
    if not steps:
        return "no checkpoint"
    newest = steps[-1][1]
    if deletes:
        shutil.rmtree(newest, ignore_errors=True)
        return f"checkpoint {newest.name} deleted"
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    return f"checkpoint {newest.name}: {flip_a_bit(random_numbers.choice(files), random_numbers)}"


def _memory_files(run: SupervisedRun) -> list[pathlib.Path]:
    """The largest file in each worker's part of the memory tier."""
    folder = memory_folder(run.run_dir)
    files = [path for path in folder.rglob("*") if path.is_file()]
    by_folder = {path.parent: path for path in sorted(files, key=lambda path: path.stat().st_size)}
    return list(by_folder.values())


def _lose_memory(run: SupervisedRun) -> None:
    shutil.rmtree(memory_folder(run.run_dir), ignore_errors=True)


def memory_folder(run_dir: pathlib.Path) -> pathlib.Path:
    """Where the memory tier of a run lies on this host."""
    return host_memory_dir(run_dir, socket.gethostname())
