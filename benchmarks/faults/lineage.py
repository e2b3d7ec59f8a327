"""What must hold of a run after whatever happened to it, derived from its log and its metrics."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Sequence

from autoshard.launch.events import (
    Drained,
    DrainStarted,
    Event,
    Finished,
    GenerationStarted,
    PhaseStarted,
    Restored,
    RunFailed,
    StepCommitted,
    WorkerLost,
)
from autoshard.launch.messages import Tier


@dataclasses.dataclass(frozen=True)
class Lineage:
    """What became of the steps of a run.

    Attributes:
        generations: how many were started.
        redone: of each restart, the steps that were taken and had to be taken again.
        sources: where each restart found its state: `memory`, `disk`, or `` for the initial one.
        problems: what must not be, in words; empty for a run in which all is well.
    """

    generations: int
    redone: tuple[int, ...]
    sources: tuple[str, ...]
    problems: tuple[str, ...]


def lineage(
    events: Sequence[Event], steps: int, disk_every: int, memory_every: int | None, damaged_s: Iterable[float] = ()
) -> Lineage:
    """Follows the committed steps through all generations.

    Args:
        events: the whole log.
        steps: the number of the last step.
        disk_every, memory_every: steps between two checkpoints of a tier; None without a memory tier.
        damaged_s: when checkpoints were damaged on purpose, in seconds since 1970; the restart that follows may go
            back to an older one.
    """
    problems, redone, sources = [], [], []
    reached = committed = position = 0
    damages = sorted(damaged_s)
    allowed = memory_every or disk_every
    for event in events:
        match event:
            case Restored(step=step, source=source, generation=generation):
                if sources or reached:
                    redone.append(max(reached - step, 0))
                is_excused = any(damage <= event.time for damage in damages)
                damages = [damage for damage in damages if damage > event.time]
                if step < committed and not is_excused:
                    problems.append(f"generation {generation} began at step {step}, and {committed} was committed")
                if step > reached + allowed:  # the newest may be whole before all workers could tell so
                    problems.append(f"generation {generation} began at step {step}, and only {reached} were taken")
                if reached - step > allowed and not is_excused:
                    problems.append(f"generation {generation} had to take {reached - step} steps again")
                sources.append(source.value if source is not None else "")
                position = reached = committed = step
            case StepCommitted(step=step, tier=tier, generation=generation):
                every = memory_every if tier is Tier.MEMORY else disk_every
                if step <= position and tier is Tier.MEMORY:
                    problems.append(f"generation {generation} committed step {step} after step {position}")
                if tier is Tier.MEMORY and memory_every and step - position > memory_every:
                    problems.append(f"generation {generation} skipped from step {position} to {step}")
                if every and step % every and step != steps and not _is_draining(events, generation):
                    problems.append(f"generation {generation} committed step {step}, which is none of its checkpoints")
                if tier is Tier.MEMORY or not memory_every:
                    position = max(position, step)
                reached, committed = max(reached, step), max(committed, step)
            case WorkerLost(step=step) | PhaseStarted(step=step):
                reached = max(reached, step)
            case RunFailed(error=error):
                problems.append(f"the run failed: {error}")
    finished = [event for event in events if isinstance(event, Finished)]
    if not finished:
        problems.append("the run did not finish")
    elif finished[-1].step != steps:
        problems.append(f"the run finished at step {finished[-1].step}, not {steps}")
    generations = sum(isinstance(event, GenerationStarted) for event in events)
    return Lineage(generations, tuple(redone), tuple(sources), tuple(problems))


def _is_draining(events: Sequence[Event], generation: int) -> bool:
    """Whether a generation was asked to save and end, though something may have ended it before it told of it."""
    return any(isinstance(e, DrainStarted | Drained) and e.generation == generation for e in events)


@dataclasses.dataclass(frozen=True)
class Losses:
    """The losses of a run beside those of an undisturbed one.

    Attributes:
        final_difference, largest_difference: relative; of the last step, and over all steps.
        is_bitwise_equal: all are equal.
        problems: steps that are missing, or reported twice.
    """

    final_difference: float
    largest_difference: float
    is_bitwise_equal: bool
    problems: tuple[str, ...]


def compared_losses(run_dir: pathlib.Path, undisturbed: pathlib.Path) -> Losses:
    """Compares the metrics of two runs that report every step."""
    own, reference = read_losses(run_dir), read_losses(undisturbed)
    steps = [step for step, _ in own]
    expected = [step for step, _ in reference]
    problems = []
    if steps != expected:
        twice = sorted({step for step in steps if steps.count(step) > 1})
        missing = sorted(set(expected) - set(steps))
        problems.append(f"metrics.jsonl: steps {missing} are missing, steps {twice} are there twice")
    of_step = dict(reference)
    differences = [abs(x - of_step[s]) / abs(of_step[s]) if s in of_step else math.inf for s, x in own] or [math.inf]
    return Losses(differences[-1], max(differences), own == reference, tuple(problems))


def read_losses(run_dir: pathlib.Path) -> list[tuple[int, float]]:
    """Step and loss of each line of training in `metrics.jsonl`."""
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]
