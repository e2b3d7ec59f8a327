"""What became of the search for a plan: the best over all meshes, and a verdict on each."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from autoshard.planner.build import Formulation
from autoshard.planner.decode import Evaluation, evaluate
from autoshard.planner.overlap import StretchWeights
from autoshard.plans.options import PlanOptions
from autoshard.plans.program_plan import MeshCandidate
from autoshard.solver.options import ROUNDING
from autoshard.solver.problem import Certificate, Solution, Status

NO_MEMORY, NOT_TRIED, NOT_FASTER = "does not fit the memory", "not tried: stopped", "cannot beat the best"
LEFT, PASSED_BY = "another order is faster", "passed by: nothing faster was found soon"
"""Verdicts on a mesh."""

WAITS = 0.02
"""A plan waits longer than the solver counts, if by more than this share of its step. Another is better if it is faster
by more than this and what the solver counts more for it: the model of a compiler's schedule is no more exact."""

_AS_GOOD, _OF_WAITING = 0.01, 0.1
"""Where a plan waits longer than the solver counts: how much longer than its own a step may take elsewhere, as the
solver counts it, for that mesh to be searched, as a share of the step and of what it waits longer: choices. A GPT under
8 GB takes 50.4 ms on 64 H100 on two meshes, as the solver counts it, and by replay 62.0 and 59.2. Of six layers of
GPT-3 175B on 1,024 H100 a step takes 430 ms on data=128, tensor=8, as the solver counts it, and by replay 538; on
data=512, tensor=2 433 and 487 (`benchmarks/exposed.py`, scripts that are not kept)."""

_FARTHEST = 0.05
"""By which share of its step the solver may count more for a plan than for its own best. What is expected of plans that
are farther away is off by more, and the best of many is one of which too much is expected: of GPT-3 175B on 1,024 H100
with six layers one that is 14 % away, on data=256, tensor=4, was expected to take 528 ms, and takes 579 by replay, but
one that is 1 % away, on data=512, tensor=2, 513 and 487."""


def most_cost_s(least_s: float) -> float:
    """The step as the solver counts it of the farthest plan that is taken, if its own best takes `least_s`."""
    return (1 + _FARTHEST) * least_s


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The outcome over all meshes.

    Attributes:
      best: The problem of the best mesh, and its solution; None if no mesh has one.
      candidates: What became of each mesh.
      warnings: What the user should know about the search.
      evaluation: The best as the compiler has it; None where the search did not ask.
      weights: Those of stretches that bound best on its mesh; None where nothing hides.
      prices: Of instants of its problem, with which they did.
      fits: Whether the best fits with the gaps between its buffers.
      least_s: Of any plan that is known, as the solver counts it.
    """

    best: tuple[Formulation, Solution] | None
    candidates: tuple[MeshCandidate, ...]
    warnings: tuple[str, ...]
    evaluation: Evaluation | None = None
    weights: StretchWeights | None = None
    prices: Mapping[int, float] = dataclasses.field(default_factory=dict)
    fits: bool = False
    least_s: float = math.inf

    @property
    def winner(self) -> tuple[Formulation, Solution]:
        """The problem of the best mesh, and its solution, of which there must be one."""
        assert self.best is not None, self.candidates
        return self.best

    @property
    def is_done(self) -> bool:
        """Whether there is a best, whose mesh was not left."""
        return self.best is not None and all(
            c.verdict != LEFT for c in self.candidates if c.hardware == str(self.winner[0].mesh)
        )

    @property
    def evaluated(self) -> Evaluation:
        """The best as the compiler has it."""
        formulation, chosen = self.winner
        return self.evaluation or evaluate(formulation, chosen.chosen)

    @property
    def cost_s(self) -> float:
        """Of the best plan, as the solver counts it."""
        return self.winner[1].certificate.objective

    @property
    def step_s(self) -> float:
        """Of the best plan, by which it is compared with others."""
        return scheduled_s(self.winner[1], self.evaluated)

    @property
    def waits_longer(self) -> bool:
        """Whether the best plan waits longer for collectives than the solver counts."""
        return self.best is not None and self.step_s - self.cost_s > WAITS * self.step_s

    def to_beat_s(self, relative_gap: float) -> float:
        """The step, as the solver counts it, that a plan on another mesh must beat to be worth a search: that of the
        best by the wanted gap; or about that, where the best waits longer than the solver counts, as a plan there may
        be scheduled better."""
        if not self.waits_longer:
            return self.cost_s * (1 - relative_gap)
        return self.cost_s + max(_AS_GOOD * self.cost_s, _OF_WAITING * (self.step_s - self.cost_s))

    def is_better(self, before: "Found") -> bool:
        """Whether its plan takes the place of the best one before: one that fits with its gaps before one that does
        not."""
        if self.best is None or before.best is None:
            return self.best is not None
        return self.fits if self.fits != before.fits else self._is_faster(before)

    def _is_faster(self, before: "Found") -> bool:
        """Whether its plan is faster than the best one before, and what is expected of it can be trusted."""
        return self.step_s < before.step_s and self.cost_s <= most_cost_s(min(self.least_s, before.least_s))

    def after(self, again: "Found", to_beat_s: float) -> "Found":
        """The outcome after one more mesh was tried, where it had `to_beat_s` to beat. No proof is about a mesh that is
        neither faster nor, by its bound, out of the question."""
        tried = {c.hardware for c in again.candidates}  # maybe not for the first time
        before = [c for c in self.candidates if c.hardware not in tried]
        least_s = min(self.least_s, again.least_s)
        if again.is_done and again.fits >= self.fits and again._is_faster(self):
            before = [_passed_by(c, again.cost_s) if c.verdict == LEFT else c for c in before]
            candidates = (*before, *again.candidates)
            return dataclasses.replace(again, candidates=candidates, warnings=self.warnings, least_s=least_s)
        own = [_passed_by(c, to_beat_s) for c in again.candidates]
        return dataclasses.replace(self, candidates=(*before, *own), least_s=least_s)

    def certificate(self, options: PlanOptions, elapsed_s: float) -> Certificate:
        """The certificate over all meshes: the bound is the least of any mesh that might still hold a better plan."""
        own = self.winner[1].certificate
        bound = min([own.objective, *open_bounds_s(self.candidates)])
        gap = (own.objective - bound) / own.objective if own.objective else 0.0
        status = Status.OPTIMAL if gap <= max(options.relative_gap, ROUNDING) else Status.FEASIBLE
        return dataclasses.replace(own, status=status, bound=bound, gap=gap, solve_s=elapsed_s)


def scheduled_s(solution: Solution, evaluation: Evaluation) -> float:
    """The step of a plan by which it is compared with others: as its compiler schedules it, where that is known; else
    as the solver counts it.

    `evaluation`: The solution as the compiler has it.
    """
    times = evaluation.compiled_times
    return solution.certificate.objective if times is evaluation.times else times.step_s


def _passed_by(candidate: MeshCandidate, to_beat_s: float) -> MeshCandidate:
    """What became of a mesh on which nothing faster was found soon."""
    if candidate.verdict == NO_MEMORY or candidate.bound_s >= to_beat_s:
        return candidate
    return dataclasses.replace(candidate, verdict=PASSED_BY)


def open_bounds_s(candidates: Sequence[MeshCandidate]) -> list[float]:
    """The bounds of meshes that might still hold a better plan, as far as a proof is about them."""
    return [c.bound_s for c in candidates if c.verdict not in (NO_MEMORY, PASSED_BY)]
