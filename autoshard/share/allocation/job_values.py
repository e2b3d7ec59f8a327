"""What each choice of a job is worth under an objective, with the price of moving it."""

import dataclasses
import math
import statistics

from autoshard.share.allocation.completion_prices import completion_prices
from autoshard.share.allocation.objective import DecisionRules, Objective
from autoshard.share.rates import Rate
from autoshard.share.situation import JobState, Situation


@dataclasses.dataclass(frozen=True, slots=True)
class Worth:
    """Of one choice: its value, and the severity of its job."""

    value: float
    severity: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class JobValues:
    """Values of the choices of one job. They are relative to waiting until `payback_s` is over, which is worth 0.

    Attributes:
        state: the job.
        rules: what for.
        now_s: the time.
        price: of its progress, measured in `unit_rate`; for `completion`, `throughput` and `deadlines`.
        unit_rate: steps in a second that count as one.
        fair_rate: steps in a second on an equal share of the cluster's devices.
    """

    state: JobState
    rules: DecisionRules
    now_s: float
    price: float
    unit_rate: float
    fair_rate: float

    def keep(self) -> Worth:
        """It stays as it is."""
        pause_s = max(self.state.paused_until_s - self.now_s, 0.0)
        return self._worth(self.state.rate, pause_s, 0.0)

    def move(self, rate: Rate, start_s: float = 0.0) -> Worth:
        """It goes on with `rate`, from now or from `start_s` on."""
        worth = self._worth(rate.steps_per_s, self.state.job.move_s, start_s)
        if self.state.placement is None or worth.value <= 0:
            return worth
        return dataclasses.replace(worth, value=worth.value * (1.0 - self.rules.hysteresis))

    def wait(self) -> Worth:
        """It has no devices for now; if it has some, it must be stopped, and restored later."""
        severity = self._severity(self._resumed_end_s())
        if self.state.placement is None:
            return Worth(0.0, severity)
        if self.rules.objective in (Objective.FAIRNESS, Objective.MAKESPAN) or self.rules.num_periods > 1:
            return Worth(0.0, severity)
        lost = self.price * self.fair_rate / self.unit_rate * self.state.job.move_s / self.rules.payback_s
        return Worth(-lost, severity)

    def _worth(self, steps_per_s: float, pause_s: float, start_s: float) -> Worth:
        end_s = start_s + pause_s + self.state.remaining_steps / steps_per_s
        severity = self._severity(end_s)
        weight, objective = self.state.job.weight, self.rules.objective
        resumed_s = self._resumed_end_s()
        if objective is Objective.FAIRNESS:
            return Worth(weight * (self._unfairness(resumed_s) - self._unfairness(end_s)), severity)
        if objective is Objective.MAKESPAN:
            return Worth(0.01 * (resumed_s - end_s) / resumed_s, severity)
        if objective is Objective.DEADLINES:
            return Worth(self._deadline_value(end_s) + 0.01 * self._progress(steps_per_s, pause_s, start_s), severity)
        if self.rules.num_periods > 1:
            return Worth(self.price * (resumed_s - end_s) / self.rules.payback_s, severity)
        return Worth(self._progress(steps_per_s, pause_s, start_s), severity)

    def _progress(self, steps_per_s: float, pause_s: float, start_s: float) -> float:
        """Price times the mean rate until the move has to have paid, or until the job ends if that is sooner."""
        end_s = pause_s + self.state.remaining_steps / steps_per_s
        window_s = self.rules.payback_s
        if end_s <= window_s:
            mean = self.state.remaining_steps / end_s
        else:
            mean = steps_per_s * max(window_s - pause_s, 0.0) / window_s
        later = 1.0 if start_s == 0.0 else window_s / (window_s + start_s)
        return self.price * mean / self.unit_rate * later

    def _deadline_value(self, end_s: float) -> float:
        """1 for each unit of weight that is in time, more than all completion times together."""
        deadline_s = self.state.job.deadline_s
        return self.state.job.weight if deadline_s is not None and self.now_s + end_s <= deadline_s else 0.0

    def _severity(self, end_s: float) -> float:
        if self.rules.objective is Objective.FAIRNESS:
            return self._unfairness(end_s)
        return end_s if self.rules.objective is Objective.MAKESPAN else 0.0

    def _unfairness(self, end_s: float) -> float:
        """Finish-time fairness: the time from arrival to end, by that on an equal share (Themis, NSDI'20)."""
        age_s = self.now_s - self.state.job.arrival_s
        return (age_s + end_s) / (self.state.job.steps / self.fair_rate)

    def _resumed_end_s(self) -> float:
        """When it ends if it waits for the horizon, and then gets an equal share."""
        return self.rules.horizon_s + self.state.job.move_s + self.state.remaining_steps / self.fair_rate


def job_values(situation: Situation, rules: DecisionRules) -> tuple[JobValues, ...]:
    """The values of all jobs of a situation, in their order."""
    if not situation.jobs:
        return ()
    rates = [state.job.rates for state in situation.jobs]
    units = [own.unit_rate for own in rates]
    weights = [state.job.weight for state in situation.jobs]
    prices: tuple[float, ...] = tuple(weights)
    if rules.objective in (Objective.COMPLETION, Objective.DEADLINES) and rules.num_periods == 1:
        sizes = [state.remaining_steps / unit for state, unit in zip(situation.jobs, units, strict=True)]
        prices = completion_prices(sizes, weights, statistics.fmean(own.exponent for own in rates))
    if rules.objective is Objective.THROUGHPUT:
        units = [max(r.steps_per_s / r.footprint.num_devices for r in own.entries) for own in rates]
    share = max(situation.num_devices / len(situation.jobs), 1.0)
    return tuple(
        JobValues(state, rules, situation.now_s, price, unit, _fair_rate(state, share))
        for state, price, unit in zip(situation.jobs, prices, units, strict=True)
    )


def _fair_rate(state: JobState, share: float) -> float:
    """The fastest rate on at most so many devices, or the slowest of all if it needs more, in proportion."""
    entries = state.job.rates.entries
    within = [rate.steps_per_s for rate in entries if rate.footprint.num_devices <= share]
    if within:
        return max(within)
    least = min(entries, key=lambda rate: (rate.footprint.num_devices, -rate.steps_per_s))
    return least.steps_per_s * share / least.footprint.num_devices if math.isfinite(share) else least.steps_per_s
