"""The search over logical meshes: one problem a mesh, solved in turn, each with the best plan so far to beat."""

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence

from jax.sharding import PartitionSpec

from autoshard.cluster import LogicalMesh, Slice
from autoshard.errors import MeshError
from autoshard.graph.graph import Graph
from autoshard.interrupts import StopRequest
from autoshard.placement.candidates import candidate_meshes
from autoshard.placement.place import listed_mesh
from autoshard.planner.build import Formulation, whole
from autoshard.planner.decode import Evaluation, evaluate
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
from autoshard.plans.gaps import with_gaps
from autoshard.plans.mesh_steps import MeshSteps
from autoshard.plans.options import PlanOptions
from autoshard.plans.pins import as_spec
from autoshard.plans.placing import MOST_ROUNDS, better_order
from autoshard.plans.pricing import Timed
from autoshard.plans.program_plan import MeshCandidate
from autoshard.plans.question import Question, axes_of, axes_text, report
from autoshard.plans.region_mesh import region_mesh
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
from autoshard.trace.annotations import fixed_of_spec

AGAIN_ROUNDS, AGAIN_SHARE, AGAIN_GAP, AGAIN_MORE = 3, 0.5, 0.05, 1.25
"""How many problems are solved at most, in which share of the time limit, and how exactly, whenever gaps do not fit: a
plan is good enough whose gap is so much larger than that of the plan before."""

LEAST_SHARE = 0.03
"""The share of the limits of a mesh in which it is asked first whether anything fits the memory."""

_AT_ONCE_GAP = 0.05
"""How exactly a bound is sought that is to tell no more than whether a mesh is out of the question."""

_LEAST_WALKED, _WORTH_A_WALK, _MOST_WALKED, _LONGEST_WALK = 16, 0.01, 12, 2.0
"""Meshes of more axes are walked over for at least so many devices (eight have one such mesh), and where a plan takes
more than this share beyond its kernels; how many at most, and in how many times the time that all before took: choices.
From data=128, tensor=8 of GPT-3 on 1,024 H100, ten are."""

MOST_AXES, _FEW_AXES = 3, 2
"""Of meshes that come into question, the most axes; and of those that are all searched, if nothing else is asked."""

