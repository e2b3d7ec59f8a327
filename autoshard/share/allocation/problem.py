"""Who gets which devices, as data: jobs with their choices, and the nodes that these share."""

import dataclasses

from autoshard.share.footprint import Footprint
from autoshard.share.pool import Node, Placement


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One thing that may become of a job.

    Attributes:
        footprint: what it runs on; None where it waits.
        value: what that is worth.
        severity: what the worst job is judged by; only its maximum over all jobs counts.
        is_kept: it stays where it is, on the very same devices.
        first_period, end_period: the periods in which it has the devices; the period 0 is now.
    """

    footprint: Footprint | None
    value: float
    severity: float = 0.0
    is_kept: bool = False
    first_period: int = 0
    end_period: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class JobChoices:
    """A job: it gets exactly one of its choices.

    Attributes:
        name: of the job.
        choices: at least one.
        placement: where it runs now; what `is_kept` stands for.
    """

    name: str
    choices: tuple[Choice, ...]
    placement: Placement | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AllocationProblem:
    """Maximise the value of all choices, less `worst_weight` times the greatest severity, on the nodes that are there.

    Attributes:
        nodes: the devices.
        jobs: who wants them.
        worst_weight: price of the greatest severity.
        num_periods: periods that the choices speak of. In the first, jobs are placed on nodes; in later ones, only the
            devices of each group are counted.
    """

    nodes: tuple[Node, ...]
    jobs: tuple[JobChoices, ...]
    worst_weight: float = 0.0
    num_periods: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class AllocationSolution:
    """A choice for each job, and how good that provably is.

    Attributes:
        chosen: for each job the number of its choice.
        placements: for each job, where it runs now; None where it does not.
        value: of the objective.
        bound: no solution has a greater value.
        solved_in_s: time it took.
    """

    chosen: tuple[int, ...]
    placements: tuple[Placement | None, ...]
    value: float
    bound: float
    solved_in_s: float


def value_of(problem: AllocationProblem, chosen: tuple[int, ...]) -> float:
    """The objective of a choice for each job."""
    picked = [job.choices[number] for job, number in zip(problem.jobs, chosen, strict=True)]
    worst = max((choice.severity for choice in picked), default=0.0)
    return sum(choice.value for choice in picked) - problem.worst_weight * max(worst, 0.0)
