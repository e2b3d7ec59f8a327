"""Integer programs over a part of the labels: better solutions where the whole is too large for one program.

* `solve_sub_mip` solves the program over given labels; what it proves holds for solutions made of those labels.
* `restricted_master_heuristic` solves it over the labels that message passing decoded lately. Around the best prices
  those are the labels of the relaxation's optimum, so that little is lost, as in column generation.
* `tree_search` runs the local search over trees (`tree_moves.py`) from the best solution.
* `large_neighbourhood_search` frees one neighbourhood of nodes after another and keeps the rest as in the incumbent.
"""

import dataclasses
import math

import numpy as np

from autoshard.solver.bound.dual_ascent import DualAscent
from autoshard.solver.exact.milp import MilpResult, build_milp, entry_estimate, solve_milp
from autoshard.solver.factor_graph import FactorGraph, table_entries
from autoshard.solver.primal.hints import labels_of_hint
from autoshard.solver.primal.local_search import fits, labels_cost, labels_usage, repair
from autoshard.solver.primal.tree_moves import descend_trees
from autoshard.solver.reduce.network import Network
from autoshard.solver.search import Search

RECOVERY_ENTRIES = 150_000
"""Largest program of a recovery."""
LNS_ENTRIES = 40_000
"""Aimed-at size of a neighbourhood's program."""
LNS_NODES = 10_000
"""With more nodes, building programs takes longer than a search over trees: that comes first, while it helps."""
TREE_ROUNDS = 8
"""Rounds of the local search over trees between two programs."""
FAILURES = 30
"""Neighbourhoods in a row without a better solution after which the search gives up."""
BUILD_S_PER_FACTOR = 2e-4
"""How long it may take to build a program, for each factor; none is begun that could not be built in time."""
NODE_LIMIT = 2_000
"""Branch-and-bound nodes of a recovery or neighbourhood: a limit on work, not time."""


@dataclasses.dataclass(frozen=True, slots=True)
class DualState:
    """A factor graph with a dual state: what is needed to build programs and to read solutions back."""

    graph: FactorGraph
    network: Network
    nodes: np.ndarray
    ascent: DualAscent
    theta: np.ndarray
    tables: np.ndarray
    unary: np.ndarray
    """float64 [L], [tables]: priced costs without messages."""
    slack: np.ndarray
    """float64 [L]: excess over the bound of any solution with the label, at least."""


def solve_sub_mip(
    search: Search,
    state: DualState,
    keep: np.ndarray,
    below: float,
    gap: float,
    time_limit_s: float,
    phase: str,
    node_limit: int | None = None,
) -> MilpResult:
    """Solves the program over the labels `keep` (bool [L]) and offers its solution.

    Args:
      below: Factor entries with a reduced cost above this are left out. gap: relative gap to stop at.

    Returns:
      The result; its bound includes the network's constant.

    Rows for instants are added as solutions exceed them; a bound without some of the rows is a bound.
    """
    graph, ascent = state.graph, state.ascent
    if not search.affords_milp(entry_estimate(graph, keep)):
        return MilpResult(None, -math.inf, False)
    if (np.add.reduceat(keep.astype(np.int64), graph.label_start[:-1]) == 0).any():
        return MilpResult(None, math.inf, True)
    if not search.has_time(BUILD_S_PER_FACTOR * len(graph.source)):
        return MilpResult(None, -math.inf, False)
    scale = abs(search.objective) if search.choices is not None else abs(ascent.bound + state.network.constant)
    hint = incumbent_labels(search, state)
    active = ascent.prices > 0
    if hint is not None:
        active |= _peaks(graph, labels_usage(graph, hint), 0.98)
    bound, give_up_s = -math.inf, search.elapsed_s() + min(time_limit_s, search.remaining_s())
    while True:
        milp = build_milp(graph, state.theta, state.tables, ascent.messages, ascent.prices, keep, below, active)
        limit_s, nodes = search.milp_limits(give_up_s - search.elapsed_s(), len(milp.entry_row), node_limit)
        result = solve_milp(
            graph, milp, scale, gap * scale, limit_s, search.options.seed, nodes, hint, runner=search.runner
        )
        search.spend(result.work)
        if result.infeasible:
            return result
        bound = max(bound, result.bound + state.network.constant - float(ascent.prices @ graph.capacity))
        if result.labels is None:
            break
        exceeded = _peaks(graph, labels_usage(graph, result.labels), 1.0) & ~active
        if not exceeded.any():
            labels = result.labels
            # Rows hold up to the code's tolerance only, which may be a few bytes too many.
            if fits(graph, labels) or repair(graph, labels, ascent.penalties(), 30, ascent.scratch[0]):
                offer_labels(search, state.network, state.nodes, labels, phase)
            break
        if search.elapsed_s() >= give_up_s:
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


