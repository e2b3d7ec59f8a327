"""The least capacity under which any solution exists, and what is alive at its peak: why nothing fits.

Minimising the peak is itself a problem of this room. A node `peak` is added whose choices are levels z between a lower
and an upper bound of the answer; level z costs z and takes (top - z) of a capacity `top` at every instant, so that the
rest fits exactly if its usage is at most z everywhere. All other costs become 0; forbidden entries stay. The levels are
then spread anew over what is left between bound and solution. Presolve removes nearly everything, since without costs a
choice that takes less dominates.
"""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from autoshard.garbage import collection_paused
from autoshard.interrupts import StopRequest, stop_on_signals
from autoshard.solver.driver import solve
from autoshard.solver.evaluate import CAPACITY_TOLERANCE, evaluate, peak_if
from autoshard.solver.lifted_start import LiftedStart
from autoshard.solver.options import ROUNDING, SolverOptions
from autoshard.solver.problem import Edge, EdgeUsage, Node, Problem, Status, Usage

LEVELS = 65
"""Levels of the peak per round."""
ROUNDS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class LeastCapacity:
    """How little capacity would do.

    Attributes:
      bound: Proven: every solution takes at least this at its peak; +inf if it is proven that there is no solution.
      peak: Least peak of any solution that was found; +inf without one.
      choices: That solution; None if none was found.
      instant: The earliest instant of its peak; without a solution, where the least amounts together are largest. None
        if nothing takes capacity.
      alive: (name, amount) of what takes capacity there, largest first; amounts of an edge go by both its nodes' names.
    """

    bound: float
    peak: float
    choices: tuple[int, ...] | None
    instant: int | None
    alive: tuple[tuple[str, float], ...]


def least_capacity(
    problem: Problem,
    options: SolverOptions | None = None,
    stop: StopRequest | None = None,
    question: float | None = None,
) -> LeastCapacity:
    """Minimises the peak usage of `problem`, whatever the cost; the problem's own capacity is ignored.

    Args:
      options: `relative_gap` is that of the peak. With no time at all, only what needs no search is told.
      stop: As for `solve`.
      question: The search ends as soon as it is known whether this much would do; None for the least itself.
    """
    options = options or SolverOptions()
    if stop is None:
        with stop_on_signals() as request:
            return least_capacity(problem, options, request, question)
    (low, instant), (high, _) = peak_if(problem, np.min), peak_if(problem, np.max)
    if options.work_limit is None and options.time_limit_s <= 0:
        return LeastCapacity(low, np.inf, None, instant, _least_alive(problem, instant))
    began = time.perf_counter()
    best = _start(problem, options, stop)
    if best is not None:
        high = evaluate(problem, best).peak_usage
    for turn in range(ROUNDS):
        if stop.requested or best is not None and high - low <= options.wanted_gap * high:
            break
        if question is not None and (low > question or best is not None and high <= question):
            break
        # A peak p has a level less than one step above it, hence the step taken off the bound below.
        levels = np.linspace(low, high, LEVELS)
        found = solve(
            _peak_problem(problem, levels),
            _share(options, 1 if best is None else ROUNDS - turn, time.perf_counter() - began),
            None if best is None else (*best, LEVELS - 1),
            stop=stop,
        )
        if found.choices is None:
            if best is None and found.certificate.status is Status.INFEASIBLE:
                low = np.inf
            break
        peak = evaluate(problem, found.chosen[:-1]).peak_usage
        if best is None or peak < high:
            best, high = found.chosen[:-1], peak
        low = min(max(low, found.certificate.bound - (levels[1] - levels[0])), high)
    if best is None:
        return LeastCapacity(low, np.inf, None, instant, _least_alive(problem, instant))
    instant = evaluate(problem, best).peak_instant
    return LeastCapacity(low, high, best, instant, _alive(problem, best, instant))


