"""The search over some logical meshes: one problem a mesh, solved in turn, each with the best plan so far to beat."""

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autoshard.cluster import LogicalMesh
from autoshard.interrupts import StopRequest
from autoshard.planner.build import Formulation, whole
from autoshard.planner.decode import evaluate
from autoshard.planner.labels import labels_of
from autoshard.planner.overlap import StretchWeights
from autoshard.planner.timeline import asked_for
from autoshard.plans.as_scheduled import (
    Scheduled,
    as_scheduled,
    solved_as_scheduled,
    solved_with_less,
    with_ties_settled,
)
from autoshard.plans.found import LEFT, NO_MEMORY, NOT_FASTER, NOT_TRIED, Found, most_cost_s, scheduled_s
from autoshard.plans.gaps import tighter_bytes, with_gaps
from autoshard.plans.master_problem import Mixture
from autoshard.plans.pricing import Timed
from autoshard.plans.program_plan import MeshCandidate
from autoshard.plans.question import Question, axes_of, axes_text, report
from autoshard.plans.scheduled_choice import MOST_OTHERS, best_scheduled
from autoshard.plans.starts import choices_of_joined_axes, same_choices, starting_choices
from autoshard.solver.cached import solve_cached
from autoshard.solver.driver import solve
from autoshard.solver.evaluate import CAPACITY_TOLERANCE
from autoshard.solver.io.solution_cache import SolutionCache, default_cache
from autoshard.solver.io.solution_file import read_solution
from autoshard.solver.least_capacity import exceeds, least_capacity
from autoshard.solver.lifted_start import LiftedStart
from autoshard.solver.options import ROUNDING, Progress, SolverOptions
from autoshard.solver.problem import Certificate, Problem, Solution, Status

AGAIN_ROUNDS, AGAIN_SHARE, AGAIN_GAP, AGAIN_MORE = 3, 0.5, 0.05, 1.5
"""How many problems are solved at most, in which share of the time limit, and how exactly, whenever gaps do not fit: a
plan is good enough whose gap is so much larger than that of the plan before."""

LEAST_SHARE = 0.03
"""The share of the limits of a mesh in which it is asked, before plans are sought, whether any fits the memory."""

_AT_ONCE_GAP = 0.05
"""How exactly a bound is sought that is to tell no more than whether a mesh is out of the question."""

_AS_LONG = 1.5
"""How much longer than the longest before a problem may take, whatever its share of the time left."""


def search_meshes(
    question: Question,
    meshes: Sequence[LogicalMesh],
    solution: str | os.PathLike[str] | None,
    stop: StopRequest,
    after: Found | None = None,
    is_left: Callable[[Timed, Mixture], bool] = lambda *_: False,
    weights: StretchWeights | None = None,
) -> Found:
    """Solves the problem of each mesh, or reads its solution from a file; the best of all, and what became of each.

    Args:
      question, meshes, solution, stop: As for `search`. Meshes are searched until there is a plan, however long that
        takes.
      after: What was found on a mesh with the same axes, to begin with; without it, each mesh begins where
        `plans/starts.py` says.
      is_left: Whether the best plan and the best mixture so far tell that a mesh is not worth more time.
      weights: Of stretches, to begin with: those that bounded best elsewhere; None: those of `after`, or the first.

    Raises:
      FileFormatError: If `solution` is none of the problem.
    """
    is_alone = len(meshes) == 1 and weights is None
    # what binds on one mesh mostly binds on another
    weights = after.weights if weights is None and after is not None else weights
    best, candidates, warned = Found(None, (), ()), [], []
    timed = stop.until(question.until_s)
    for n, mesh in enumerate(meshes):
        own_stop = stop if best.best is None and math.isinf(question.to_beat_s) else timed
        if own_stop.requested:
            candidates.append(MeshCandidate(axes_of(mesh), None, 0.0, NOT_TRIED, str(mesh)))
            continue
        weights, stage = weights if best.best is None else best.weights, f"solve {n + 1}/{len(meshes)}"
        limit_s = question.mesh_limit_s(len(meshes) - n)
        own = search_mesh(question, mesh, own_stop, limit_s, best, weights, stage, is_alone, solution, after, is_left)
        candidates += own.candidates
        warned.append(own.warnings)
        least_s = min(own.least_s, best.least_s)
        best = dataclasses.replace(own if own.is_better(best) else best, least_s=least_s)
    warnings = warned[-1] if warned and all(warned) else ()
    return dataclasses.replace(best, candidates=tuple(candidates), warnings=warnings)


