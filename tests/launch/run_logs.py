"""Events of runs, made by hand: times in seconds, as short as possible."""

from autoshard.launch.events import (
    GenerationStarted,
    PhaseStarted,
    Restored,
    StepCommitted,
    SupervisorStarted,
    WorkerEntry,
    WorkerLost,
)
from autoshard.launch.messages import Phase, Tier


def supervisor(time, resumed=False, generation=0):
    return SupervisorStarted(
        time=time, generation=generation, pid=1, engine="local", least_workers=2, most_workers=2, resumed=resumed
    )


def workers(time, generation):
    entries = tuple(WorkerEntry(rank=i, pid=10 * generation + i, slot=i, host="here") for i in range(2))
    return GenerationStarted(time=time, generation=generation, workers=entries, why="start")


def phase(time, generation, name, step=0):
    return PhaseStarted(time=time, generation=generation, phase=Phase(name), step=step)


def restored(time, generation, step):
    return Restored(time=time, generation=generation, step=step, source=Tier.DISK if step else None, seconds=1)


def saved(time, generation, step, tier=Tier.DISK):
    return StepCommitted(time=time, generation=generation, step=step, tier=tier)


def lost(time, generation, step, cause="signal 9", since=0.0, rank=1, name="training"):
    return WorkerLost(
        time=time,
        generation=generation,
        rank=rank,
        pid=1,
        slot=rank,
        cause=cause,
        phase=Phase(name),
        step=step,
        since_progress_s=since,
    )


FIRST = [
    supervisor(100),  # startup 100 to 108
    workers(102, 1),
    phase(102, 1, "startup"),
    phase(108, 1, "planning"),  # to 111
    phase(111, 1, "compile"),  # to 116
    phase(116, 1, "restore"),  # to 118
    restored(118, 1, 0),
    phase(118, 1, "training"),
]


def second(start, step, generation=2):
    """Another generation: 1 s of startup, planning and compiling from the cache, 1 s of restoring."""
    return [
        workers(start, generation),
        phase(start, generation, "startup"),
        phase(start + 1, generation, "restore"),
        restored(start + 2, generation, step),
        phase(start + 2, generation, "training", step),
    ]
