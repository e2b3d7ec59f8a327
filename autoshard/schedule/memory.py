"""The most memory that each place of a pipeline needs at once; it follows from the order alone, not from the times."""

import dataclasses
import functools

from autoshard.schedule.durations import PipelineDurations
from autoshard.schedule.tasks import Phase, Schedule


@dataclasses.dataclass(frozen=True, slots=True)
class Holding:
    """What a place holds at one moment.

    Attributes:
      running: The stage whose task runs; -1 between two tasks.
      whole: For each stage of the place, the lowest first, the micro-batches from their forward to their backward task.
      for_weights: Likewise from the backward to the weight task.
    """

    running: int
    whole: tuple[int, ...]
    for_weights: tuple[int, ...]


@functools.lru_cache(maxsize=16)
def holdings(schedule: Schedule) -> tuple[frozenset[Holding], ...]:
    """For each place, all that it ever holds; there are few different ones, as the steady state repeats itself."""
    return tuple(frozenset(_of_place(schedule, place)) for place in range(schedule.num_places))


def peak_bytes(pipeline: PipelineDurations) -> tuple[float, ...]:
    """For each place, the most memory that one of its devices needs, in bytes.

    That is what all its stages hold all the time, the residuals of the micro-batches in flight, and what the running
    task needs besides.
    """
    schedule, stages = pipeline.schedule, pipeline.stages
    peaks = []
    for place, held in enumerate(holdings(schedule)):
        here = stages[place :: schedule.num_places]
        most = max(
            (stages[h.running].working_bytes if h.running >= 0 else 0.0)
            + sum(n * s.residual_bytes for n, s in zip(h.whole, here, strict=True))
            + sum(n * s.weight_residual_bytes for n, s in zip(h.for_weights, here, strict=True))
            for h in held
        )
        peaks.append(sum(s.fixed_bytes for s in here) + most)
    return tuple(peaks)


def _of_place(schedule: Schedule, place: int) -> set[Holding]:
    num_here = len(range(place, schedule.num_stages, schedule.num_places))
    whole, for_weights = [0] * num_here, [0] * num_here
    found = set()
    for task in schedule.order[place]:
        i = task.stage // schedule.num_places
        whole[i] += task.phase is Phase.FORWARD  # its residuals are there before it ends
        found.add((task.stage, tuple(whole), tuple(for_weights)))
        if task.phase is Phase.BACKWARD:
            whole[i] -= 1
            for_weights[i] += schedule.splits_backward
        elif task.phase is Phase.WEIGHT:
            for_weights[i] -= 1
        found.add((-1, tuple(whole), tuple(for_weights)))
    return {Holding(*state) for state in found}
