"""From a situation to the problem of allocation."""

from collections.abc import Sequence

from autoshard.share.allocation.job_values import JobValues, job_values
from autoshard.share.allocation.objective import DecisionRules, Objective
from autoshard.share.allocation.problem import AllocationProblem, Choice, JobChoices
from autoshard.share.pool import Node, Placement
from autoshard.share.rates import Rate
from autoshard.share.situation import JobState, Situation


def formulate(
    situation: Situation, rules: DecisionRules, values: Sequence[JobValues] | None = None
) -> AllocationProblem:
    """The problem whose solution is the decision for a situation; `values` are its `job_values`, if at hand."""
    values = job_values(situation, rules) if values is None else values
    jobs = tuple(
        JobChoices(state.job.name, _choices(state, own, situation.nodes, rules), kept_placement(state, situation.nodes))
        for state, own in zip(situation.jobs, values, strict=True)
    )
    worst = 0.0
    if rules.objective is Objective.FAIRNESS:
        worst = sum(state.job.weight for state in situation.jobs)
    elif rules.objective is Objective.MAKESPAN:
        worst = 1.0 / max(rules.horizon_s, 1.0)
    return AllocationProblem(situation.nodes, jobs, worst, rules.num_periods)


def kept_placement(state: JobState, nodes: tuple[Node, ...]) -> Placement | None:
    """Where a job runs, if all of its nodes are there."""
    there = {node.number: node.num_devices for node in nodes}
    placement = state.placement
    if placement is None or any(there.get(one.node, 0) < one.num_devices for one in placement.taken):
        return None
    return placement


def allowed_rates(state: JobState, nodes: tuple[Node, ...]) -> tuple[Rate, ...]:
    """What a job may run on now, whether or not it stays where it is: a job of fixed size has one number of devices."""
    groups = {node.group for node in nodes}
    entries = [r for r in state.job.rates.entries if set(r.footprint.groups) <= groups]
    if not state.job.is_elastic:
        entries = [r for r in entries if r.footprint.num_devices == state.job.requested]
    return tuple(entries)


def _choices(state: JobState, values: JobValues, nodes: tuple[Node, ...], rules: DecisionRules) -> tuple[Choice, ...]:
    choices = []
    boundaries_s = rules.boundaries_s
    is_there = kept_placement(state, nodes) is not None
    if is_there and state.placement is not None:
        kept = values.keep()
        end = _end_period(state.remaining_steps / state.rate, boundaries_s)
        choices.append(Choice(state.placement.footprint, kept.value, kept.severity, True, 0, end))
    may_stop = not is_there or state.job.is_preemptible
    if may_stop:
        waiting = values.wait()
        choices.append(Choice(None, waiting.value, waiting.severity))
    if is_there and not state.job.is_elastic and not state.job.is_preemptible:
        return tuple(choices)
    for rate in allowed_rates(state, nodes):
        runs_s = state.job.move_s + state.remaining_steps / rate.steps_per_s
        for period, start_s in enumerate(boundaries_s):
            if period and is_there and not state.job.is_preemptible:
                break
            worth = values.move(rate, start_s)
            end = _end_period(start_s + runs_s, boundaries_s)
            choices.append(Choice(rate.footprint, worth.value, worth.severity, False, period, end))
    return tuple(choices)


def _end_period(end_s: float, boundaries_s: tuple[float, ...]) -> int:
    """The first period that begins after a time from now."""
    return next(
        (period for period, start_s in enumerate(boundaries_s) if period and start_s >= end_s), len(boundaries_s)
    )