def search_mesh(
    question: Question,
    mesh: LogicalMesh,
    stop: StopRequest,
    limit_s: float,
    before: Found,
    weights: StretchWeights | None,
    stage: str,
    is_alone: bool = False,
    solution: str | os.PathLike[str] | None = None,
    after: Found | None = None,
    is_left: Callable[[Timed, Mixture], bool] = lambda *_: False,
) -> Found:
    """Solves the problem of one mesh, or reads its solution from a file.

    Args:
      limit_s: How long it may take.
      before: The best so far. The mesh is left once a bound shows that it cannot beat what a plan must to be worth a
        search (`Found.to_beat_s`), and no plan is found that does not.
      weights: Of stretches, to begin with. stage: For people.
      is_alone: Whether simpler meshes are not searched, and so are asked for a plan to begin with.
      All others as for `search_meshes`.
    """
    options = question.options
    cache = default_cache() if options.cache else None
    axes = axes_of(mesh)
    cutoff = question.to_beat_s
    if before.fits:
        cutoff = min(cutoff, before.to_beat_s(options.relative_gap))
    tell = _Teller(question, stage, axes_text(axes), cutoff)
    tell.begin()
    formulation = question.formulation(mesh, weights=weights)
    limits = SolverOptions(
        time_limit_s=limit_s,
        relative_gap=options.relative_gap,
        seed=options.seed,
        work_limit=options.work_limit,
    )
    solve_one = functools.partial(_solved, cache=cache, tell=tell, stop=stop)
    scheduled, why_not_started = None, None
    if solution is not None:
        found = with_ties_settled(formulation, read_solution(solution, formulation.problem))
        if formulation.overlap.weights is not None:
            step_s = asked_for(formulation, found.chosen).step_s
            certificate = as_scheduled(found.certificate, step_s, options.relative_gap)
            found = dataclasses.replace(found, certificate=certificate)
    else:
        first = None
        if after is not None:
            first = same_choices(formulation, after.winner[0], after.winner[1].chosen)
        elif question.start is not None:
            first, why_not_started = starting_choices(question, formulation, limits, stop)
        elif question.restrict is None and is_alone:  # else simpler meshes are searched themselves
            any_cost = dataclasses.replace(tell, cutoff=math.inf)
            aside = functools.partial(solve_one, tell=any_cost)
            first = choices_of_joined_axes(question, formulation, limits, aside)
        is_too_small = functools.partial(_is_too_small, limits=limits, stop=stop)
        # what was found on a mesh with the same axes fits on this one
        series = _Series(limits, solve_one, is_too_small if after is None else None)
        if after is not None:
            series.price(_at_instants(formulation, after.winner[0], after.prices))
        elsewhere_s = cutoff / max(1 - options.relative_gap, ROUNDING)
        scheduled = solved_as_scheduled(
            formulation,
            first,
            options.relative_gap,
            series,
            to_beat_s=elsewhere_s,
            is_left=is_left,
            limit_bytes=_limit_bytes,
            branches=question.branches,
        )
        formulation, found = scheduled.formulation, scheduled.solution
        if found.certificate.bound >= cutoff:
            found = dataclasses.replace(found, choices=None)
    warnings = (f"The search could not begin with `start`: {why_not_started}",) if why_not_started else ()
    certificate = found.certificate
    if scheduled is not None and scheduled.is_left:
        candidate = MeshCandidate(axes, certificate.objective, certificate.bound, LEFT, str(mesh))
        best = whole(formulation), found
        return Found(
            best, (candidate,), warnings, None, scheduled.weights, scheduled.prices, least_s=certificate.objective
        )
    if found.choices is None or before.fits and certificate.objective >= before.step_s:
        step_s = None if found.choices is None else certificate.objective
        verdict = _verdict(found, cutoff)
        candidate = MeshCandidate(axes, step_s, max(certificate.bound, 0.0), verdict, str(mesh))
        return Found(None, (candidate,), warnings)
    again = None
    if scheduled is not None:
        gap = AGAIN_MORE * max(options.relative_gap, min(certificate.gap, AGAIN_GAP))
        again_in = _Series(limits.part(AGAIN_SHARE), solve_one)
        again = functools.partial(_solved_again, before=scheduled, relative_gap=gap, series=again_in)
    found, fits, evaluation = with_gaps(formulation, found, options.relative_gap, again)
    evaluation = evaluation or evaluate(formulation, found.chosen)
    certificate = found.certificate
    step_s, verdict = scheduled_s(found, evaluation), _verdict(found, cutoff)
    candidate = MeshCandidate(axes, step_s, max(certificate.bound, 0.0), verdict, str(mesh))
    weights = formulation.overlap.weights if scheduled is None else scheduled.weights
    prices = {} if scheduled is None else scheduled.prices
    best = whole(formulation), found
    own = Found(best, (candidate,), warnings, evaluation, weights, prices, fits, certificate.objective)
    if scheduled is None or not own.waits_longer:
        return own
    aside = functools.partial(solve_one, tell=dataclasses.replace(tell, cutoff=math.inf))
    once_more = _Series(limits.part(AGAIN_SHARE), aside)
    most_s = most_cost_s(certificate.objective)
    others = scheduled.others(MOST_OTHERS, most_s, found.chosen, evaluation.reserved_bytes, once_more)
    return best_scheduled(own, others, options.relative_gap)


