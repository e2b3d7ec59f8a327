"""The solver's course, from a problem to a solution with a certificate.

  1. where nodes are copies of one another, the quotient with one node a class (`lifted_search.py`), which often settles
     everything;
  2. presolve (`presolve.py`);
  3. message passing with capacity prices for the bound, its decoded labels repaired and polished (`dual_ascent.py`,
     `local_search.py`);
  4. labels that no better solution has are removed and presolve runs again (reduced-cost fixing);
  5. what is left goes to integer programming (`milp.py`), whole if it is small enough, otherwise part by part
     (`sub_mip.py`).

Steps 3 and 4 repeat while they shrink the problem. Bounds proven after a removal hold for solutions below the cutoff
of that removal, so the bound reported is never above the least cutoff used.
"""

import contextlib
import math
from collections.abc import Callable, Sequence

import numpy as np

from autoshard.interrupts import StopRequest, stop_on_signals
from autoshard.solver.bound.dual_ascent import DualAscent
from autoshard.solver.bound.messages import label_slack
from autoshard.solver.exact.mathopt_runner import MathOptRunner
from autoshard.solver.exact.milp import entry_estimate
from autoshard.solver.factor_graph import FactorGraph, factor_graph_of, table_entries
from autoshard.solver.lifted_search import search_lifted
from autoshard.solver.options import Progress, SolverOptions
from autoshard.solver.primal.hints import labels_of_hint
from autoshard.solver.primal.local_search import (
    iterated_conditional_modes,
    labels_cost,
    labels_usage,
    least_usage_labels,
    repair,
)
from autoshard.solver.primal.sub_mip import (
    TREE_ROUNDS,
    DualState,
    large_neighbourhood_search,
    offer_labels,
    restricted_master_heuristic,
    solve_sub_mip,
    tree_search,
)
from autoshard.solver.problem import Problem, Solution
from autoshard.solver.reduce.network import Network
from autoshard.solver.reduce.presolve import presolve, restrict
from autoshard.solver.search import Search
from autoshard.solver.validate import check_problem
from autoshard.solver.warm_up import is_warm, share_compilation, warm_up_options, warm_up_problem

CHUNK = 25
"""Pairs of sweeps between two looks at the clock and two polished solutions."""
SMALL_ENTRIES = 20_000
"""A program with fewer matrix entries goes to integer programming after a short ascent."""

FIX_S_PER_NODE = 2e-4
"""How long removing labels and presolving again may take, for each node; not begun where it could not end in time."""
COPIES_SHARE = 0.3
"""Share of the time limit that folding copies may take."""
PRICE_CHUNKS = 20
"""Most chunks that sharpen the capacity prices of a small problem that is solved already."""

CLIMB_SHARE = 0.45
"""Share of the remaining time that message passing leaves to what follows."""


