"""What `autoshard solve` does: read a problem from a file, solve it within a limit, tell how it goes, give the answer.

Nothing here or below needs JAX.
"""

import dataclasses
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable

import rich.console
import rich.markup

from autoshard.errors import AutoshardError, MemoryBudgetError, SolverError
from autoshard.interrupts import StopRequest, stop_on_signals
from autoshard.solver.cached import solve_cached
from autoshard.solver.evaluate import evaluate
from autoshard.solver.io.problem_file import ProblemFile, read_problem_file
from autoshard.solver.io.solution_cache import SolutionCache
from autoshard.solver.io.solution_file import solution_document, write_solution
from autoshard.solver.least_capacity import LeastCapacity, least_capacity
from autoshard.solver.options import Progress, SolverOptions
from autoshard.solver.problem import Certificate, Problem, Solution, Status, relative_gap
from autoshard.solver.warm_up import ALWAYS, SELDOM, WITHIN_CAPACITY, load_kernels, start_compilation
from autoshard.watchdog import watchdog

WRITING_S = 0.6
"""Kept for what comes after the search (at most a tenth of the limit), and"""
WRITING_S_PER_NODE = 2e-6
"""the same for each node: checking and printing the solution."""
CUT_OFF_S = 0.4
"""How long before the limit a search is cut off that has not ended by itself (at most a twentieth of the limit)."""
LINE_EVERY_S = 1.0
"""Least time between two lines of progress where they cannot be written over one another."""


@dataclasses.dataclass(frozen=True, slots=True)
class SolveRequest:
    """What is asked of `solve_file`.

    Attributes:
      path: The problem's file. out: Where the solution goes; None to print it only.
      limit_s: Wall-clock limit, counted from `started`.
      work_limit: Limit in units of work instead; see `SolverOptions`.
      gap, seed: See `SolverOptions`.
      cache: Where solutions are kept; None for nowhere.
      started: Value of `time.perf_counter` when the process began.
      may_exit: Whether the process has no other task, and may be ended at the limit.
    """

    path: str | os.PathLike[str]
    out: str | os.PathLike[str] | None
    limit_s: float
    work_limit: float | None
    gap: float
    seed: int
    cache: SolutionCache | None
    started: float
    may_exit: bool = False

    def left_s(self) -> float:
        """Seconds until the limit."""
        return self.limit_s - (time.perf_counter() - self.started)


@dataclasses.dataclass(frozen=True, slots=True)
class SolveAnswer:
    """A checked solution of a problem read from a file."""

    file: ProblemFile
    solution: Solution

    def lines(self) -> str:
        """Two lines: cost and lower bound; the chosen strategies, one per node."""
        certificate = self.solution.certificate
        figures = f"cost {plain(certificate.objective)}, lower bound {plain(certificate.bound)}"
        return f"{figures}\n{list(self.solution.chosen)}"

    def json(self) -> str:
        """The content of the solution file, in one line."""
        return json.dumps(solution_document(self.solution, self.file.problem, self.file.title))


def solve_file(request: SolveRequest, console: rich.console.Console, show: Callable[[SolveAnswer], None]) -> None:
    """Solves the problem in a file; progress goes to `console`, the answer to `show`.

    The first Ctrl-C (or SIGTERM) ends the search with the best solution so far. Where the process may be ended and the
    search does not end in time, the best solution so far is shown and the process ended.

    Raises:
      FileFormatError: the file cannot be read or the solution not be written.
      MemoryBudgetError: proven: no solution is within the capacity.
      SolverError: no solution was found within the limit.
    """
    story = _Story(console, request.started)
    if not request.may_exit:
        show(_solve(request, story))
        return
    limit_s = request.limit_s - min(CUT_OFF_S, 0.05 * request.limit_s) if request.work_limit is None else math.inf
    with watchdog(request.started + limit_s, lambda: _give_up(request, story, show)):
        show(_solve(request, story))


def _solve(request: SolveRequest, story: "_Story") -> SolveAnswer:
    start_compilation()
    story.tell(f"reading {os.path.basename(request.path)}")
    file = story.file = read_problem_file(request.path)
    problem = file.problem
    usages = len(problem.usages) + len(problem.edge_usages)
    story.tell(f"{len(problem.nodes)} nodes, {len(problem.edges)} edges, {usages} usages")
    story.tell("loading the solver's kernels (compiled once a machine)")
    load_kernels(ALWAYS + WITHIN_CAPACITY + SELDOM)
    story.are_kernels_loaded = True
    writing_s = min(WRITING_S, 0.1 * request.limit_s) + WRITING_S_PER_NODE * len(problem.nodes)
    limit_s = max(request.left_s() - writing_s, 0.1)
    options = SolverOptions(
        time_limit_s=limit_s, relative_gap=request.gap, seed=request.seed, work_limit=request.work_limit
    )
    with stop_on_signals((signal.SIGINT, signal.SIGTERM)) as stop, story:
        solution = solve_cached(problem, options, request.cache, on_progress=story.progress, stop=stop)
        if solution.choices is None:
            raise _without_solution(file, solution, request, stop)
        story.end(solution)
    return _answer(file, solution, request)


def _give_up(request: SolveRequest, story: "_Story", show: Callable[[SolveAnswer], None]) -> int:
    """Shows the best solution so far, from another thread; returns the exit status."""
    last = story.last
    try:
        if last is None or last.choices is None or story.file is None:
            found = f"No solution was found within {request.limit_s:g} s"
            if not story.are_kernels_loaded:
                found += ", as the solver's kernels were still being compiled; what is compiled is kept on this machine"
            raise SolverError(f"{found}. Raise --time-limit.")
        gap = relative_gap(last.objective, last.bound)
        certificate = Certificate(Status.FEASIBLE, last.objective, last.bound, gap, last.elapsed_s)
        answer = _answer(story.file, Solution(last.choices, certificate), request)
        story.tell("stopped in the midst of a step")
        show(answer)
    except AutoshardError as error:
        story.tell(f"error: {error}")
        return 2
    sys.stdout.flush()
    return 0