def restricted_master_heuristic(search: Search, state: DualState) -> None:
    """Solves the program over the labels decoded lately and those of the best solution."""
    current = incumbent_labels(search, state)
    gap = _open_gap(search, state)
    for seldom, fraction in ((0.01, 0.3), (0.01, 0.1), (0.01, 0.03), (0.01, 0.0), (0.1, 0.0), (1.0, 0.0), (4.0, 0.0)):
        keep = state.ascent.seen > seldom
        if fraction > 0:
            keep |= state.slack <= fraction * gap
        for labels in (*state.ascent.decoded, *([] if current is None else [current])):
            keep[state.graph.label_start[:-1] + labels] = True
        if entry_estimate(state.graph, keep) <= RECOVERY_ENTRIES:
            solve_sub_mip(
                search, state, keep, gap, 0.2 * search.wanted_gap(), 0.3 * search.remaining_s(), "recovery", NODE_LIMIT
            )
            return


def tree_search(search: Search, state: DualState, rounds: int, seed: int) -> bool:
    """Runs the local search over trees from the best solution; returns whether it found a better one."""
    current = incumbent_labels(search, state)
    if current is None:
        return False
    labels = descend_trees(state.graph, current, state.unary, state.tables, rounds, seed, search.timekeeper())
    search.spend(4 * rounds * table_entries(state.graph))
    return labels_cost(state.graph, labels) < labels_cost(state.graph, current) and offer_labels(
        search, state.network, state.nodes, labels, "trees"
    )


def large_neighbourhood_search(search: Search, state: DualState) -> None:
    """Frees windows of consecutive nodes and balls around random nodes, until neither helps any more."""
    rng = np.random.default_rng(search.options.seed)
    count = len(state.nodes)
    entries = entry_estimate(state.graph, state.slack <= _open_gap(search, state))
    size, failures = max(min(count // 4, count * LNS_ENTRIES // max(entries, 1)), 1), 0
    for turn in range(search.options.neighbourhoods):
        current = incumbent_labels(search, state)
        if current is None or search.done() or failures >= FAILURES:
            return
        before = search.objective
        helped = tree_search(search, state, TREE_ROUNDS, search.options.seed + 1000 * turn)
        if count > LNS_NODES and helped:
            failures = 0
            continue
        current = incumbent_labels(search, state)
        centre = int(rng.integers(count))
        if turn % 2 == 0:
            free = (np.arange(count) - centre) % count < size
        else:
            free = _ball(state.graph, centre, size)
        keep = state.slack <= _open_gap(search, state)
        keep &= np.repeat(free, np.diff(state.graph.label_start))
        kept = np.zeros(len(keep), bool)
        kept[state.graph.label_start[:-1] + current] = True
        keep |= kept
        result = solve_sub_mip(
            search,
            state,
            keep,
            _open_gap(search, state),
            0.1 * search.wanted_gap(),
            0.2 * search.remaining_s(),
            "neighbourhood",
            NODE_LIMIT,
        )
        failures = 0 if search.objective < before else failures + 1
        entries = entry_estimate(state.graph, keep) - entry_estimate(state.graph, kept)
        if entries > 2 * LNS_ENTRIES or result.labels is None:
            size = max(int(size * 0.7), 2)
        elif entries < LNS_ENTRIES:
            size = min(int(size * 1.3) + 1, count)


def _open_gap(search: Search, state: DualState) -> float:
    """What a better solution may cost above the state's bound."""
    if search.choices is None:
        return math.inf
    return max(search.objective - state.network.constant - state.ascent.bound, 0.0)


def _ball(graph: FactorGraph, centre: int, size: int) -> np.ndarray:
    """The `size` nodes nearest to `centre` over factors, bool [n]."""
    inside = np.zeros(len(graph.label_start) - 1, bool)
    inside[centre] = True
    queue = [centre]
    for node in queue:
        if len(queue) >= size:
            break
        into = graph.in_factors[graph.in_start[node] : graph.in_start[node + 1]]
        out = graph.out_factors[graph.out_start[node] : graph.out_start[node + 1]]
        for neighbour in (*graph.source[into], *graph.target[out]):
            if not inside[neighbour] and len(queue) < size:
                inside[neighbour] = True
                queue.append(int(neighbour))
    return inside
