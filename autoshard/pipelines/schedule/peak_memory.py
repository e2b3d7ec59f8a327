"""The most memory that each submesh of a pipeline needs at once; it follows from the order of the tasks alone."""

import dataclasses
import functools

from autoshard.pipelines.schedule.durations import PipelineDurations
from autoshard.pipelines.schedule.tasks import Phase, Schedule


@dataclasses.dataclass(frozen=True, slots=True)
class LiveMicroBatches:
    """What a submesh holds while a task runs.

    Attributes:
      running: The task's stage.
      whole: For each stage of the submesh, the lowest first, the micro-batches from their forward to their backward
        task.
      for_weights: Likewise from the backward to the weight task.
    """

    running: int
    whole: tuple[int, ...]
    for_weights: tuple[int, ...]

    def covers(self, other: "LiveMicroBatches") -> bool:
        """Whether it holds at least as much of everything while the same stage runs."""
        mine, theirs = self.whole + self.for_weights, other.whole + other.for_weights
        return self.running == other.running and all(a >= b for a, b in zip(mine, theirs, strict=True))


def peak_bytes(pipeline: PipelineDurations) -> tuple[float, ...]:
    """For each submesh, the most memory that one of its devices needs, in bytes.

    That is what all its stages hold all the time, the residuals of the micro-batches in flight, and what the running
    task needs besides.
    """
    schedule, stages = pipeline.schedule, pipeline.stages
    peaks = []
    for submesh, held in enumerate(greatest_live(schedule)):
        here = stages[submesh :: schedule.num_submeshes]
        most = max(
            stages[h.running].working_bytes
            + sum(n * s.residual_bytes for n, s in zip(h.whole, here, strict=True))
            + sum(n * s.weight_residual_bytes for n, s in zip(h.for_weights, here, strict=True))
            for h in held
        )
        peaks.append(sum(s.fixed_bytes for s in here) + most)
    return tuple(peaks)


@functools.lru_cache(maxsize=16)
def greatest_live(schedule: Schedule) -> tuple[tuple[LiveMicroBatches, ...], ...]:
    """For each submesh, what it holds at its tasks, without what another covers: few, as the steady state repeats."""
    return tuple(tuple(_greatest(_live_at_tasks(schedule, submesh))) for submesh in range(schedule.num_submeshes))


def _live_at_tasks(schedule: Schedule, submesh: int) -> set[LiveMicroBatches]:
    """While each task runs; between two tasks a submesh holds no more than while the second one runs."""
    num_here = len(range(submesh, schedule.num_stages, schedule.num_submeshes))
    whole, for_weights = [0] * num_here, [0] * num_here
    found = set()
    for task in schedule.order[submesh]:
        i = task.stage // schedule.num_submeshes
        whole[i] += task.phase is Phase.FORWARD  # residuals are there before the forward task ends
        found.add((task.stage, tuple(whole), tuple(for_weights)))
        if task.phase is Phase.BACKWARD:
            whole[i] -= 1
            for_weights[i] += schedule.splits_backward
        elif task.phase is Phase.WEIGHT:
            for_weights[i] -= 1
    return {LiveMicroBatches(*state) for state in found}


def _greatest(found: set[LiveMicroBatches]) -> list[LiveMicroBatches]:
    kept: list[LiveMicroBatches] = []
    for one in sorted(found, key=lambda h: (-sum(h.whole) - sum(h.for_weights), h.running, h.whole)):
        if not any(other.covers(one) for other in kept):
            kept.append(one)
    return kept
