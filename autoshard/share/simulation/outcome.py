"""What became of the jobs of a simulation, and its figures."""

import dataclasses
import math
import statistics

from autoshard.share.pool import Placement


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A job on the same devices: paused at first, while it is started or moved."""

    job: str
    placement: Placement
    start_s: float
    paused_until_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class JobRecord:
    """What became of a job.

    Attributes:
        name: of the job.
        arrival_s, end_s: when it came and ended.
        weight: how much it counts.
        is_failed: it was lost with a node once too often.
        is_late: it ended after its deadline.
        num_moves: how often its devices changed while it ran, and how often it was stopped and went on.
        ideal_device_s: device seconds that its work takes at its best rate for each device.
        redone_steps: steps that were lost with a node.
    """

    name: str
    arrival_s: float
    end_s: float
    weight: float
    is_failed: bool
    is_late: bool
    num_moves: int
    ideal_device_s: float
    redone_steps: float

    @property
    def completion_s(self) -> float:
        """Time from arrival to end."""
        return self.end_s - self.arrival_s


@dataclasses.dataclass(frozen=True, slots=True)
class Simulated:
    """A simulation.

    Attributes:
        policy: its name.
        jobs: what became of each, in the order of arrival.
        spans: who had which devices when.
        available_device_s: device seconds of nodes that were there, from the first arrival to the last end.
        num_decisions: how often the policy was asked.
        longest_decision_s, mean_decision_s: time that it took.
        worst_gap: the greatest gap of a decision; None where the policy proves nothing.
    """

    policy: str
    jobs: tuple[JobRecord, ...]
    spans: tuple[Span, ...]
    available_device_s: float
    num_decisions: int
    longest_decision_s: float
    mean_decision_s: float
    worst_gap: float | None

    @property
    def figures(self) -> "Figures":
        """What is compared."""
        done = [job for job in self.jobs if not job.is_failed]
        times = sorted(job.completion_s for job in done) or [math.nan]
        begin = min((job.arrival_s for job in self.jobs), default=0.0)
        busy = sum((s.end_s - s.start_s) * s.placement.footprint.num_devices for s in self.spans)
        return Figures(
            policy=self.policy,
            num_jobs=len(self.jobs),
            mean_completion_s=statistics.fmean(times),
            p99_completion_s=times[min(math.ceil(0.99 * len(times)), len(times)) - 1],
            makespan_s=max((job.end_s for job in self.jobs), default=0.0) - begin,
            utilisation=busy / self.available_device_s if self.available_device_s else 0.0,
            efficiency=sum(j.ideal_device_s for j in done) / self.available_device_s
            if self.available_device_s
            else 0.0,
            num_failed=sum(job.is_failed for job in self.jobs),
            num_late=sum(job.is_late for job in self.jobs),
            num_moves=sum(job.num_moves for job in self.jobs),
            mean_decision_s=self.mean_decision_s,
            longest_decision_s=self.longest_decision_s,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """Of one simulation.

    Attributes:
        policy: its name.
        num_jobs: how many came.
        mean_completion_s, p99_completion_s: time from arrival to end, of jobs that did not fail.
        makespan_s: from the first arrival to the last end.
        utilisation: share of the available device seconds that some job had.
        efficiency: share of them that the finished jobs' work takes at its best rate for each device.
        num_failed, num_late: jobs lost with their nodes; jobs after their deadlines.
        num_moves: changes of the devices of running jobs, stops included.
        mean_decision_s, longest_decision_s: time of a decision.
    """

    policy: str
    num_jobs: int
    mean_completion_s: float
    p99_completion_s: float
    makespan_s: float
    utilisation: float
    efficiency: float
    num_failed: int
    num_late: int
    num_moves: int
    mean_decision_s: float
    longest_decision_s: float
