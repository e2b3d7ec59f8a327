"""The least capacity under which any solution exists: what a message about a budget that cannot be met should tell.

Minimising the peak is itself a problem of this room. A node `peak` is added whose choices are levels z between a lower
and an upper bound of the answer; level z costs z and takes (top - z) of a capacity `top` at every instant, so that the
rest fits exactly if its usage is at most z everywhere. All other costs become 0; forbidden entries stay. The levels are
then spread anew over what is left between bound and solution. Presolve removes nearly everything, since without costs a
choice that takes less dominates.
"""

import dataclasses

import numpy as np

from autoshard.solver.driver import solve
from autoshard.solver.evaluate import evaluate
from autoshard.solver.options import SolverOptions
from autoshard.solver.problem import Edge, Node, Problem, Solution, Usage

LEVELS = 65
"""Levels of the peak per round."""
ROUNDS = 4


def least_capacity(problem: Problem, options: SolverOptions | None = None) -> tuple[float, float, Solution]:
    """Minimises the peak usage of `problem`, whatever the cost; the problem's own capacity is ignored.

    Returns:
      (a proven lower bound on the peak of every solution, the peak of the solution found, that solution). The
      certificate's objective and bound are those of the peak. Without a solution the peak is +inf.
    """
    options = options or SolverOptions()
    low, high = _interval_bound(problem), _largest(problem)
    best: Solution | None = None
    for turn in range(ROUNDS):
        # A peak p has a level less than one step above it, hence the step taken off the bound below.
        levels = np.linspace(low, high, LEVELS)
        share = dataclasses.replace(options, time_limit_s=options.time_limit_s / ROUNDS)
        hint = None if best is None else (*best.choices, LEVELS - 1)
        found = solve(_peak_problem(problem, levels), share, hint)
        if found.choices is None:
            if best is None:
                return low, np.inf, found
            break
        peak = evaluate(problem, found.choices[:-1]).peak_usage
        if best is None or peak < high:
            best = Solution(found.choices[:-1], found.certificate)
            high = min(high, peak) if turn else peak
        low = min(max(low, found.certificate.bound - (levels[1] - levels[0])), high)
        if high - low <= max(options.relative_gap, 1e-9) * high:
            break
    gap = (high - low) / high if high else 0.0
    certificate = dataclasses.replace(best.certificate, objective=high, bound=low, gap=gap)
    return low, high, Solution(best.choices, certificate)


def _interval_bound(problem: Problem) -> float:
    """The peak if every usage were as small as it can be."""
    return _peak_of(problem, lambda amounts: float(amounts.min()))


def _largest(problem: Problem) -> float:
    return _peak_of(problem, lambda amounts: float(amounts.max()))


def _peak_of(problem: Problem, amount) -> float:
    usages = [usage for usage in (*problem.usages, *problem.edge_usages) if usage.start < usage.stop]
    if not usages:
        return 0.0
    start = np.array([usage.start for usage in usages])
    stop = np.array([usage.stop for usage in usages])
    instants, position = np.unique(np.concatenate([start, stop]), return_inverse=True)
    amounts = np.array([amount(usage.amounts) for usage in usages])
    steps = np.zeros(len(instants))
    np.add.at(steps, position[: len(start)], amounts)
    np.subtract.at(steps, position[len(start) :], amounts)
    return float(np.cumsum(steps).max())


def _peak_problem(problem: Problem, levels: np.ndarray) -> Problem:
    free = {}

    def zeroed(costs: np.ndarray) -> np.ndarray:
        if id(costs) not in free:
            free[id(costs)] = np.where(np.isinf(costs), np.inf, 0.0)
        return free[id(costs)]

    nodes = [Node(node.name, zeroed(node.costs)) for node in problem.nodes]
    edges = [Edge(e.source, e.target, e.source_class, e.target_class, zeroed(e.costs)) for e in problem.edges]
    ends = [(usage.start, usage.stop) for usage in (*problem.usages, *problem.edge_usages)]
    first, last = min((start for start, _ in ends), default=0), max((stop for _, stop in ends), default=1)
    peak = Usage(len(nodes), first, last, levels[-1] - levels)
    nodes.append(Node("peak", levels.astype(np.float64)))
    return Problem(tuple(nodes), tuple(edges), (*problem.usages, peak), problem.edge_usages, float(levels[-1]))
