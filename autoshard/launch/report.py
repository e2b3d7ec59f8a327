"""What a run's supervisor and `autoshard status` say to people: events and goodput, as lines."""

import time

from autoshard.launch.events import (
    CheckpointNotSaved,
    CheckpointRejected,
    Drained,
    DrainStarted,
    Event,
    Finished,
    GenerationStarted,
    PhaseStarted,
    PlannedAhead,
    Replanned,
    Restored,
    RunFailed,
    StepCommitted,
    Stopped,
    StragglerFound,
    SupervisorStarted,
    WorkerExcluded,
    WorkerJoined,
    WorkerLost,
)
from autoshard.launch.goodput import BADPUT, Goodput
from autoshard.launch.messages import Tier
from autoshard.printing import counted, duration, seconds


def event_line(event: Event) -> str:
    """One line for people: local time and what happened."""
    return f"{time.strftime('%H:%M:%S', time.localtime(event.time))}  {event_words(event)}"


def event_words(event: Event) -> str:
    """What happened, in words."""
    match event:
        case SupervisorStarted():
            size = sizes(event.least_workers, event.most_workers)
            begun = "continues the run" if event.resumed else "starts the run"
            return f"supervisor (pid {event.pid}, engine {event.engine}) {begun} with {size} workers"
        case GenerationStarted():
            mesh = f", {event.mesh}" if event.mesh else ""
            return f"generation {event.generation}: {counted(len(event.workers), 'worker')}{mesh} ({event.why})"
        case PhaseStarted():
            return f"{event.phase.value}" + (f" from step {event.step}" if event.step else "")
        case Replanned():
            how = "found" if event.from_cache else f"made in {duration(event.seconds)}"
            return f"plan for {event.mesh} {how}"
        case Restored():
            if event.source is None:
                return f"initial state made in {duration(event.seconds)}"
            return f"step {event.step} restored from {event.source.value} in {duration(event.seconds)}"
        case StepCommitted():
            return f"step {event.step} saved {place(event.tier)}"
        case CheckpointRejected():
            return f"checkpoint set aside as {event.path}: {event.file}: {event.why}"
        case CheckpointNotSaved():
            return f"step {event.step} could not be saved: {event.why}"
        case StragglerFound():
            named = ", ".join(f"rank {rank} of `{event.axis}` is {w:.1f} times slower" for rank, w in event.slow)
            gain = f"{seconds(event.before_s)} -> {seconds(event.after_s)} a step"
            return f"{named or 'no rank is slow'} after step {event.step}; {event.done}: {gain}"
        case WorkerLost():
            unsaid = f", see logs/slot-{event.slot}.log" if event.cause.startswith("exit status") else ""
            detail = f": {event.detail}" if event.detail else unsaid
            where = f"{event.phase.value}, step {event.step}"
            return f"worker {event.rank} (pid {event.pid}) lost, {event.cause}, at {where}{detail}"
        case WorkerJoined():
            return f"slot {event.slot} on {event.host} is there again"
        case WorkerExcluded():
            return f"slot {event.slot} on {event.host} is left out after {counted(event.failures, 'failure')}"
        case DrainStarted():
            return f"saving, to end this generation: {event.why}"
        case Drained():
            return f"all workers ended after step {event.step}, which is saved"
        case PlannedAhead():
            return f"planned and compiled ahead for {counted(event.num_workers, 'worker')} in {duration(event.seconds)}"
        case Finished():
            return f"finished after step {event.step}" + (f", loss {event.loss:.3f}" if event.loss is not None else "")
        case Stopped():
            return f"stopped after step {event.step}, which is saved"
        case RunFailed():
            return f"failed: {event.error}"


def goodput_lines(measured: Goodput) -> tuple[str, ...]:
    """A run's goodput and badput in a few lines, for the end of a run."""
    total_s = measured.total_s
    if not total_s:
        return ("Goodput: nothing measured yet.",)
    shares = [(measured.seconds(activity), activity) for activity in BADPUT]
    largest = [(took_s, activity) for took_s, activity in sorted(shares, reverse=True) if took_s]
    of_total = f"{duration(measured.productive_s)} of {duration(total_s)}"
    lines = [f"Goodput {measured.fraction:.1%}: {of_total} went into steps that count."]
    if largest:
        causes = ", ".join(f"{activity.value} {duration(took_s)}" for took_s, activity in largest)
        lines.append(f"Badput: {causes}.")
    losses = ", ".join(f"{loss.cause} ({counted(loss.times, 'time')})" for loss in measured.losses) or "none"
    lines.append(
        f"{counted(measured.generations, 'generation')}; workers lost: {losses}; "
        f"{counted(measured.steps_redone, 'step')} taken again."
    )
    return tuple(lines)


def sizes(least: int, most: int) -> str:
    """`4`, or `2:4` where the number of workers may change."""
    return str(most) if least == most else f"{least}:{most}"


def place(tier: Tier) -> str:
    """Where a tier is, in words."""
    return "in memory" if tier is Tier.MEMORY else "on disk"