def ruled_out(question: Question, meshes: Sequence[LogicalMesh], stop: StopRequest) -> Found | None:
    """The outcome, if the first bound of every mesh shows that it cannot beat `question.to_beat_s`, whatever the
    memory; None if not."""
    free = dataclasses.replace(question, budget_bytes=math.inf)
    limits = SolverOptions(
        time_limit_s=LEAST_SHARE * question.mesh_limit_s(len(meshes)),
        relative_gap=_AT_ONCE_GAP,
        is_bound_enough=True,
        work_limit=question.options.work_limit,
    )
    candidates = []
    for mesh in meshes:
        bound_s = solve(free.formulation(mesh).problem, limits, stop=stop).certificate.bound
        if stop.requested or bound_s < question.to_beat_s:
            return None
        candidates.append(MeshCandidate(axes_of(mesh), None, bound_s, NOT_FASTER, str(mesh)))
    return Found(None, tuple(candidates), ())


def _at_instants(formulation: Formulation, other: Formulation, prices: Mapping[int, float]) -> dict[int, float]:
    """Prices of the instants of another problem of the same program, at the instants of this one."""
    at = np.searchsorted(formulation.instants, [other.instants[instant] for instant in prices])
    return dict(zip(np.minimum(at, len(formulation.instants) - 1).tolist(), prices.values(), strict=True))


def _limit_bytes(timed: Timed) -> float:
    """How much a plan like this one may have alive at once for its gaps to fit."""
    capacity = timed.formulation.problem.capacity
    assert capacity is not None
    return tighter_bytes(evaluate(timed.formulation, timed.choices), capacity, capacity)


def _is_too_small(problem: Problem, limits: SolverOptions, stop: StopRequest) -> bool:
    """Whether a search proves, in a small part of the limits, that no solution fits the capacity."""
    if problem.capacity is None:
        return False
    short = exceeds(problem, limits.part(LEAST_SHARE), stop)
    if short is not None:
        return short
    least = least_capacity(problem, limits.part(LEAST_SHARE), stop, problem.capacity)
    return least.bound > problem.capacity * (1 + CAPACITY_TOLERANCE)


def _solved(
    formulation: Formulation,
    limits: SolverOptions,
    cache: SolutionCache | None,
    tell: "_Teller",
    stop: StopRequest,
    hint: Sequence[int] | None = None,
    start: LiftedStart | None = None,
    to_beat_s: float = math.inf,
) -> Solution:
    """The solution of one problem; one without choices if it cannot win, or cannot beat `to_beat_s`."""
    tell = dataclasses.replace(tell, cutoff=min(tell.cutoff, to_beat_s))
    tell.question.effort.count(formulation.problem)
    try:
        return solve_cached(
            formulation.problem, limits, cache, lambda: labels_of(formulation), tell.progress, stop, hint, start
        )
    except _CannotWin as hopeless:
        p = hopeless.progress
        return Solution(None, Certificate(Status.UNKNOWN, math.inf, p.bound, math.inf, p.elapsed_s))


