"""The most memory that each place of a pipeline needs at once; it follows from the order alone, not from the times."""

import dataclasses
import functools

from autoshard.pipeline.schedule.durations import PipelineDurations
from autoshard.pipeline.schedule.tasks import Phase, Schedule


@dataclasses.dataclass(frozen=True, slots=True)
class Holding:
    """What a place holds while a task runs.

    Attributes:
      running: The task's stage.
      whole: For each stage of the place, the lowest first, the micro-batches from their forward to their backward task.
      for_weights: Likewise from the backward to the weight task.
    """

    running: int
    whole: tuple[int, ...]
    for_weights: tuple[int, ...]

    def covers(self, other: "Holding") -> bool:
        """Whether it holds at least as much of everything while the same stage runs."""
        mine, theirs = self.whole + self.for_weights, other.whole + other.for_weights
        return self.running == other.running and all(a >= b for a, b in zip(mine, theirs, strict=True))


def peak_bytes(pipeline: PipelineDurations) -> tuple[float, ...]:
    """For each place, the most memory that one of its devices needs, in bytes.

    That is what all its stages hold all the time, the residuals of the micro-batches in flight, and what the running
    task needs besides.
    """
    schedule, stages = pipeline.schedule, pipeline.stages
    peaks = []
    for place, held in enumerate(greatest_holdings(schedule)):
        here = stages[place :: schedule.num_places]
        most = max(
            stages[h.running].working_bytes
            + sum(n * s.residual_bytes for n, s in zip(h.whole, here, strict=True))
            + sum(n * s.weight_residual_bytes for n, s in zip(h.for_weights, here, strict=True))
            for h in held
        )
        peaks.append(sum(s.fixed_bytes for s in here) + most)
    return tuple(peaks)


@functools.lru_cache(maxsize=16)
def greatest_holdings(schedule: Schedule) -> tuple[tuple[Holding, ...], ...]:
    """For each place, what it holds at its tasks, without what another covers: few, as the steady state repeats."""
    return tuple(tuple(_greatest(_holdings(schedule, place))) for place in range(schedule.num_places))


def _holdings(schedule: Schedule, place: int) -> set[Holding]:
    """While each task runs; between two tasks a place holds no more than while the second one runs."""
    num_here = len(range(place, schedule.num_stages, schedule.num_places))
    whole, for_weights = [0] * num_here, [0] * num_here
    found = set()
    for task in schedule.order[place]:
        i = task.stage // schedule.num_places
        whole[i] += task.phase is Phase.FORWARD  # residuals are there before the forward task ends
        found.add((task.stage, tuple(whole), tuple(for_weights)))
        if task.phase is Phase.BACKWARD:
            whole[i] -= 1
            for_weights[i] += schedule.splits_backward
        elif task.phase is Phase.WEIGHT:
            for_weights[i] -= 1
    return {Holding(*state) for state in found}


def _greatest(found: set[Holding]) -> list[Holding]:
    kept: list[Holding] = []
    for one in sorted(found, key=lambda h: (-sum(h.whole) - sum(h.for_weights), h.running, h.whole)):
        if not any(other.covers(one) for other in kept):
            kept.append(one)
    return kept
