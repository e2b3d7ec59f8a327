"""Ours: the integer program, at every event; and the same for jobs of fixed size that never move."""

import dataclasses

from autoshard.share.allocation.cp_sat import SolveLimits
from autoshard.share.allocation.decide import decide
from autoshard.share.allocation.objective import DecisionRules
from autoshard.share.situation import Decision, Situation


@dataclasses.dataclass(frozen=True, slots=True)
class Optimal:
    """Decides by `autoshard.share.allocation`.

    Attributes:
        rules: what for.
        limits: of each search.
        is_rigid: every job gets the devices that it asks for, and keeps them to its end.
    """

    rules: DecisionRules = DecisionRules()
    limits: SolveLimits = SolveLimits()
    is_rigid: bool = False
    round_s: float = 0.0

    @property
    def name(self) -> str:
        """`rigid`, or the objective."""
        return "rigid" if self.is_rigid else f"autoshard ({self.rules.objective.value})"

    def decide(self, situation: Situation) -> Decision:
        """Solves it."""
        return decide(_fixed(situation) if self.is_rigid else situation, self.rules, self.limits)


def _fixed(situation: Situation) -> Situation:
    """The same with jobs that may neither move nor be stopped."""
    jobs = tuple(
        dataclasses.replace(state, job=dataclasses.replace(state.job, is_elastic=False, is_preemptible=False))
        for state in situation.jobs
    )
    return dataclasses.replace(situation, jobs=jobs)
