"""A job of a trace: what was asked for, when, and how long it ran."""

import dataclasses
import enum
from collections.abc import Iterable


class Ending(enum.Enum):
    """How a job ended in the trace."""

    DONE = "done"
    KILLED = "killed"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class TraceJob:
    """A job that somebody ran.

    Attributes:
        name: of the job.
        arrival_s: after the first job of the trace.
        num_devices: that it had.
        duration_s: that it ran, all attempts together.
        ending: how it ended; its work counts as done in any case.
    """

    name: str
    arrival_s: float
    num_devices: int
    duration_s: float
    ending: Ending = Ending.DONE


def from_first(jobs: Iterable[TraceJob]) -> tuple[TraceJob, ...]:
    """The jobs by arrival, with the first one at 0."""
    ordered = sorted(jobs, key=lambda job: (job.arrival_s, job.name))
    return tuple(dataclasses.replace(job, arrival_s=job.arrival_s - ordered[0].arrival_s) for job in ordered)
