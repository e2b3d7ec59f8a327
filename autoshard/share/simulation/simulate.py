"""Runs jobs on a simulated cluster under a policy, from event to event.

Between two events every job takes steps at the rate of its footprint, after a pause in which it is started or moved.
The policy is asked at arrivals, ends, failures and repairs, or in rounds; its decision is checked before it is obeyed.
"""

import dataclasses
import math
import time
from collections.abc import Sequence

from autoshard.share.policies.policy import Policy
from autoshard.share.pool import Node, Placement
from autoshard.share.simulation.checks import check_decision
from autoshard.share.simulation.events import NodeFailure
from autoshard.share.simulation.outcome import JobRecord, Simulated, Span
from autoshard.share.situation import Decision, Job, JobState, Situation

_EPSILON_S = 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class SimulationSettings:
    """What a simulation assumes.

    Attributes:
        failures: nodes that fail.
        retries: failures that a job survives; None for any number, as under a supervisor.
        checkpoint_s: time between checkpoints on disk: what a job on one node loses at most when that fails. A job on
            several nodes loses nothing, since each has a copy of its neighbour's state.
        refresh_s: a decision is made at least so often while there are jobs.
    """

    failures: tuple[NodeFailure, ...] = ()
    retries: int | None = None
    checkpoint_s: float = 1800.0
    refresh_s: float = 900.0


def simulate(
    jobs: Sequence[Job], nodes: Sequence[Node], policy: Policy, settings: SimulationSettings = SimulationSettings()
) -> Simulated:
    """Runs all jobs to their end.

    Args:
        jobs: what comes, and when.
        nodes: the cluster.
        policy: who decides.
        settings: what is assumed.

    Returns:
        What became of the jobs.

    Raises:
        ShareError: the policy decided what cannot be, or jobs wait for ever.
    """
    return _Simulation(jobs, nodes, policy, settings).run()


