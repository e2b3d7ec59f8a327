"""Who gets what, why, and what else was close."""

import dataclasses

from autoshard.printing import duration
from autoshard.share.allocation.build import formulate
from autoshard.share.allocation.cp_sat import SolveLimits, solve_allocation
from autoshard.share.allocation.decide import decide
from autoshard.share.allocation.objective import DecisionRules
from autoshard.share.allocation.problem import AllocationProblem, Choice
from autoshard.share.footprint import Footprint
from autoshard.share.rates import Source
from autoshard.share.situation import Decision, JobState, Situation

_MOST_EXPLAINED = 40
"""Jobs for which the next best is sought: each needs a search of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Alternative:
    """The best decision in which a job gets something else.

    Attributes:
        footprint: what it gets there; None where it waits.
        loss: value that the whole decision loses, relative to its own.
        others: jobs that get something else there, too.
    """

    footprint: Footprint | None
    loss: float
    others: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Explained:
    """What a job got.

    Attributes:
        state: the job.
        footprint: what it runs on; None where it waits.
        source: where its rate comes from.
        nodes: their numbers.
        steps_per_s: its rate.
        ends_in_s: time to its end if nothing changes; infinite where it waits.
        why: in words.
        alternative: what else was close; None where it was not sought, or where there is nothing else.
    """

    state: JobState
    footprint: Footprint | None
    source: Source | None
    nodes: tuple[int, ...]
    steps_per_s: float
    ends_in_s: float
    why: str
    alternative: Alternative | None


def decide_and_explain(
    situation: Situation, rules: DecisionRules, limits: SolveLimits
) -> tuple[Decision, tuple[Explained, ...]]:
    """A decision, with the reasons for what each job got.

    Raises:
        ShareError: as `decide`.
    """
    decision = decide(situation, rules, limits)
    problem = formulate(situation, rules)
    alternatives: dict[str, Alternative] = {}
    if len(situation.jobs) <= _MOST_EXPLAINED:
        alternatives = _alternatives(problem, decision, limits)
    explained = tuple(_explained(situation, state, decision, alternatives) for state in situation.jobs)
    return decision, explained


def _alternatives(problem: AllocationProblem, decision: Decision, limits: SolveLimits) -> dict[str, Alternative]:
    """For each job the best decision without what it got."""
    best = decision.value if decision.value is not None else 0.0
    quick = dataclasses.replace(limits, time_limit_s=max(limits.time_limit_s / max(len(problem.jobs), 1), 0.5))
    found = {}
    for number, job in enumerate(problem.jobs):
        own = decision.placements.get(job.name)
        footprint = None if own is None else own.footprint
        others = tuple(choice for choice in job.choices if not _is_same(choice, footprint))
        if not others:
            continue
        jobs = list(problem.jobs)
        jobs[number] = dataclasses.replace(job, choices=others)
        solution = solve_allocation(dataclasses.replace(problem, jobs=tuple(jobs)), quick)
        chosen = {j.name: _now(j.choices[n]) for j, n in zip(jobs, solution.chosen, strict=True)}
        placed = {name: p.footprint for name, p in decision.placements.items()}
        changed = tuple(name for name, what in chosen.items() if what != placed.get(name) and name != job.name)
        loss = (best - solution.value) / max(abs(best), 1e-12)
        found[job.name] = Alternative(chosen[job.name], loss, changed)
    return found


def _is_same(choice: Choice, footprint: Footprint | None) -> bool:
    return _now(choice) == footprint


def _now(choice: Choice) -> Footprint | None:
    return choice.footprint if choice.first_period == 0 else None


def _explained(
    situation: Situation, state: JobState, decision: Decision, alternatives: dict[str, Alternative]
) -> Explained:
    placement = decision.placements.get(state.job.name)
    alternative = alternatives.get(state.job.name)
    if placement is None:
        return Explained(
            state, None, None, (), 0.0, float("inf"), _why_it_waits(state, decision, alternative), alternative
        )
    rate = next(r for r in state.job.rates.entries if r.footprint == placement.footprint)
    pause_s = 0.0 if placement == state.placement else state.job.move_s
    ends_in_s = pause_s + state.remaining_steps / rate.steps_per_s
    return Explained(
        state,
        placement.footprint,
        rate.source,
        tuple(sorted(placement.nodes)),
        rate.steps_per_s,
        ends_in_s,
        _why_it_runs(situation, state, decision, ends_in_s),
        alternative,
    )


def _why_it_waits(state: JobState, decision: Decision, alternative: Alternative | None) -> str:
    least = min(rate.footprint.num_devices for rate in state.job.rates.entries)
    text = f"waits; it needs at least {least} device{'s' * (least > 1)}"
    if alternative is not None and alternative.others:
        text += f", and giving them to it would take them from {', '.join(alternative.others[:3])}"
    return text


def _why_it_runs(situation: Situation, state: JobState, decision: Decision, ends_in_s: float) -> str:
    placement = decision.placements[state.job.name]
    best = state.job.rates.best
    size = placement.footprint.num_devices
    rate = state.job.rates.of(placement.footprint)
    if placement.footprint == best.footprint:
        text = "as fast as it can be"
    else:
        share = size / best.footprint.num_devices
        text = f"{rate / best.steps_per_s:.0%} of its best speed, on {share:.0%} of the devices"
    if state.placement is not None:
        text += "; stays" if placement == state.placement else f"; moves from {state.placement.footprint}"
    deadline_s = state.job.deadline_s
    if deadline_s is not None:
        spare_s = deadline_s - situation.now_s - ends_in_s
        text += f"; {duration(abs(spare_s))} {'before' if spare_s >= 0 else 'AFTER'} its deadline"
    return text