class _Series:
    """Solves problems that differ in their costs one after another, each from where the one before ended.

    All have one time limit together, or each the same limit of work. None has less time than it takes, as those before
    tell, while there is time left: a problem that is cut short tells nothing.
    """

    def __init__(
        self,
        limits: SolverOptions,
        solve_one: Callable[..., Solution],
        is_too_small: Callable[[Problem], bool] | None = None,
    ):
        """Starts the clock.

        Args:
          limits: Of all together. solve_one: As `_solved`, given its formulation, limits, hint and start.
          is_too_small: Whether the capacity is proven to be too small for any solution. Asked before the first search
            for one: many problems are settled by their bounds. None: something is known to fit.
        """
        self._limits, self._solve_one, self._is_too_small = limits, solve_one, is_too_small
        self._until = limits.deadline()
        self._start = LiftedStart()
        self._longest_s = 0.0  # that a problem took

    def solve(
        self,
        formulation: Formulation,
        *,
        hint: Sequence[int] | None,
        relative_gap: float,
        share: float,
        is_bound_enough: bool = False,
        to_beat_s: float = math.inf,
        useful_s: float = -math.inf,
    ) -> Solution:
        """See `plans/pricing.py`, `Series`."""
        if self._is_too_small is not None and not is_bound_enough:
            is_too_small, self._is_too_small = self._is_too_small(formulation.problem), None
            if is_too_small:
                return Solution(None, Certificate(Status.INFEASIBLE, math.inf, math.inf, math.inf, 0.0))
        limits = self._part(relative_gap, share)
        limits = dataclasses.replace(limits, is_bound_enough=is_bound_enough, useful_bound=useful_s)
        began = time.perf_counter()
        found = self._solve_one(formulation, limits, hint=hint, start=self._start, to_beat_s=to_beat_s)
        self._longest_s = max(self._longest_s, time.perf_counter() - began)
        return found

    def price(self, prices: Mapping[int, float]) -> None:
        """See `plans/pricing.py`, `Series`."""
        self._start.restart(prices)

    def _part(self, relative_gap: float, share: float) -> SolverOptions:
        limits = dataclasses.replace(self._limits, relative_gap=relative_gap)
        if limits.work_limit is not None:
            return limits
        left_s = max(self._until - time.perf_counter(), 0.0)
        return dataclasses.replace(limits, time_limit_s=min(max(share * left_s, _AS_LONG * self._longest_s), left_s))


def _solved_again(
    formulation: Formulation, hint: Sequence[int], before: Scheduled, relative_gap: float, series: _Series
) -> Solution:
    """The solution of a problem with a tighter limit than one that was solved `before`."""
    return solved_with_less(before, formulation, hint, relative_gap, series, AGAIN_ROUNDS).solution


@dataclasses.dataclass(frozen=True, slots=True)
class _Teller:
    """Passes the solver's progress on, and stops a solve that cannot win."""

    question: Question
    stage: str
    mesh: str
    cutoff: float

    def begin(self) -> None:
        report(self.question.options, self.question.started, self.stage, self.mesh)

    def progress(self, p: Progress) -> None:
        detail = f"{self.mesh}: {p.phase}"
        report(self.question.options, self.question.started, self.stage, detail, p.objective, p.bound)
        if p.bound >= self.cutoff < math.inf:
            raise _CannotWin(p)


class _CannotWin(Exception):
    """Stops a solve whose bound shows that its mesh cannot beat the best plan so far by more than the wanted gap."""

    def __init__(self, progress: Progress):
        super().__init__()
        self.progress = progress


def _verdict(solution: Solution, cutoff: float) -> str:
    if solution.choices is not None:
        return solution.certificate.status.value
    if solution.certificate.bound >= cutoff < math.inf:
        return NOT_FASTER
    return {Status.INFEASIBLE: NO_MEMORY}.get(solution.certificate.status, "nothing found in time")
