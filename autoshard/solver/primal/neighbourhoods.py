"""Better solutions where the whole is too large for one program: searches that solve one part of it after another.

* `restricted_master_heuristic` takes the labels that message passing decoded lately. Around the best prices those are
  the labels of the relaxation's optimum, so that little is lost, as in column generation.
* `tree_search` runs the local search over trees (`tree_moves.py`) from the incumbent.
* `large_neighbourhood_search` frees one neighbourhood of nodes after another and keeps the rest as in the incumbent
  (Shaw, Using constraint programming and local search methods to solve vehicle routing problems, 1998).
"""

import numpy as np

from autoshard.solver.exact.milp import entry_estimate
from autoshard.solver.factor_graph import FactorGraph, table_entries
from autoshard.solver.labelling import labels_cost
from autoshard.solver.primal.sub_mip import DualState, incumbent_labels, offer_labels, open_gap, solve_sub_mip
from autoshard.solver.primal.tree_moves import descend_trees
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
NODE_LIMIT = 2_000
"""Branch-and-bound nodes of a recovery or neighbourhood: a limit on work, not time."""


def restricted_master_heuristic(search: Search, state: DualState) -> None:
    """Solves the program over the labels decoded lately and those of the best solution."""
    current = incumbent_labels(search, state)
    gap = open_gap(search, state)
    for seldom, fraction in ((0.01, 0.3), (0.01, 0.1), (0.01, 0.03), (0.01, 0.0), (0.1, 0.0), (1.0, 0.0), (4.0, 0.0)):
        keep = state.ascent.seen > seldom
        if fraction > 0:
            keep |= state.slack <= fraction * gap
        for labels in (*state.ascent.decoded, *([] if current is None else [current])):
            keep[state.graph.label_start[:-1] + labels] = True
        if entry_estimate(state.graph, keep) <= RECOVERY_ENTRIES:
            solve_sub_mip(
                search,
                state,
                "recovery",
                keep=keep,
                below=gap,
                gap=0.2 * search.options.wanted_gap,
                limit=0.3 * search.budget.remaining(),
                node_limit=NODE_LIMIT,
            )
            return


def tree_search(search: Search, state: DualState, rounds: int, seed: int) -> bool:
    """Runs the local search over trees from the best solution; returns whether it found a better one."""
    current = incumbent_labels(search, state)
    if current is None:
        return False
    labels = descend_trees(
        state.graph, current, state.point.unary, state.point.tables, rounds, seed, search.budget.timekeeper(search.done)
    )
    search.budget.spend(4 * rounds * table_entries(state.graph))
    return labels_cost(state.graph, labels) < labels_cost(state.graph, current) and offer_labels(
        search, state.network, state.nodes, labels, "trees"
    )


def large_neighbourhood_search(search: Search, state: DualState) -> None:
    """Frees windows of consecutive nodes and balls around random nodes, until neither helps any more."""
    rng = np.random.default_rng(search.options.seed)
    count = len(state.nodes)
    entries = entry_estimate(state.graph, state.slack <= open_gap(search, state))
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
        keep = state.slack <= open_gap(search, state)
        keep &= np.repeat(free, np.diff(state.graph.label_start))
        kept = np.zeros(len(keep), bool)
        kept[state.graph.label_start[:-1] + current] = True
        keep |= kept
        result = solve_sub_mip(
            search,
            state,
            "neighbourhood",
            keep=keep,
            below=open_gap(search, state),
            gap=0.1 * search.options.wanted_gap,
            limit=0.2 * search.budget.remaining(),
            node_limit=NODE_LIMIT,
        )
        failures = 0 if search.objective < before else failures + 1
        entries = entry_estimate(state.graph, keep) - entry_estimate(state.graph, kept)
        if entries > 2 * LNS_ENTRIES or result.labels is None:
            size = max(int(size * 0.7), 2)
        elif entries < LNS_ENTRIES:
            size = min(int(size * 1.3) + 1, count)


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
