"""What happened when in a step: predicted by the simulator or recorded by the runtime, in one form."""

import dataclasses
from collections.abc import Iterable

from autoshard.pipelines.schedule.tasks import Phase

UPDATE, WEIGHTS, GRADIENTS = "update", "weights", "gradients"
"""Names of the events that are not tasks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One span of time on one submesh, or on the link between two.

    Attributes:
      pipeline, submesh: Where.
      to_submesh: For a transfer, the submesh it goes to; None for work on `submesh` itself.
      name: `F3@1` for a task, or `weights`, `gradients`, `update`; of a transfer, the task that waits for it.
      phase: Of a task; None for others.
      stage, micro_batch: Of a task; of a transfer, those of the task that waits for it. -1 where there is none.
      start_s, stop_s: Since the beginning of the step.
    """

    pipeline: int
    submesh: int
    name: str
    start_s: float
    stop_s: float
    phase: Phase | None = None
    stage: int = -1
    micro_batch: int = -1
    to_submesh: int | None = None

    @property
    def is_work(self) -> bool:
        """Whether a submesh computes: a task, or the optimizer's update."""
        return self.to_submesh is None and (self.phase is not None or self.name == UPDATE)


@dataclasses.dataclass(frozen=True, slots=True)
class SubmeshSummary:
    """One submesh over the step.

    Attributes:
      name: For people, such as `v100[0:4]`.
      busy_s: Time in which it computes. bubble_share: Share of the step in which it does not.
      peak_bytes: Most memory on one of its devices; limit_bytes: What it has (inf: unknown).
      most_in_flight: Most micro-batches that one of its stages holds at once.
    """

    pipeline: int
    submesh: int
    name: str
    busy_s: float
    bubble_share: float
    peak_bytes: float
    limit_bytes: float
    most_in_flight: int


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """All events of a step, by start, and a summary of each submesh. `origin`: `simulated` or `recorded`."""

    events: tuple[Event, ...]
    submeshes: tuple[SubmeshSummary, ...]
    step_s: float
    origin: str

    @property
    def fullest(self) -> SubmeshSummary:
        """The submesh that takes most of the memory that it has."""
        return max(self.submeshes, key=lambda s: s.peak_bytes / s.limit_bytes)


def busy_time(events: Iterable[Event]) -> float:
    """Seconds in which one submesh computes, from its events, of which no two tasks overlap."""
    return sum(e.stop_s - e.start_s for e in events if e.is_work)
