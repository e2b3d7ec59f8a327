"""A plan of one problem that is known, and what each of its decisions adds to the step and to memory."""

import dataclasses

import numpy as np

from autoshard.cost.exposure import Stretch
from autoshard.planner.step_times import OwnTimes
from autoshard.solver.tabulated import Taken

Sparse = tuple[np.ndarray, np.ndarray]
"""Owners, int64, and the amount of each, float64; none of the others."""


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A plan that fits the budget, and the time of its step."""

    choices: tuple[int, ...]
    step_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class KnownPlan:
    """A known plan.

    Attributes:
      choices: int64 [decisions]. key: They as bytes, by which plans are told apart.
      times: What each decision and edge adds to the step. taken: What each usage takes.
      least_s, sent_s: Of `times`, the time without what is waited for, and that of what can hide.
      step_s: Its step. stretches: Where more is to be sent than hides. exceeded: Instants that exceed the budget.
    """

    choices: np.ndarray
    key: bytes
    times: OwnTimes
    taken: Taken
    least_s: Sparse
    sent_s: Sparse
    step_s: float
    stretches: tuple[Stretch, ...]
    exceeded: tuple[int, ...]

    @property
    def made(self) -> Made | None:
        """The plan if it fits."""
        return None if self.exceeded else Made(tuple(self.choices.tolist()), self.step_s)

    @property
    def total_sent_s(self) -> float:
        """The time of all that can hide."""
        return float(self.sent_s[1].sum())


def sparse(amounts: np.ndarray) -> Sparse:
    """The amounts of owners that have any."""
    owners = np.flatnonzero(amounts)
    return owners, amounts[owners]
