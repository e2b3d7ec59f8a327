"""Jobs in the order of a decision: those that run first, each with a number that other schedulers sort by."""

import dataclasses

from autoshard.share.allocation.job_values import job_values
from autoshard.share.allocation.objective import DecisionRules
from autoshard.share.footprint import Footprint
from autoshard.share.situation import Decision, Situation

_STEP, _TOP = 10, 100_000


@dataclasses.dataclass(frozen=True, slots=True)
class Ranked:
    """A job for another scheduler.

    Attributes:
        name: of the job.
        priority: a greater one comes first; all differ.
        footprint: what it should have; None where it should wait.
    """

    name: str
    priority: int
    footprint: Footprint | None


def ranked(situation: Situation, decision: Decision, rules: DecisionRules) -> tuple[Ranked, ...]:
    """The jobs, the most important first: those that run before others, then by the price of their progress."""
    prices = {own.state.job.name: own.price for own in job_values(situation, rules)}
    names = [state.job.name for state in situation.jobs]
    order = sorted(names, key=lambda name: (name not in decision.placements, -prices[name], name))
    return tuple(
        Ranked(name, _TOP - _STEP * place, decision.placements[name].footprint if name in decision.placements else None)
        for place, name in enumerate(order)
    )