@collection_paused()
def exceeds(problem: Problem, options: SolverOptions, stop: StopRequest) -> bool | None:
    """Whether every solution takes more than the capacity; None if not known. Where copies fold, a bound is all that is
    sought.

    Args:
      problem: The problem, with a capacity. options, stop: As for `solve`.
    """
    assert problem.capacity is not None, "nothing limits usage"
    limit = problem.capacity * (1 + CAPACITY_TOLERANCE)
    (low, instant), (high, _) = peak_if(problem, np.min), peak_if(problem, np.max)
    frugal = _frugal(problem)
    if low > limit or frugal is not None and evaluate(problem, frugal).peak_usage <= limit:
        return low > limit
    start = LiftedStart()
    start.binding = set() if instant is None else {instant}
    # what fits has a peak of the lowest level, which is the capacity
    levels = np.linspace(problem.capacity, max(high, 2 * problem.capacity), LEVELS)
    options = dataclasses.replace(options, is_bound_enough=True)
    found = solve(_peak_problem(problem, levels), options, stop=stop, start=start)
    if found.certificate.bound > problem.capacity * (1 + ROUNDING):
        return True
    some = [] if found.choices is None else [found.choices]
    some += [] if found.relaxed is None else found.relaxed.choices
    return False if any(evaluate(problem, own[:-1]).peak_usage <= limit for own in some) else None


def _start(problem: Problem, options: SolverOptions, stop: StopRequest) -> tuple[int, ...] | None:
    """The better of two solutions that are soon found: what takes least node by node, whose edges may take any amount,
    and what costs least where there is no capacity. None if there is neither.
    """
    frugal = _frugal(problem)
    if stop.requested:
        return frugal
    cheapest = solve(dataclasses.replace(problem, capacity=None), _share(options, ROUNDS + 1, 0.0), stop=stop).choices
    found = [choices for choices in (frugal, cheapest) if choices is not None]
    return min(found, key=lambda choices: evaluate(problem, choices).peak_usage, default=None)


def _frugal(problem: Problem) -> tuple[int, ...] | None:
    """The choices that take least, each node by itself; None if they are forbidden together."""
    taken = [np.zeros(len(node.costs)) for node in problem.nodes]
    for usage in problem.usages:
        taken[usage.node] = taken[usage.node] + usage.amounts * max(usage.stop - usage.start, 0)
    if not all(np.isfinite(node.costs).any() for node in problem.nodes):
        return None
    choices = tuple(
        int(np.argmin(np.where(np.isinf(node.costs), np.inf, amounts)))
        for node, amounts in zip(problem.nodes, taken, strict=True)
    )
    return choices if np.isfinite(evaluate(problem, choices).objective) else None


def _share(options: SolverOptions, rounds: int, elapsed_s: float) -> SolverOptions:
    """The limits of one of the rounds that are left."""
    if options.work_limit is not None:
        return dataclasses.replace(options, work_limit=options.work_limit / (ROUNDS + 1))
    return dataclasses.replace(options, time_limit_s=max((options.time_limit_s - elapsed_s) / rounds, 0.1))


def _least_alive(problem: Problem, instant: int | None) -> tuple[tuple[str, float], ...]:
    """What takes capacity at `instant` whatever the choices."""
    live = [usage for usage in (*problem.usages, *problem.edge_usages) if _is_live(usage, instant)]
    return _gathered(problem, [(usage, float(usage.amounts.min())) for usage in live])


def _alive(problem: Problem, choices: Sequence[int], instant: int | None) -> tuple[tuple[str, float], ...]:
    """What takes capacity at `instant` under `choices`."""
    amounts: list[tuple[Usage | EdgeUsage, float]] = [
        (usage, float(usage.amounts[choices[usage.node]])) for usage in problem.usages if _is_live(usage, instant)
    ]
    for usage in problem.edge_usages:
        if _is_live(usage, instant):
            edge = problem.edges[usage.edge]
            entry = edge.source_class[choices[edge.source]], edge.target_class[choices[edge.target]]
            amounts.append((usage, float(usage.amounts[entry])))
    return _gathered(problem, amounts)


def _is_live(usage: Usage | EdgeUsage, instant: int | None) -> bool:
    return instant is not None and usage.start <= instant < usage.stop


def _gathered(problem: Problem, amounts: list[tuple[Usage | EdgeUsage, float]]) -> tuple[tuple[str, float], ...]:
    """Amounts by name, largest first, without those that are 0."""
    totals: dict[str, float] = {}
    for usage, amount in amounts:
        if isinstance(usage, Usage):
            name = problem.nodes[usage.node].name
        else:
            edge = problem.edges[usage.edge]
            name = f"{problem.nodes[edge.source].name} -> {problem.nodes[edge.target].name}"
        totals[name] = totals.get(name, 0.0) + amount
    return tuple(sorted(((name, total) for name, total in totals.items() if total), key=lambda pair: -pair[1]))


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