def _answer(file: ProblemFile, solution: Solution, request: SolveRequest) -> SolveAnswer:
    _check(file.problem, solution)
    if request.out is not None:
        write_solution(solution, file.problem, file.title, request.out)
    return SolveAnswer(file, solution)


def plain(value: float) -> str:
    """A number in full: without exponent or fraction where it is whole and exact."""
    return f"{value:.0f}" if math.isfinite(value) and value == round(value) and abs(value) < 2**53 else repr(value)


def _check(problem: Problem, solution: Solution) -> None:
    """Prices the solution once more, straight from the definition."""
    result = evaluate(problem, solution.chosen)
    if not result.feasible or not math.isclose(result.objective, solution.certificate.objective, rel_tol=1e-9):
        raise SolverError(
            f"The solver's answer does not hold: it states a cost of {solution.certificate.objective}, but evaluation "
            f"gives {result.objective} and a peak of {result.peak_usage} under a capacity of {problem.capacity}. "
            "This is a fault of autoshard; report it with the problem file."
        )


def _without_solution(file: ProblemFile, solution: Solution, request: SolveRequest, stop: StopRequest) -> SolverError:
    """The error for a search that ended without a solution, with the least capacity where it can be told in time."""
    problem, certificate = file.problem, solution.certificate
    proven = certificate.status is Status.INFEASIBLE
    if stop.requested and not proven:
        return SolverError("Stopped before a solution was found.")
    if problem.capacity is None:
        cause = "Proven: there is no solution" if proven else f"No solution was found within {request.limit_s:g} s"
        return SolverError(f"{cause}. Forbidden choices and pairs of choices stand against it; allow more of them.")
    least = least_capacity(problem, SolverOptions(time_limit_s=request.left_s(), relative_gap=1e-3, seed=request.seed))
    if proven and math.isinf(least.bound):
        return SolverError(
            "Proven: there is no solution, whatever the capacity. Forbidden choices and pairs of choices stand against "
            "it; allow more of them."
        )
    kind = MemoryBudgetError if proven else SolverError
    what = "Proven: there is no solution" if proven else f"No solution was found within {request.limit_s:g} s"
    return kind(f"{what} under the capacity of {plain(problem.capacity)}. {_least_text(least, file)}")


def _least_text(least: LeastCapacity, file: ProblemFile, most: int = 6) -> str:
    """What would do, and what is alive at the peak."""
    text = f"Every solution takes at least {plain(least.bound)}"
    if least.choices is None:
        text += ", and no capacity is known to do"
    else:
        text += f"; a capacity of {plain(math.ceil(least.peak))} would do"
    if least.instant is not None:
        line = f", {file.instants[least.instant]}" if least.instant < len(file.instants) else ""
        alive = ", ".join(f"{name} ({plain(amount)})" for name, amount in least.alive[:most])
        more = f" and {len(least.alive) - most} more" if len(least.alive) > most else ""
        text += f". The peak is at instant {least.instant}{line}, where these take most: {alive}{more}"
    return f"{text}. Raise the capacity, or --time-limit."


class _Story:
    """Tells how the search goes: one changing line on a terminal, lines now and then elsewhere."""

    def __init__(self, console: rich.console.Console, started: float) -> None:
        self.console, self.started = console, started
        self.status = console.status("", spinner="dots") if console.is_terminal else None
        self.told, self.objective = -math.inf, math.inf
        self.file: ProblemFile | None = None
        self.are_kernels_loaded = False
        self.last: Progress | None = None

    def __enter__(self) -> "_Story":
        if self.status is not None:
            self.status.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.status is not None:
            self.status.stop()

    def tell(self, text: str) -> None:
        elapsed_s = time.perf_counter() - self.started
        self.console.print(f"{elapsed_s:8.1f} s  {text}", markup=False, highlight=False, soft_wrap=True)

    def progress(self, p: Progress) -> None:
        elapsed_s = time.perf_counter() - self.started
        if p.choices is not None or self.last is None:
            self.last = p
        text = _figures(p.objective, p.bound, p.phase)
        if self.status is not None:
            self.status.update(rich.markup.escape(f"{elapsed_s:8.1f} s  {text}"))
            return
        is_first = math.isinf(self.objective) and math.isfinite(p.objective)
        if is_first or elapsed_s - self.told >= LINE_EVERY_S:
            self.tell(text)
            self.told, self.objective = elapsed_s, p.objective

    def end(self, solution: Solution) -> None:
        certificate = solution.certificate
        self.tell(_figures(certificate.objective, certificate.bound, certificate.status.value))
        price = certificate.capacity_price
        if self.file is not None and self.file.problem.capacity is not None and price is not None:
            gain = f"about {price.per_unit:.3g} to first order" if price.per_unit else "nothing to first order"
            most = max(certificate.objective - price.bound_with(1.0), 0.0)
            self.tell(f"one more unit of capacity would gain {gain}, at most {most:.3g}")


def _figures(objective: float, bound: float, what: str) -> str:
    gap = (objective - bound) / abs(objective) if objective and math.isfinite(objective - bound) else math.inf
    shown = "0" if objective == bound else f"{gap:.3%}" if math.isfinite(gap) else "-"
    short = lambda value: f"{value:.8g}" if math.isfinite(value) else "-"
    return f"cost {short(objective)}  bound {short(bound)}  gap {shown}  {what}"