class _Simulation:
    def __init__(self, jobs: Sequence[Job], nodes: Sequence[Node], policy: Policy, settings: SimulationSettings):
        self._coming = sorted(jobs, key=lambda job: (job.arrival_s, job.name))
        self._nodes, self._policy, self._settings = nodes, policy, settings
        self._states: dict[str, JobState] = {}
        self._since_s: dict[str, float] = {}
        self._survived: dict[str, int] = {}
        self._redone: dict[str, float] = {}
        self._records: dict[str, JobRecord] = {}
        self._spans: list[Span] = []
        self._down: dict[int, float] = {}
        self._failures = list(settings.failures)
        self._now_s = self._coming[0].arrival_s if self._coming else 0.0
        self._available_device_s = 0.0
        self._is_due, self._decided_at_s = True, -math.inf
        self._decisions: list[float] = []
        self._gaps: list[float] = []

    def run(self) -> Simulated:
        """Goes from event to event until nobody is left."""
        while self._coming or self._states:
            self._take_events()
            if not self._states and not self._coming:
                break
            if self._is_due and self._now_s >= self._next_round_s() - _EPSILON_S:
                self._decide()
            self._advance(self._next_event_s())
        order = sorted(self._records.values(), key=lambda record: (record.arrival_s, record.name))
        return Simulated(
            self._policy.name,
            tuple(order),
            tuple(self._spans),
            self._available_device_s,
            len(self._decisions),
            max(self._decisions, default=0.0),
            sum(self._decisions) / max(len(self._decisions), 1),
            max(self._gaps, default=None),
        )

    def _next_round_s(self) -> float:
        return self._decided_at_s + self._policy.round_s

    def _next_event_s(self) -> float:
        times = [state.ends_s(self._now_s) for state in self._states.values()]
        times += [self._coming[0].arrival_s] if self._coming else []
        times += [self._failures[0].fails_s] if self._failures else []
        times += list(self._down.values())
        if self._is_due:
            times.append(max(self._next_round_s(), self._now_s))
        if self._states:
            times.append(self._decided_at_s + max(self._settings.refresh_s, self._policy.round_s))
        return min(times)

    def _advance(self, until_s: float) -> None:
        """Everybody takes steps."""
        for name, state in self._states.items():
            runs_s = max(until_s - max(self._now_s, state.paused_until_s), 0.0)
            if state.placement is not None and runs_s:
                left = state.remaining_steps - runs_s * state.rate
                self._states[name] = dataclasses.replace(state, remaining_steps=max(left, 0.0))
        devices = sum(node.num_devices for node in self._up())
        self._available_device_s += devices * (until_s - self._now_s)
        self._now_s = until_s

    def _take_events(self) -> None:
        """What happens now."""
        now_s = self._now_s + _EPSILON_S
        for state in list(self._states.values()):
            if state.placement is not None and state.remaining_steps <= state.rate * _EPSILON_S:
                self._end(state, is_failed=False)
        while self._failures and self._failures[0].fails_s <= now_s:
            self._fail(self._failures.pop(0))
        for node in [node for node, repaired_s in self._down.items() if repaired_s <= now_s]:
            del self._down[node]
            self._is_due = True
        while self._coming and self._coming[0].arrival_s <= now_s:
            job = self._coming.pop(0)
            self._states[job.name] = JobState(job, job.steps)
            self._is_due = True
        if self._states and self._now_s >= self._decided_at_s + self._settings.refresh_s - _EPSILON_S:
            self._is_due = True

    def _fail(self, failure: NodeFailure) -> None:
        """A node is gone, and the jobs on it lose what only it had."""
        self._down[failure.node] = failure.repaired_s
        self._is_due = True
        for state in list(self._states.values()):
            if state.placement is None or failure.node not in state.placement.nodes:
                continue
            name = state.job.name
            self._survived[name] = self._survived.get(name, 0) + 1
            lost = 0.0
            if len(state.placement.nodes) == 1:
                ran_s = max(self._now_s - state.paused_until_s, 0.0)
                lost = ran_s % self._settings.checkpoint_s * state.rate
            self._redone[name] = self._redone.get(name, 0.0) + lost
            self._close_span(state)
            state = dataclasses.replace(state, placement=None, remaining_steps=state.remaining_steps + lost)
            self._states[name] = state
            if self._settings.retries is not None and self._survived[name] > self._settings.retries:
                self._end(state, is_failed=True)

    def _decide(self) -> None:
        situation = Situation(self._now_s, self._up(), tuple(self._states.values()))
        started_s = time.perf_counter()
        decision = self._policy.decide(situation)
        self._decisions.append(time.perf_counter() - started_s)
        if decision.gap is not None:
            self._gaps.append(decision.gap)
        check_decision(situation, decision)
        is_changed = self._obey(decision)
        self._decided_at_s, self._is_due = self._now_s, is_changed and self._policy.round_s > 0

    def _obey(self, decision: Decision) -> bool:
        is_changed = False
        for name, state in list(self._states.items()):
            placement = decision.placements.get(name)
            if placement == state.placement:
                continue
            is_changed = True
            self._close_span(state)
            self._states[name] = self._placed(state, placement)
        return is_changed

    def _placed(self, state: JobState, placement: Placement | None) -> JobState:
        if placement is None:
            return dataclasses.replace(state, placement=None)
        self._since_s[state.job.name] = self._now_s
        return dataclasses.replace(
            state,
            placement=placement,
            num_moves=state.num_moves + state.has_run,
            has_run=True,
            paused_until_s=self._now_s + state.job.move_s,
        )

    def _close_span(self, state: JobState) -> None:
        if state.placement is not None:
            start_s = self._since_s[state.job.name]
            paused_until_s = min(state.paused_until_s, self._now_s)
            self._spans.append(Span(state.job.name, state.placement, start_s, paused_until_s, self._now_s))

    def _end(self, state: JobState, is_failed: bool) -> None:
        job = state.job
        self._close_span(state)
        best = max(rate.steps_per_s / rate.footprint.num_devices for rate in job.rates.entries)
        self._records[job.name] = JobRecord(
            job.name,
            job.arrival_s,
            self._now_s,
            job.weight,
            is_failed,
            job.deadline_s is not None and self._now_s > job.deadline_s + _EPSILON_S,
            state.num_moves,
            job.steps / best,
            self._redone.get(job.name, 0.0),
        )
        del self._states[job.name]
        self._is_due = True

    def _up(self) -> tuple[Node, ...]:
        return tuple(node for node in self._nodes if node.number not in self._down)
