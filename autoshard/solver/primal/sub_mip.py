"""Sub-MIPs: integer programs over a part of the labels; what one proves holds for solutions made of those labels."""

import dataclasses
import math

import numpy as np

from autoshard.solver.bound.dual_ascent import DualAscent
from autoshard.solver.bound.reparametrization import Reparametrization
from autoshard.solver.exact.milp import build_milp, entry_estimate
from autoshard.solver.exact.milp_solve import MilpResult, solve_milp
from autoshard.solver.factor_graph import FactorGraph
from autoshard.solver.labelling import fits, labels_cost, labels_usage
from autoshard.solver.primal.hints import labels_of_hint
from autoshard.solver.primal.local_search import repair
from autoshard.solver.reduce.network import Network
from autoshard.solver.search import Search

BUILD_S_PER_FACTOR = 2e-4
"""How long it may take to build a program, for each factor; none is begun that could not be built in time."""


@dataclasses.dataclass(frozen=True, slots=True)
class DualState:
    """A factor graph and where its ascent stands: what is needed to build programs and to read solutions back.

    Attributes:
      graph: What presolve left of `network`. nodes: The original index of each of its nodes, int64 [n].
      ascent: Where the prices, the messages and the decoded labels come from. point: Its best state.
      slack: float64 [L]; excess over the bound of any solution with the label, at least.
    """

    graph: FactorGraph
    network: Network
    nodes: np.ndarray
    ascent: DualAscent
    point: Reparametrization
    slack: np.ndarray


def solve_sub_mip(
    search: Search,
    state: DualState,
    phase: str,
    *,
    keep: np.ndarray,
    below: float,
    gap: float,
    limit: float,
    node_limit: int | None = None,
) -> MilpResult:
    """Solves the program over the labels `keep` (bool [L]) and offers its solution.

    Args:
      below: Factor entries with a reduced cost above this are left out. gap: relative gap to stop at.
      limit: Seconds, or units of work, that it may take. node_limit: Most branch-and-bound nodes.

    Returns:
      The result; its bound includes the network's constant.

    Rows for instants are added as solutions exceed them; a bound without some of the rows is a bound.
    """
    graph, ascent = state.graph, state.ascent
    if not search.budget.affords_milp(entry_estimate(graph, keep)):
        return MilpResult(None, -math.inf, False)
    if (np.add.reduceat(keep.astype(np.int64), graph.label_start[:-1]) == 0).any():
        return MilpResult(None, math.inf, True)
    if not search.budget.has_time(BUILD_S_PER_FACTOR * len(graph.source)):
        return MilpResult(None, -math.inf, False)
    scale = abs(search.objective) if search.choices is not None else abs(ascent.bound + state.network.constant)
    hint = incumbent_labels(search, state)
    active = state.point.prices > 0
    if hint is not None:
        active |= _peaks(graph, labels_usage(graph, hint), 0.98)
    bound, give_up = -math.inf, search.budget.elapsed() + min(limit, search.budget.remaining())
    while True:
        milp = build_milp(graph, state.point, keep=keep, cutoff=below, active=active)
        limit_s, nodes = search.budget.milp_limits(give_up - search.budget.elapsed(), len(milp.entry_row), node_limit)
        result = solve_milp(
            graph,
            milp,
            search.runner,
            scale=scale,
            absolute_gap=gap * scale,
            time_limit_s=limit_s,
            node_limit=nodes,
            seed=search.options.seed,
            hint=hint,
        )
        search.budget.spend(result.work)
        if result.infeasible:
            return result
        bound = max(bound, result.bound + state.network.constant - float(state.point.prices @ graph.capacity))
        if result.labels is None:
            break
        exceeded = _peaks(graph, labels_usage(graph, result.labels), 1.0) & ~active
        if not exceeded.any():
            labels = result.labels
            # Rows hold up to the code's tolerance only, which may be a few bytes too many.
            if fits(graph, labels) or repair(graph, labels, ascent.penalties(), 30, ascent.scratch[0]):
                offer_labels(search, state.network, state.nodes, labels, phase)
            break
        if search.budget.elapsed() >= give_up:
            break
        active |= exceeded
    return dataclasses.replace(result, bound=bound)


def _peaks(graph: FactorGraph, usage: np.ndarray, share: float) -> np.ndarray:
    """Instants that take more than `share` of their capacity and, relative to it, no less than those beside them."""
    load = usage / np.maximum(graph.capacity, 1e-300)
    beside = np.concatenate([[-np.inf], load, [-np.inf]])
    return (load > share) & (load >= beside[:-2]) & (load >= beside[2:])


def offer_labels(search: Search, network: Network, nodes: np.ndarray, labels: np.ndarray, phase: str) -> bool:
    """Completes local labels int64 [n] to original choices and offers them."""
    return search.offer(network.postsolve_labels(nodes, labels), phase)


def incumbent_labels(search: Search, state: DualState) -> np.ndarray | None:
    """The best solution as local labels int64 [n], within the capacity; None if there is none.

    A node whose choice was removed (as dominated, or because the solution itself is above the cutoff) takes the label
    that is cheapest beside the others.
    """
    if search.choices is None:
        return None
    graph = state.graph
    labels, whole = labels_of_hint(
        search.choices, state.network, state.nodes, graph, np.zeros(len(state.ascent.scratch[0]))
    )
    if not whole and not (fits(graph, labels) and np.isfinite(labels_cost(graph, labels))):
        if not repair(graph, labels, state.ascent.penalties(), 30, state.ascent.scratch[0]):
            return None
    return labels


def open_gap(search: Search, state: DualState) -> float:
    """What a better solution may cost above the state's bound."""
    if search.choices is None:
        return math.inf
    return max(search.objective - state.network.constant - state.ascent.bound, 0.0)
