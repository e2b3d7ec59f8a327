"""The search proper, on a presolved network: dual ascent, primal heuristics, reduced-cost fixing, integer programs.

Every round climbs (`dual_ascent.py`), repairs decoded labels (`local_search.py`), and removes the labels that no better
solution has, whose star of reduced costs exceeds incumbent - bound (`label_slack`). Rounds repeat while that shrinks
the problem; the last one ends with integer programs (`milp.py`), over the whole if it is small enough, otherwise over
one part after another (`neighbourhoods.py`). Bounds proven after a removal hold for solutions below the cutoff of that
removal, so the bound reported is never above the least cutoff used.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from autoshard.solver.bound.dual_ascent import DualAscent
from autoshard.solver.bound.label_slack import label_slack
from autoshard.solver.exact.milp import entry_estimate
from autoshard.solver.factor_graph import FactorGraph, factor_graph_of, table_entries
from autoshard.solver.labelling import labels_cost, labels_usage
from autoshard.solver.primal.hints import labels_of_hint
from autoshard.solver.primal.local_search import iterated_conditional_modes, least_usage_labels, repair
from autoshard.solver.primal.neighbourhoods import (
    TREE_ROUNDS,
    large_neighbourhood_search,
    restricted_master_heuristic,
    tree_search,
)
from autoshard.solver.primal.sub_mip import DualState, offer_labels, solve_sub_mip
from autoshard.solver.reduce.network import Network
from autoshard.solver.reduce.presolve import presolve, restrict
from autoshard.solver.search import Search

CHUNK = 25
"""Pairs of sweeps between two looks at the clock and two polished solutions."""
SMALL_ENTRIES = 20_000
"""A program with fewer matrix entries goes to integer programming after a short ascent."""
FIX_S_PER_NODE = 2e-4
"""How long removing labels and presolving again may take, for each node; not begun where it could not end in time."""
PRICE_CHUNKS = 20
"""Most chunks that sharpen the capacity prices of a small problem that is solved already."""
CLIMB_SHARE = 0.45
"""Share of the remaining time that message passing leaves to what follows."""


class PrimalDualSearch:
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
            if search.budget.remaining() <= 0 or not self._round():
                if search.choices is None and not search.infeasible and not search.runner.stop.requested:
                    self._last_resort()
                return

    def _last_resort(self) -> None:
        """Offers a solution although the time is over, since there is none: labels that take little, else repaired."""
        graph, nodes = factor_graph_of(self.network)
        ascent = DualAscent(graph)
        self._start(graph, nodes, ascent)
        labels = least_usage_labels(graph)
        if self.search.choices is None and repair(graph, labels, ascent.penalties(), 30, ascent.scratch[0]):
            offer_labels(self.search, self.network, nodes, labels, "start")

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
        point = ascent.reparametrization()
        self._prove(point.bound + self.network.constant, "messages")
        slack = label_slack(point.graph, point.tables, point.messages, point.theta)
        state = DualState(point.graph, self.network, nodes, ascent, point, slack)
        if not small:
            tree_search(search, state, 2 * TREE_ROUNDS, search.options.seed)
        if not small and not search.done():
            restricted_master_heuristic(search, state)
        keep, below = np.ones(len(graph.unary), bool), math.inf
        if search.choices is not None:
            cutoff = search.objective - 0.9 * search.options.wanted_gap * abs(search.objective)
            below = cutoff - self.network.constant - point.bound
            keep = slack <= below
        if search.done():
            return False
        entries = entry_estimate(graph, keep)
        if keep.mean() < 0.8 and entries > SMALL_ENTRIES:
            if not search.budget.has_time(FIX_S_PER_NODE * len(nodes)):
                return False
            self.cutoff = min(self.cutoff, cutoff)
            for index, node in enumerate(nodes):
                restrict(self.network, int(node), keep[graph.label_start[index] : graph.label_start[index + 1]])
            presolve(self.network, lambda: search.budget.remaining() <= 0)
            return True
        if entries <= search.options.ilp_entries:
            if search.choices is not None:
                self.cutoff = min(self.cutoff, cutoff)
            share = 1.0 if entries <= 4 * SMALL_ENTRIES else 0.6
            result = solve_sub_mip(
                search,
                state,
                "integer program",
                keep=keep,
                below=below,
                gap=0.5 * search.options.wanted_gap,
                limit=share * search.budget.remaining(),
            )
            if result.infeasible and search.choices is None and math.isinf(self.cutoff):
                search.infeasible = True
            self._prove(math.inf if result.infeasible else result.bound, "integer program")
            if small and is_whole:
                self._sharpen_price(graph, ascent)
                # What follows goes by the sharpened prices and messages, but by the priced costs from before.
                point = dataclasses.replace(point, prices=ascent.prices, messages=ascent.messages)
                state = dataclasses.replace(state, point=point)
        if not search.done():
            large_neighbourhood_search(search, state)
        return False

    def _sharpen_price(self, graph: FactorGraph, ascent: DualAscent) -> None:
        """Climbs on where the program was solved before the capacity prices had settled."""
        search = self.search
        target = search.objective - self.network.constant
        for _ in range(PRICE_CHUNKS):
            gap = target - ascent.bound
            if search.budget.remaining() <= 0 or not math.isfinite(gap) or gap <= 1e-3 * abs(target):
                return
            steps = ascent.climb(CHUNK, target, math.inf, 1e-3 * gap)
            search.budget.spend(3 * steps * table_entries(graph))
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
        self.search.budget.spend(30 * table_entries(graph))
        usage = labels_usage(graph, labels)
        iterated_conditional_modes(graph, labels, usage, np.full(len(usage), np.inf), 20, ascent.scratch[0])
        if math.isfinite(labels_cost(graph, labels)):
            offer_labels(self.search, self.network, nodes, labels, "start")

    def _climb(self, graph: FactorGraph, nodes: np.ndarray, ascent: DualAscent, passes: int) -> None:
        search, constant = self.search, self.network.constant
        leave_s = CLIMB_SHARE * search.budget.remaining()
        done = turn = 0
        while done < passes and not search.done():
            gap = search.objective - constant - ascent.bound
            stall = min(5e-3 * gap, 1e-4 * abs(ascent.bound))
            steps = ascent.climb(
                CHUNK, search.objective - constant, math.inf, stall, search.budget.timekeeper(search.done)
            )
            done += steps
            search.budget.spend(3 * steps * table_entries(graph))
            self._prove(ascent.bound + constant, "messages")
            if math.isinf(self.cutoff) and not self.network.is_cut_by_capacity:
                search.price_capacity(float(ascent.prices.sum()), ascent.bound + constant)
            last = steps < CHUNK or done >= passes or search.budget.remaining() <= leave_s
            if search.choices is None or last or turn >= 2:
                self._polish(graph, nodes, ascent, ascent.decoded if last else ascent.decoded[turn % 2 :][:1])
            turn += 1
            if last:
                break

    def _polish(self, graph: FactorGraph, nodes: np.ndarray, ascent: DualAscent, starts: list[np.ndarray]) -> None:
        for decoded in starts:
            if self.search.done() or (
                self.search.choices is not None and not self.search.budget.has_time(self.repair_s)
            ):
                return
            hopeless = not math.isfinite(labels_cost(graph, decoded)) or (
                self.search.choices is not None
                and len(graph.capacity) > 0
                and bool((labels_usage(graph, decoded) > 1.3 * graph.capacity).any())
            )
            if hopeless and len(starts) == 1:
                continue
            labels = decoded.copy()
            self.search.budget.spend(30 * table_entries(graph))
            began = self.search.budget.wall_s()
            fits = repair(graph, labels, ascent.penalties(), 30, ascent.scratch[0])
            self.repair_s = max(self.repair_s, self.search.budget.wall_s() - began)
            if fits:
                if labels_cost(graph, labels) + self.network.constant < self.search.objective:
                    offer_labels(self.search, self.network, nodes, labels, "local search")
