"""What became of the search for a plan: the best over all meshes, and a verdict on each."""

import dataclasses
from collections.abc import Mapping, Sequence

from autoshard.planner.build import Formulation
from autoshard.planner.decode import Evaluation, evaluate
from autoshard.planner.overlap import StretchWeights
from autoshard.plans.known_plan import Made
from autoshard.plans.options import PlanOptions
from autoshard.plans.program_plan import MeshCandidate
from autoshard.solver.options import ROUNDING
from autoshard.solver.problem import Certificate, Solution, Status

NO_MEMORY, NOT_TRIED, NOT_FASTER = "does not fit the memory", "not tried: stopped", "cannot beat the best"
LEFT, PASSED_BY = "another order is faster", "passed by: nothing faster was found soon"
"""Verdicts on a mesh."""


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
      others: Plans of its problem, some of which may be faster as the compiler schedules them.
    """

    best: tuple[Formulation, Solution] | None
    candidates: tuple[MeshCandidate, ...]
    warnings: tuple[str, ...]
    evaluation: Evaluation | None = None
    weights: StretchWeights | None = None
    prices: Mapping[int, float] = dataclasses.field(default_factory=dict)
    fits: bool = False
    others: tuple[Made, ...] = ()

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

    def is_better(self, before: "Found") -> bool:
        """Whether its plan takes the place of the best one before: one that fits with its gaps before one that does
        not."""
        if self.best is None or before.best is None:
            return self.best is not None
        return self.fits if self.fits != before.fits else self.step_s < before.step_s

    def after(self, again: "Found", to_beat_s: float) -> "Found":
        """The outcome after one more mesh was tried, where it had `to_beat_s` to beat. No proof is about a mesh that is
        neither faster nor, by its bound, out of the question."""
        tried = {c.hardware for c in again.candidates}  # maybe not for the first time
        before = [c for c in self.candidates if c.hardware not in tried]
        if again.is_done and again.fits >= self.fits and again.step_s < self.step_s:
            before = [_passed_by(c, again.cost_s) if c.verdict == LEFT else c for c in before]
            return dataclasses.replace(again, candidates=(*before, *again.candidates), warnings=self.warnings)
        own = [_passed_by(c, to_beat_s) for c in again.candidates]
        return dataclasses.replace(self, candidates=(*before, *own))

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