_AS_LONG = 1.5
"""How much longer than the longest before a problem may take, whatever its share of the time left."""

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
      fits: Whether the best fits with the gaps between its buffers.
    """

    best: tuple[Formulation, Solution] | None
    candidates: tuple[MeshCandidate, ...]
    warnings: tuple[str, ...]
    evaluation: Evaluation | None = None
    weights: StretchWeights | None = None
    fits: bool = False

    @property
    def winner(self) -> tuple[Formulation, Solution]:
        """The problem of the best mesh, and its solution, of which there must be one."""
        assert self.best is not None, self.candidates
        return self.best

    @property
    def evaluated(self) -> Evaluation:
        """The best as the compiler has it."""
        formulation, chosen = self.winner
        return self.evaluation or evaluate(formulation, chosen.chosen)

    @property
    def cost_s(self) -> float:
        """Of the best plan, as the solver counts it."""
        return self.winner[1].certificate.objective

    def certificate(self, options: PlanOptions, elapsed_s: float) -> Certificate:
        """The certificate over all meshes: the bound is the least of any mesh that might still hold a better plan."""
        own = self.winner[1].certificate
        bound = min([own.objective, *open_bounds_s(self.candidates)])
        gap = (own.objective - bound) / own.objective if own.objective else 0.0
        status = Status.OPTIMAL if gap <= max(options.relative_gap, ROUNDING) else Status.FEASIBLE
        return dataclasses.replace(own, status=status, bound=bound, gap=gap, solve_s=elapsed_s)


def open_bounds_s(candidates: Sequence[MeshCandidate]) -> list[float]:
    """The bounds of meshes that might still hold a better plan, as far as a proof is about them."""
    return [c.bound_s for c in candidates if c.verdict not in (NO_MEMORY, PASSED_BY)]


def search(
    question: Question,
    meshes: Sequence[LogicalMesh],
    solution: str | os.PathLike[str] | None,
    stop: StopRequest,
    further: Sequence[LogicalMesh] = (),
) -> Found:
    """The outcome under the first schedule under which a plan fits the memory (`PlanOptions.schedule`).

    Nothing hides under a later schedule that does not under an earlier one: what cannot beat the best there is not
    tried again.

    Args:
      question, meshes: What is to be planned, and the meshes that are all searched.
      solution: A file that solves the problem of the only mesh; None to solve the problems here.
      stop: Asks to end.
      further: Meshes of which those are searched that a walk from the best mesh comes by (`_walked`).

    Raises:
      FileFormatError: If `solution` is none of the problem.
    """
    found = Found(None, (), ())
    for schedule in question.schedules(meshes[0].device_type):
        asked = dataclasses.replace(question, schedule=schedule)
        found = search_meshes(asked, meshes, solution, stop, leaves=len(meshes) == 1)
        if found.best is not None or solution is not None or stop.requested:
            return found if solution is not None else gone_on(asked, meshes, found, further, stop)
        if all(c.verdict == NOT_FASTER for c in found.candidates):
            return found
    return found


def gone_on(
    question: Question,
    meshes: Sequence[LogicalMesh],
    found: Found,
    further: Sequence[LogicalMesh],
    stop: StopRequest,
) -> Found:
    """The outcome after a search went on from `meshes` to `further` ones, and put the devices of the best in order."""
    return _placed(question, meshes, _walked(question, found, further, stop), stop)


def _walked(question: Question, found: Found, further: Sequence[LogicalMesh], stop: StopRequest) -> Found:
    """The outcome after a walk over `further` meshes from the best so far: each mesh a step from it is searched, and is
    the best from then on if it is faster by more than the wanted gap.

    It ends where no step gains, where kernels alone would take nearly as long on the mesh that it begins with, and
    after `_LONGEST_WALK` times as long as all that was before. A mesh that is neither faster nor out of the question by
    then is passed by: the proof is not about it. Nobody walks among few devices.
    """
    if found.best is None or not further or further[0].num_devices < _LEAST_WALKED:
        return found
    if _gain_s(found.winner[0], found.cost_s) < _WORTH_A_WALK * found.cost_s:
        return found
    best = _walk(question, found, further, stop)
    is_proven = best.winner[1].certificate.gap <= question.options.relative_gap
    return best if is_proven or best.winner[0].mesh is found.winner[0].mesh else _proven(question, best, stop)


def _proven(question: Question, found: Found, stop: StopRequest) -> Found:
    """The outcome after the mesh of the best was searched again, with as much time as is allowed."""
    mesh = found.winner[0].mesh
    again = search_meshes(question, [mesh], None, stop, after=found.best, weights=found.weights)
    if again.best is None or again.cost_s > found.cost_s or again.fits < found.fits:
        return found
    others = tuple(c for c in found.candidates if c.hardware != str(mesh))
    return dataclasses.replace(again, candidates=(*others, *again.candidates), warnings=found.warnings)


def _walk(question: Question, found: Found, further: Sequence[LogicalMesh], stop: StopRequest) -> Found:
    """`_walked`, once it is known that a walk is worth it, and as far as it is proven on the way."""
    options, now_s = question.options, time.perf_counter()
    until_s = math.inf if options.work_limit is not None else now_s + _LONGEST_WALK * (now_s - question.started)
    steps, last, tried = MeshSteps(further), None, {str(found.winner[0].mesh)}
    is_moving = True
    while is_moving:
        is_moving = False
        for step, mesh in steps.of(found.winner[0].mesh, last):
            left_s = until_s - time.perf_counter()
            if stop.requested or left_s <= 0 or len(tried) > _MOST_WALKED:
                return found
            if str(mesh) in tried:
                continue
            tried.add(str(mesh))
            to_beat_s = min(question.to_beat_s, found.cost_s * (1 - options.relative_gap))
            limited = dataclasses.replace(options, time_limit_s=min(options.time_limit_s, 0.5 * left_s))
            asked = dataclasses.replace(question, to_beat_s=to_beat_s, options=limited)
            again = search_meshes(asked, [mesh], None, stop, weights=found.weights)
            is_moving = again.best is not None and again.fits >= found.fits and again.cost_s < found.cost_s
            own = again.candidates if is_moving else tuple(_passed_by(c, to_beat_s) for c in again.candidates)
            candidates = (*found.candidates, *own)
            if is_moving:
                found, last = dataclasses.replace(again, candidates=candidates, warnings=found.warnings), step
                break
            found = dataclasses.replace(found, candidates=candidates)
    return found


def _passed_by(candidate: MeshCandidate, to_beat_s: float) -> MeshCandidate:
    """What became of a mesh that a walk does not go to."""
    if candidate.verdict == NO_MEMORY or candidate.bound_s >= to_beat_s:
        return candidate
    return dataclasses.replace(candidate, verdict=PASSED_BY)


def _gain_s(formulation: Formulation, cost_s: float) -> float:
    """What a plan takes beyond kernels that are each as fast as any choice on its mesh makes them."""
    groups = formulation.program.groups
    return cost_s - sum(g.trips * t.compute_s.min() for g, t in zip(groups, formulation.tables, strict=True))


def _placed(question: Question, meshes: Sequence[LogicalMesh], found: Found, stop: StopRequest) -> Found:
    """The outcome after the devices of the best plan were put in order, and it was made again, as often as that helps.

    Each mesh in a new order is one more candidate, and what was found for it takes the place of the best if it is
    faster.
    """
    for _ in range(MOST_ROUNDS):
        if question.hardware is None or found.best is None or stop.requested:
            break
        found = dataclasses.replace(found, evaluation=found.evaluated)
        mesh = better_order(question.hardware, found.evaluated, question.options.relative_gap)
        if mesh is None:
            break
        again = search_meshes(question, [mesh], None, stop, after=found.best)
        candidates = (*found.candidates, *again.candidates)
        if again.best is None or again.cost_s >= found.cost_s:
            found = dataclasses.replace(found, candidates=candidates)
            break
        found = dataclasses.replace(again, candidates=candidates, warnings=found.warnings)
    return _without_left(question, meshes, found, stop)


def _without_left(question: Question, meshes: Sequence[LogicalMesh], found: Found, stop: StopRequest) -> Found:
    """The outcome after meshes that were left are searched to the end, if they may still hold a better plan."""
    left = [c for c in found.candidates if c.verdict == LEFT]
    if not left or found.best is None or stop.requested:
        return found
    others = tuple(c for c in found.candidates if c.verdict != LEFT)
    is_best = found.cost_s < min((c.step_s for c in others if c.step_s is not None), default=math.inf)
    cutoff = found.cost_s * (1 - question.options.relative_gap)
    if not is_best and min(c.bound_s for c in left) >= cutoff:
        return found
    to_beat_s = question.to_beat_s if is_best else min(question.to_beat_s, cutoff)
    again = search_meshes(dataclasses.replace(question, to_beat_s=to_beat_s), meshes, None, stop)
    kept = again if is_best or again.best is not None else found
    return dataclasses.replace(kept, candidates=(*again.candidates, *others), warnings=found.warnings)


def _has_better_order(question: Question, timed: Timed) -> bool:
    """Whether a plan would be faster with the devices of its mesh in another order."""
    if question.hardware is None:
        return False
    evaluation = evaluate(timed.formulation, timed.choices)
    return better_order(question.hardware, evaluation, question.options.relative_gap) is not None


def search_meshes(
    question: Question,
    meshes: Sequence[LogicalMesh],
    solution: str | os.PathLike[str] | None,
    stop: StopRequest,
    after: tuple[Formulation, Solution] | None = None,
    leaves: bool = False,
    weights: StretchWeights | None = None,
) -> Found:
    """Solves the problem of each mesh, or reads its solution from a file.

    Args:
      question, meshes, solution, stop: As for `search`.
      after: A problem on a mesh with the same axes, and a solution of it to begin with; without one, each mesh begins
        where `plans/starts.py` says.
      leaves: Whether to leave a mesh as soon as its plans tell that they are faster with its devices in another order.
      weights: Of stretches, to begin with: those that bounded best elsewhere; None: those of `after`, or the first.

    Raises:
      FileFormatError: If `solution` is none of the problem.
    """
    options = question.options
    cache = default_cache() if options.cache else None
    best: tuple[Formulation, Solution] | None = None
    of_best: Evaluation | None = None
    # those of the best plan: what binds on one mesh mostly binds on another
    is_alone = len(meshes) == 1 and weights is None
    weights = after[0].overlap.weights if weights is None and after is not None else weights
    fits = False  # whether it does with its gaps
    candidates: list[MeshCandidate] = []
    started: list[str | None] = []
    for n, mesh in enumerate(meshes, 1):
        axes = axes_of(mesh)
        if stop.requested:
            candidates.append(MeshCandidate(axes, None, 0.0, NOT_TRIED, str(mesh)))
            continue
        # a mesh that could win by less than the wanted gap is not worth its time
        cutoff = question.to_beat_s
        if best is not None and fits:
            cutoff = min(cutoff, best[1].certificate.objective * (1 - options.relative_gap))
        tell = _Teller(question, f"solve {n}/{len(meshes)}", axes_text(axes), cutoff)
        tell.begin()
        formulation = question.formulation(mesh, weights=weights)
        limits = SolverOptions(
            time_limit_s=options.time_limit_s,
            relative_gap=options.relative_gap,
            seed=options.seed,
            work_limit=options.work_limit,
        )
        too_small: bool | None = False  # what was found on a mesh with the same axes fits on this one
        is_asked_first = best is None  # where there is a plan, the bounds of most meshes settle them
        if solution is None and after is None and formulation.problem.capacity is not None:
            too_small = exceeds(formulation.problem, limits.part(LEAST_SHARE), stop) if is_asked_first else None
        if too_small:
            candidates.append(MeshCandidate(axes, None, math.inf, NO_MEMORY, str(mesh)))
            continue
        solve_one = functools.partial(_solved, cache=cache, tell=tell, stop=stop)
        scheduled = None
        if solution is not None:
            found = with_ties_settled(formulation, read_solution(solution, formulation.problem))
            if formulation.overlap.weights is not None:
                step_s = asked_for(formulation, found.chosen).step_s
                certificate = as_scheduled(found.certificate, step_s, options.relative_gap)
                found = dataclasses.replace(found, certificate=certificate)
        else:
            first = None
            if after is not None:
                first = same_choices(formulation, after[0], after[1].chosen)
            elif question.start is not None:
                first, why_not = starting_choices(question, formulation, limits, stop)
                started.append(why_not)
            elif question.restrict is None and is_alone:  # else simpler meshes are searched themselves
                any_cost = dataclasses.replace(tell, cutoff=math.inf)
                aside = functools.partial(solve_one, tell=any_cost)
                first = choices_of_joined_axes(question, formulation, limits, aside)
            question_left = functools.partial(_is_too_small, limits=limits, stop=stop, is_asked=is_asked_first)
            series = _Series(limits, solve_one, question_left if too_small is None else None)
            elsewhere_s = cutoff / max(1 - options.relative_gap, ROUNDING)
            is_left = functools.partial(_has_better_order, question) if leaves else lambda _: False
            scheduled = solved_as_scheduled(
                formulation, first, options.relative_gap, series, to_beat_s=elsewhere_s, is_left=is_left
            )
            formulation, found = scheduled.formulation, scheduled.solution
            if found.certificate.bound >= cutoff:
                found = dataclasses.replace(found, choices=None)
        own_fits = False
        if scheduled is not None and scheduled.is_left:
            bound_s, step_s = found.certificate.bound, found.certificate.objective
            candidates.append(MeshCandidate(axes, step_s, bound_s, LEFT, str(mesh)))
            best, of_best, weights = (whole(formulation), found), None, scheduled.weights
            continue
        evaluation = None
        if found.choices is not None and _is_better(found, own_fits=True, best=best, fits=fits):
            again = None
            if scheduled is not None:
                gap = AGAIN_MORE * max(options.relative_gap, min(found.certificate.gap, AGAIN_GAP))
                again_in = _Series(limits.part(AGAIN_SHARE), solve_one)
                again = functools.partial(_solved_again, before=scheduled, relative_gap=gap, series=again_in)
            found, own_fits, evaluation = with_gaps(formulation, found, options.relative_gap, again)
        certificate = found.certificate
        step_s = certificate.objective if found.choices is not None else None
        bound_s, verdict = max(certificate.bound, 0.0), _verdict(found, cutoff)
        candidates.append(MeshCandidate(axes, step_s, bound_s, verdict, str(mesh)))
        if found.choices is not None and _is_better(found, own_fits, best, fits):
            best, of_best = (whole(formulation), found), evaluation
            fits = own_fits
            weights = formulation.overlap.weights if scheduled is None else scheduled.weights
    warnings = (f"The search could not begin with `start`: {started[-1]}",) if started and all(started) else ()
    return Found(best, tuple(candidates), warnings, of_best, weights, fits)


def ruled_out(question: Question, meshes: Sequence[LogicalMesh], stop: StopRequest) -> Found | None:
    """The outcome, if the first bound of every mesh shows that it cannot beat `question.to_beat_s`, whatever the
    memory; None if not."""
    free = dataclasses.replace(question, budget_bytes=math.inf)
    limits = SolverOptions(
        time_limit_s=LEAST_SHARE * question.options.time_limit_s,
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


def _is_too_small(problem: Problem, limits: SolverOptions, stop: StopRequest, is_asked: bool) -> bool:
    """Whether a search proves, in a small part of the limits, that no solution fits the capacity.

    Args:
      is_asked: Whether it was asked in short (`exceeds`) before, in vain.
    """
    if problem.capacity is None:
        return False
    short = None if is_asked else exceeds(problem, limits.part(LEAST_SHARE), stop)
    if short is not None:
        return short
    least = least_capacity(problem, limits.part(LEAST_SHARE), stop, problem.capacity)
    return least.bound > problem.capacity * (1 + CAPACITY_TOLERANCE)


def _is_better(found: Solution, own_fits: bool, best: tuple[Formulation, Solution] | None, fits: bool) -> bool:
    """Whether a solution takes the place of the best one: one that fits with its gaps before one that does not."""
    if best is None or own_fits != fits:
        return best is None or own_fits
    return found.certificate.objective < best[1].certificate.objective


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
    ) -> Solution:
        """See `plans/pricing.py`, `Series`."""
        if self._is_too_small is not None and not is_bound_enough:
            is_too_small, self._is_too_small = self._is_too_small(formulation.problem), None
            if is_too_small:
                return Solution(None, Certificate(Status.INFEASIBLE, math.inf, math.inf, math.inf, 0.0))
        limits = dataclasses.replace(self._part(relative_gap, share), is_bound_enough=is_bound_enough)
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


def logical_meshes(
    graph: Graph,
    hardware: Slice,
    mesh: Mapping[str, int] | None,
    pins: Mapping[str, PartitionSpec] | None,
    options: PlanOptions,
) -> list[LogicalMesh]:
    """The given mesh, that of the program's own regions, or all of up to as many axes as are wanted (three, unless
    `PlanOptions.max_mesh_axes` says less): those that have the axes that pins and annotations name.

    Raises:
      MeshError: If the mesh does not fit the devices or the regions, or none has the named axes.
    """
    mesh = region_mesh(graph, mesh, hardware.num_devices)
    in_turn = options.device_order == "listed"
    if mesh is not None:
        return [_as_listed(hardware, hardware.logical_mesh(mesh)) if in_turn else hardware.logical_mesh(mesh)]
    most_axes = MOST_AXES if options.max_mesh_axes is None else options.max_mesh_axes
    if in_turn:
        every = [_as_listed(hardware, m) for m in hardware.logical_meshes(most_axes)]
    else:
        every = list(candidate_meshes(hardware, most_axes))
    meshes = sorted(every, key=lambda m: _unlikeliness(m, hardware))
    fixed = [a.fixed for a in graph.arguments]
    fixed += [l for o in graph.operations for l in (*(o.fixed_operands or ()), *(o.fixed_results or ()))]
    fixed += [fixed_of_spec(as_spec(pattern, spec), len(spec)) for pattern, spec in (pins or {}).items()]
    named = {axis for layout in fixed for entry in layout or () for axis in entry or ()}
    fitting = [m for m in meshes if named <= set(m.axis_names)]
    if not fitting:
        raise MeshError(
            f"Pins or annotations name the mesh axes {sorted(named)}, which no searched mesh of "
            f"{hardware.num_devices} devices has "
            f"(they use {sorted({axis.name for m in meshes for axis in m.axes})}). Pass mesh= with the axes that "
            "they mean."
        )
    return fitting


def searched_and_further(
    meshes: Sequence[LogicalMesh], options: PlanOptions
) -> tuple[Sequence[LogicalMesh], Sequence[LogicalMesh]]:
    """Of the meshes that may be taken, those that are all searched, and those that a walk may come by: where
    `PlanOptions.max_mesh_axes` leaves it open, those of few axes, and the others.
    """
    few = [m for m in meshes if len(m.axes) <= _FEW_AXES]
    if options.max_mesh_axes is not None or not few:
        return meshes, ()
    return few, [m for m in meshes if len(m.axes) > _FEW_AXES]


def _as_listed(hardware: Slice, mesh: LogicalMesh) -> LogicalMesh:
    """A mesh with its devices in the order in which the cluster lists them."""
    return listed_mesh(hardware, mesh.axis_names, mesh.shape) or mesh


def _unlikeliness(mesh: LogicalMesh, hardware: Slice) -> float:
    """How far the innermost axis is from what the fastest links join: the first plans found should be hard to beat,
    so that most meshes need no more than a bound.
    """
    inner = hardware.levels[0].size if hardware.levels else 1
    return abs(math.log2(mesh.shape[-1] / inner))


def several_meshes(what: str, meshes: Sequence[LogicalMesh]) -> str:
    """The message that one problem needs one mesh."""
    shown = "; ".join(",".join(f"{axis.name}={axis.size}" for axis in mesh.axes) for mesh in meshes)
    return (
        f"{what} belongs to the problem of one mesh, but none is given, and there are several: {shown}. "
        "Choose one of them: --mesh, or mesh= in code."
    )


def _verdict(solution: Solution, cutoff: float) -> str:
    if solution.choices is not None:
        return solution.certificate.status.value
    if solution.certificate.bound >= cutoff < math.inf:
        return NOT_FASTER
    return {Status.INFEASIBLE: NO_MEMORY}.get(solution.certificate.status, "nothing found in time")