def solve(
    problem: Problem,
    options: SolverOptions | None = None,
    hint: Sequence[int] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    stop: StopRequest | None = None,
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

    Returns:
      The best solution found and what is proven about it; never raises for lack of a solution.

    Raises:
      SolverError: if the problem or the hint is malformed.
    """
    check_problem(problem)
    options = options or SolverOptions()
    with contextlib.nullcontext(stop) if stop is not None else stop_on_signals() as request:
        if not is_warm():
            if on_progress is not None:
                on_progress(Progress(0.0, math.inf, -math.inf, "compiling the solver, once a machine"))
            compile_kernels()
        with MathOptRunner(request, options.deadline()) as runner:
            return _solve(problem, options, hint, on_progress, runner)


def compile_kernels() -> None:
    """Compiles the kernels, or loads them from disk, by solving a small problem."""
    share_compilation()
    with MathOptRunner(StopRequest()) as runner:
        _solve(warm_up_problem(), warm_up_options(), None, None, runner)


def _solve(
    problem: Problem,
    options: SolverOptions,
    hint: Sequence[int] | None,
    on_progress: Callable[[Progress], None] | None,
    runner: MathOptRunner,
) -> Solution:
    """`solve` of a checked problem, with the clock running."""
    search = Search(problem, options, on_progress, runner)
    if hint is not None:
        search.offer(hint, "hint")
    with search.at_most(COPIES_SHARE):
        search_lifted(search)
    if search.done():
        return search.solution()
    network = Network(problem)
    presolve(network, lambda: search.remaining_s() <= 0)
    search.tell("presolve")
    _PrimalDualSearch(search, network, hint).run()
    return search.solution()


class _PrimalDualSearch:
    """Steps 3 to 5 on a network."""

    def __init__(self, search: Search, network: Network, hint: Sequence[int] | None) -> None:
        self.search, self.network, self.hint = search, network, hint
        self.cutoff = math.inf
        """Least cutoff used by a removal: better solutions than this are all still there."""
        self.repair_s = 0.0
        """The longest that repairing labels has taken."""

    def run(self) -> None:
        search, network = self.search, self.network
        while True:
            if network.infeasible:
                if math.isinf(self.cutoff):
                    search.infeasible = search.choices is None
                self._prove(math.inf, "fixing")
                return
            if not any(network.alive):
                search.offer(network.postsolve({}), "presolve")
                if math.isinf(self.cutoff) and not network.is_cut_by_capacity:
                    search.price_capacity(0.0, network.constant)
                self._prove(network.constant, "presolve")
                return
            if search.remaining_s() <= 0:
                return
            if not self._round():
                return

    def _prove(self, bound: float, phase: str) -> None:
        bound = min(bound, self.cutoff)
        if math.isfinite(bound):
            self.search.prove(bound, phase)

    def _round(self) -> bool:
        """One ascent, one fixing, and integer programming if what is left is small; returns whether to go on."""
        search = self.search
        graph, nodes = factor_graph_of(self.network)
        ascent = DualAscent(graph)
        if self.hint is not None:
            self._follow_hint(graph, nodes, ascent)
        is_whole = math.isinf(self.cutoff) and not self.network.is_cut_by_capacity
        small = entry_estimate(graph, np.ones(len(graph.unary), bool)) <= SMALL_ENTRIES
        if search.choices is None and not small:
            self._start(graph, nodes, ascent)
        self._climb(graph, nodes, ascent, 100 if small else search.options.dual_passes)
        if search.done():
            return False
        theta, tables, bound = ascent.state()
        self._prove(bound + self.network.constant, "messages")
        slack = label_slack(graph, tables, ascent.messages, theta)
        state = DualState(graph, self.network, nodes, ascent, theta, tables, ascent.priced_unary(), slack)
        if not small:
            tree_search(search, state, 2 * TREE_ROUNDS, search.options.seed)
        if not small and not search.done():
            restricted_master_heuristic(search, state)
        keep, below = np.ones(len(graph.unary), bool), math.inf
        if search.choices is not None:
            cutoff = search.objective - 0.9 * search.wanted_gap() * abs(search.objective)
            below = cutoff - self.network.constant - bound
            keep = slack <= below
        if search.done():
            return False
        entries = entry_estimate(graph, keep)
        if keep.mean() < 0.8 and entries > SMALL_ENTRIES:
            if not search.has_time(FIX_S_PER_NODE * len(nodes)):
                return False
            self.cutoff = min(self.cutoff, cutoff)
            for index, node in enumerate(nodes):
                restrict(self.network, int(node), keep[graph.label_start[index] : graph.label_start[index + 1]])
            presolve(self.network, lambda: search.remaining_s() <= 0)
            return True
        if entries <= search.options.ilp_entries:
            if search.choices is not None:
                self.cutoff = min(self.cutoff, cutoff)
            share = 1.0 if entries <= 4 * SMALL_ENTRIES else 0.6
            result = solve_sub_mip(
                search, state, keep, below, 0.5 * search.wanted_gap(), share * search.remaining_s(), "integer program"
            )
            if result.infeasible and search.choices is None and math.isinf(self.cutoff):
                search.infeasible = True
            self._prove(math.inf if result.infeasible else result.bound, "integer program")
            if small and is_whole:
                self._sharpen_price(graph, ascent)
        if not search.done():
            large_neighbourhood_search(search, state)
        return False

    def _sharpen_price(self, graph: FactorGraph, ascent: DualAscent) -> None:
        """Climbs on where the program was solved before the capacity prices had settled."""
        search = self.search
        target = search.objective - self.network.constant
        for _ in range(PRICE_CHUNKS):
            gap = target - ascent.bound
            if search.remaining_s() <= 0 or not math.isfinite(gap) or gap <= 1e-3 * abs(target):
                return
            steps = ascent.climb(CHUNK, target, math.inf, 1e-3 * gap)
            search.spend(3 * steps * table_entries(graph))
            search.price_capacity(float(ascent.prices.sum()), ascent.bound + self.network.constant)
            if steps < CHUNK:
                return

    def _follow_hint(self, graph: FactorGraph, nodes: np.ndarray, ascent: DualAscent) -> None:
        """Offers the hint once it is repaired and improved, in the first round."""
        assert self.hint is not None
        labels, _ = labels_of_hint(self.hint, self.network, nodes, graph, ascent.scratch[0])
        self.hint = None
        if repair(graph, labels, ascent.penalties(), 30, ascent.scratch[0]):
            offer_labels(self.search, self.network, nodes, labels, "hint")

    def _start(self, graph: FactorGraph, nodes: np.ndarray, ascent: DualAscent) -> None:
        """Offers a solution before there is any bound: labels that take little, made cheaper."""
        labels = least_usage_labels(graph)
        self.search.spend(30 * table_entries(graph))
        usage = labels_usage(graph, labels)
        iterated_conditional_modes(graph, labels, usage, np.full(len(usage), np.inf), 20, ascent.scratch[0])
        if math.isfinite(labels_cost(graph, labels)):
            offer_labels(self.search, self.network, nodes, labels, "start")

    def _climb(self, graph: FactorGraph, nodes: np.ndarray, ascent: DualAscent, passes: int) -> None:
        search, constant = self.search, self.network.constant
        leave_s = CLIMB_SHARE * search.remaining_s()
        done = turn = 0
        while done < passes and not search.done():
            gap = search.objective - constant - ascent.bound
            stall = min(5e-3 * gap, 1e-4 * abs(ascent.bound))
            steps = ascent.climb(CHUNK, search.objective - constant, math.inf, stall, search.timekeeper())
            done += steps
            search.spend(3 * steps * table_entries(graph))
            self._prove(ascent.bound + constant, "messages")
            if math.isinf(self.cutoff) and not self.network.is_cut_by_capacity:
                search.price_capacity(float(ascent.prices.sum()), ascent.bound + constant)
            last = steps < CHUNK or done >= passes or search.remaining_s() <= leave_s
            if search.choices is None or last or turn >= 2:
                self._polish(graph, nodes, ascent, ascent.decoded if last else ascent.decoded[turn % 2 :][:1])
            turn += 1
            if last:
                break

    def _polish(self, graph: FactorGraph, nodes: np.ndarray, ascent: DualAscent, starts: list[np.ndarray]) -> None:
        for decoded in starts:
            if self.search.done() or (self.search.choices is not None and not self.search.has_time(self.repair_s)):
                return
            hopeless = not math.isfinite(labels_cost(graph, decoded)) or (
                self.search.choices is not None and (labels_usage(graph, decoded) > 1.3 * graph.capacity).any()
            )
            if hopeless and len(starts) == 1:
                continue
            labels = decoded.copy()
            self.search.spend(30 * table_entries(graph))
            began = self.search.wall_s()
            fits = repair(graph, labels, ascent.penalties(), 30, ascent.scratch[0])
            self.repair_s = max(self.repair_s, self.search.wall_s() - began)
            if fits:
                if labels_cost(graph, labels) + self.network.constant < self.search.objective:
                    offer_labels(self.search, self.network, nodes, labels, "local search")
