"""What a decision is for, and what keeps it from changing its mind too often."""

import dataclasses
import enum


class Objective(enum.Enum):
    """What is made as good as possible.

    `completion`: the weighted mean of the times from arrival to end, by heSRPT's prices (`completion_prices.py`).
    `throughput`: weighted progress, in devices of ideal efficiency: how many devices do as much as one of a job's best.
    `fairness`: the greatest finish-time fairness, then the mean of it (`job_values.py`).
    `makespan`: the time at which the last job ends.
    `deadlines`: the weight of jobs that miss their deadline, then the completion times.
    """

    COMPLETION = "completion"
    THROUGHPUT = "throughput"
    FAIRNESS = "fairness"
    MAKESPAN = "makespan"
    DEADLINES = "deadlines"


@dataclasses.dataclass(frozen=True, slots=True)
class DecisionRules:
    """How decisions are made.

    Attributes:
        objective: what for.
        payback_s: a job moves only if that pays within so long; also the first period of the horizon.
        hysteresis: share of what a move promises that is not believed.
        num_periods: periods of the horizon, each twice as long as the one before; 1 decides for now only.
    """

    objective: Objective = Objective.COMPLETION
    payback_s: float = 900.0
    hysteresis: float = 0.05
    num_periods: int = 1

    @property
    def boundaries_s(self) -> tuple[float, ...]:
        """When each period begins, from now on."""
        return tuple(self.payback_s * (2**period - 1) for period in range(self.num_periods))

    @property
    def horizon_s(self) -> float:
        """When the last period ends."""
        return self.payback_s * (2**self.num_periods - 1)
