"""The solver's course, from a problem to a solution with a certificate.

1. where nodes are copies of one another, the quotient with one node a class (`lifted_search.py`), which often settles
   everything;
2. presolve (`presolve.py`);
3. rounds of dual ascent, primal heuristics and reduced-cost fixing, and integer programs at their end
   (`primal_dual.py`).
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence

from autoshard.interrupts import StopRequest, stop_on_signals
from autoshard.solver.budget import CompileTime, compile_time
from autoshard.solver.exact.mathopt_runner import MathOptRunner
from autoshard.solver.lifted_search import relax_lifted, search_lifted
from autoshard.solver.lifted_start import LiftedStart
from autoshard.solver.options import Progress, SolverOptions
from autoshard.solver.primal_dual import PrimalDualSearch
from autoshard.solver.problem import Problem, Solution
from autoshard.solver.reduce.network import Network
from autoshard.solver.reduce.presolve import presolve
from autoshard.solver.search import Search
from autoshard.solver.validate import check_problem
from autoshard.solver.warm_up import is_warm, load_kernels_of

COPIES_SHARE, ENOUGH_SHARE = 0.3, 0.9
"""Share of the time limit that folding copies may take; and where a bound by it is enough."""


def solve(
    problem: Problem,
    options: SolverOptions | None = None,
    hint: Sequence[int] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    stop: StopRequest | None = None,
    start: LiftedStart | None = None,
) -> Solution:
    """Minimises the cost of `problem` within its capacity.

    Args:
      problem: See `problem.py`.
      options: Limits and accuracy; defaults of `SolverOptions` if None.
      hint: A vector of choices known beforehand, feasible or not: it is repaired and improved first. The result is
        never worse than a feasible hint.
      on_progress: Called with every better solution or bound.
      stop: Asks to end with the best solution so far. If None, the first Ctrl-C does, and a second one raises
        KeyboardInterrupt.
      start: What solving problems of the same nodes, edges and usages left; takes what this one leaves.

    Returns:
      The best solution found and what is proven about it; never raises for lack of a solution.

    Raises:
      SolverError: if the problem or the hint is malformed.
    """
    check_problem(problem, are_costs_enough=start is not None and start.is_like(problem))
    options = options or SolverOptions()
    with contextlib.nullcontext(stop) if stop is not None else stop_on_signals() as request:
        if not is_warm() and on_progress is not None:
            on_progress(Progress(0.0, math.inf, -math.inf, "compiling the solver, once a machine"))
        load_kernels_of(problem)
        with compile_time() as compiling, MathOptRunner(request, options.deadline(), compiling) as runner:
            return _solve(problem, options, hint, on_progress, runner, start, compiling)


def _solve(
    problem: Problem,
    options: SolverOptions,
    hint: Sequence[int] | None,
    on_progress: Callable[[Progress], None] | None,
    runner: MathOptRunner,
    start: LiftedStart | None,
    compiling: CompileTime,
) -> Solution:
    """`solve` of a checked problem, with the clock running."""
    search = Search(problem, options, on_progress, runner, compiling)
    if options.is_bound_enough:
        with search.budget.at_most(ENOUGH_SHARE):
            relaxed = relax_lifted(search, start)
        if relaxed is not None:
            return dataclasses.replace(search.solution(), relaxed=relaxed)
    with search.budget.at_most(COPIES_SHARE):
        search_lifted(search, start)
    if hint is not None:  # not before: as good as asked for, it would keep folding from finding a better one
        search.offer(hint, "hint")
    if search.done():
        return search.solution()
    network = Network(problem)
    presolve(network, lambda: search.budget.remaining() <= 0)
    search.tell("presolve")
    PrimalDualSearch(search, network, hint).run()
    return search.solution()
