"""`solve` that keeps what it finds: an unchanged problem is answered at once, a changed one starts from the nearest."""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence

from autoshard.interrupts import StopRequest, stop_on_signals
from autoshard.solver.driver import solve
from autoshard.solver.evaluate import evaluate
from autoshard.solver.io.packed import problem_digest
from autoshard.solver.io.problem_keys import ProblemKeys, plain_keys
from autoshard.solver.io.solution_cache import Entry, SolutionCache
from autoshard.solver.lifted_start import LiftedStart
from autoshard.solver.options import Progress, SolverOptions
from autoshard.solver.problem import Problem, Solution, Status, relative_gap

ABOUT_AS_LONG = 0.9
"""A search that had this share of the time that is allowed now need not be repeated."""


def solve_cached(
    problem: Problem,
    options: SolverOptions,
    cache: SolutionCache | None,
    keys: Callable[[], ProblemKeys] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    stop: StopRequest | None = None,
    hint: Sequence[int] | None = None,
    start: LiftedStart | None = None,
) -> Solution:
    """`solve` that asks `cache` first, and stores what it finds.

    A stored solution is the answer if its proven gap is at most the wanted one, or if it was sought for as long as
    `options` allow. Otherwise the search starts from it, or from the nearest one, and keeps its bound. With a work
    limit the cache is not used: what others solved before must not change the answer. What came with a bound that is of
    no use is not stored, as a search that could use it would find a higher one.

    Args:
      problem, options, on_progress, stop, hint, start: As for `solve`. A stored solution that is better than the hint
        takes its place.
      cache: None for none.
      keys: Makes the keys of nodes and choices; by default they go by names and numbers.
    """
    if cache is None or options.work_limit is not None:
        return solve(problem, options, hint, on_progress, stop, start)
    digest = problem_digest(problem)
    stored = _trusted(cache.find(digest), problem)
    if stored is not None:
        wanted = options.wanted_gap
        certificate = stored.solution.certificate
        is_whole = stored.solution.relaxed is None or options.is_bound_enough
        is_exact = certificate.gap <= wanted or stored.limit_s >= ABOUT_AS_LONG * options.time_limit_s
        if is_whole and is_exact:
            if on_progress is not None:
                on_progress(Progress(0.0, certificate.objective, certificate.bound, "from the cache"))
            if certificate.status is not Status.UNKNOWN:
                status = Status.OPTIMAL if certificate.gap <= wanted else Status.FEASIBLE
                certificate = dataclasses.replace(certificate, status=status)
            return dataclasses.replace(stored.solution, certificate=certificate)
        if stored.solution.choices is not None:
            hint = _better(problem, hint, stored.solution)
    own = plain_keys(problem) if keys is None else keys()
    if hint is None:
        hint = cache.nearest(problem, own)
    with contextlib.nullcontext(stop) if stop is not None else stop_on_signals() as stop:
        found = solve(problem, options, hint, on_progress, stop, start)
    if stored is not None:
        found = _with_bound(found, stored.solution.certificate.bound, options.wanted_gap)
    is_cut_off = found.relaxed is not None and found.certificate.bound < options.useful_bound
    if (found.choices is not None or found.relaxed is not None) and not is_cut_off:
        took_s = found.certificate.solve_s
        ended_early = stop.requested or found.certificate.status is Status.OPTIMAL
        limit_s = took_s if ended_early else options.time_limit_s
        if found.relaxed is not None and not stop.requested and took_s < ABOUT_AS_LONG * options.time_limit_s:
            limit_s = math.inf  # more time would have changed nothing
        cache.store(digest, own, found, limit_s)
    return found


def _better(problem: Problem, hint: Sequence[int] | None, stored: Solution) -> Sequence[int]:
    """The better of a hint and a stored solution."""
    if hint is None:
        return stored.chosen
    given = evaluate(problem, hint)
    return hint if given.feasible and given.objective < stored.certificate.objective else stored.chosen


def _trusted(entry: Entry | None, problem: Problem) -> Entry | None:
    """The entry if its choices are what it says; its problem may have been written by anyone."""
    if entry is None:
        return None
    certificate, choices = entry.solution.certificate, entry.solution.choices
    relaxed = entry.solution.relaxed
    every = [*([] if relaxed is None else relaxed.choices), *([] if choices is None else [choices])]
    if all(_has_choices(problem, own) for own in every):
        if choices is None:
            return entry
        result = evaluate(problem, choices)
        if result.feasible and math.isclose(result.objective, certificate.objective, rel_tol=1e-9, abs_tol=1e-300):
            return entry
    warnings.warn("A cached solution does not solve its problem and is ignored.", stacklevel=3)
    return None


def _has_choices(problem: Problem, choices: Sequence[int]) -> bool:
    """Whether there is one choice for each node, and the node has it."""
    nodes = problem.nodes
    return len(choices) == len(nodes) and all(0 <= k < len(n.costs) for k, n in zip(choices, nodes, strict=True))


def _with_bound(solution: Solution, bound: float, wanted_gap: float) -> Solution:
    """The solution with a bound that was proven before, if that is the better one."""
    certificate = solution.certificate
    if bound <= certificate.bound:
        return solution
    if solution.choices is None:
        return dataclasses.replace(solution, certificate=dataclasses.replace(certificate, bound=bound))
    bound = min(bound, certificate.objective)
    gap = relative_gap(certificate.objective, bound)
    status = Status.OPTIMAL if gap <= wanted_gap else Status.FEASIBLE
    return Solution(solution.choices, dataclasses.replace(certificate, status=status, bound=bound, gap=gap))
