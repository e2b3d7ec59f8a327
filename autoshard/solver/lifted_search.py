"""Solves problems with repeated structure by folding copies into one node, in time that depends on what is distinct.

  1. The capacity counts nowhere at first. The lifted problem gives a bound and decoded labels; where these,
     expanded, exceed the capacity, the worst instants are added, and copies that are alive there are told from those
     that are not (`colour_refinement.py`). So a few instants stand for tens of thousands.
  2. With those, the tied quotient problem gives solutions. Evenly spaced instants are added, more in each round: they
     part the copies into bands that may choose differently, which lets solutions fill the capacity more closely.

Every solution is expanded and priced on the whole problem; every bound holds for the whole problem (`quotient.py`).
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from autoshard.garbage import collection_paused
from autoshard.solver.bound.dual_ascent import DualAscent
from autoshard.solver.evaluate import CAPACITY_TOLERANCE
from autoshard.solver.factor_graph import FactorGraph, factor_graph_of, table_entries
from autoshard.solver.labelling import labels_cost
from autoshard.solver.lifted_start import LiftedStart
from autoshard.solver.primal.local_search import repair
from autoshard.solver.primal.tree_moves import descend_trees
from autoshard.solver.problem import Relaxed
from autoshard.solver.reduce.colour_refinement import refine
from autoshard.solver.reduce.columns import usage_over_time, worst_instants
from autoshard.solver.reduce.network import Network
from autoshard.solver.reduce.presolve import presolve
from autoshard.solver.reduce.quotient import Quotient, quotient_of
from autoshard.solver.search import Search

WORTHWHILE = 0.9
"""Folding goes on while classes are at most this share of the nodes."""
CUTS, RELAXED_CUTS = 8, 3
"""Most rounds of adding instants where the capacity is exceeded; and where a bound is enough."""
FOLDED = 0.5
"""Where a bound is enough, no instant counts, and classes are more than this share of the nodes, the problem is not
presolved: that takes longer than the messages then, and hardly changes what they bound."""
RELAXED_GAIN = 0.2
"""A bound is good enough where a round gains less than this share of the wanted gap."""
DEARER, LEANER_PAIRS = (1.25, 2.0, 4.0, 16.0), 10
"""Where choices exceed the capacity at the best prices, those at so many times the prices are decoded, each time after
so many pairs of sweeps."""
COARSE_ROUNDS = 4
"""Rounds of refinement where none gives an equitable partition."""
REPAIRS = 8
"""Times that choices are repaired for instants that did not count when they were made."""
PENALTY = 1e-4
"""Least penalty at first for exceeding the whole capacity once more, relative to the cost."""
BANDS = (0, 8, 16, 32)
"""Evenly spaced instants added, round by round."""
PAIRS, CHUNK = 300, 25
"""Pairs of sweeps of an ascent, and between two polished solutions."""
STALL = 0.02
"""An ascent ends where it gains less than this share of the wanted gap."""
TREE_ROUNDS = 8
"""Rounds of the local search over trees."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Climbed:
    """Choices for the nodes of a quotient problem; int64 [nodes] each.

    Attributes:
      choices: Those that fit the instants that count, if any were found. decoded: As they were decoded last.
      value: The bound of the quotient problem; one of the whole problem if the partition is equitable.
    """

    choices: np.ndarray
    decoded: tuple[np.ndarray, ...]
    value: float


class _LiftedSearch:
    """The state of the search: which instants count."""

    def __init__(self, search: Search, start: LiftedStart) -> None:
        self.search, self.start = search, start
        self.columns = start.columns(search.problem)
        self.exceeded = set(start.binding)
        self.network: Network | None = None
        """The latest lifted network: what presolve has worked out for it serves the next."""
        self._unproven: Callable[[], tuple[np.ndarray, ...]] | None = None
        self._decoded_at: Callable[[float], np.ndarray] | None = None

    def quotient(self, bands: int) -> Quotient | None:
        """The problem quotient for the instants that count and `bands` more; None if that is hardly smaller."""
        problem, count = self.search.problem, self.columns.instants
        even = np.linspace(0, count - 1, bands + 2)[1:-1].astype(int).tolist() if count and bands else []
        instants = sorted(self.exceeded.union(even)) if problem.capacity is not None else []
        partition = refine(self.columns, instants)
        if not partition.is_equitable:
            partition = refine(self.columns, instants, COARSE_ROUNDS)
        if len(partition.first_node) > WORTHWHILE * len(problem.nodes):
            return None
        return quotient_of(problem, self.columns, partition, instants)

    def is_worth_presolving(self, quotient: Quotient) -> bool:
        """Whether presolve is worth its time where a bound is enough."""
        return bool(quotient.instants) or len(quotient.tied.nodes) <= FOLDED * len(self.search.problem.nodes)

    def climb(self, quotient: Quotient, is_presolved: bool = True) -> "_Climbed | None":
        """Raises the bound by message passing on the lifted problem; if there is none, on the tied one, whose messages
        bound nothing until `prove` copies them to the whole problem.

        Args:
          quotient: Has both problems.
          is_presolved: Whether the lifted problem is made smaller first, which can settle all of it.

        Returns:
          What is found on the way; None if the search is over.
        """
        search, lifted = self.search, quotient.lifted
        if lifted is None:
            network, constant = Network(quotient.tied), 0.0
        else:
            network, constant = Network(lifted.problem, like=self.network), lifted.constant
            self.network = network
            network.lift(lifted.problem, lifted.multiplicity, lifted.copy_pairs)
            if is_presolved:
                presolve(network)
            if network.infeasible:
                search.infeasible = search.choices is None
                return None
        constant += network.constant
        if not any(network.alive):
            search.prove(constant, "quotient presolve")
            if not network.is_cut_by_capacity:
                search.price_capacity(0.0, constant)
            return _Climbed(np.array(network.postsolve({})), (), constant)
        graph, nodes = factor_graph_of(network)
        instants = [quotient.instants[t] for t in network.instants.tolist()]
        own_prices = np.array([self.start.prices.get(t, 0.0) for t in instants])
        ascent = DualAscent(
            graph, own_prices, None if lifted is None else self.start.messages(quotient, network, graph)
        )
        done = 0
        while done < PAIRS and search.goes_on(done):
            gap = search.objective - constant - ascent.bound
            stall = min(5e-3 * gap, max(1e-4, STALL * search.options.wanted_gap) * abs(ascent.bound))
            before = ascent.bound
            steps = ascent.climb(CHUNK, search.objective - constant, np.inf, stall)
            search.budget.spend(3 * steps * table_entries(graph))
            done += steps
            if lifted is not None:
                search.prove(ascent.bound + constant, "quotient messages")
                if not network.is_cut_by_capacity:
                    search.price_capacity(float(ascent.prices.sum()), ascent.bound + constant)
            reached = constant + ascent.bound + (ascent.bound - before) * (PAIRS - done) / CHUNK  # at this pace
            if steps < CHUNK or done > CHUNK and self.is_of_no_use(reached):
                break
        prices = dict(zip(instants, ascent.prices.tolist(), strict=True))
        self.start.price(prices)
        self._unproven = None
        if lifted is None:
            self._unproven = lambda: self.start.whole.prove(search, quotient, ascent, prices)
        else:
            self.start.keep(quotient, network, graph, ascent.messages)
        of_labels = lambda labels: np.array(network.postsolve_labels(nodes, labels))
        at = lambda dearer: of_labels(ascent.decoded_at(dearer * ascent.prices, LEANER_PAIRS))
        self._decoded_at = lambda dearer: quotient.expanded(at(dearer))
        decoded = tuple(map(of_labels, ascent.decoded))
        return _Climbed(of_labels(_decoded(graph, ascent)), decoded, ascent.bound + constant)

    def is_of_no_use(self, bound: float) -> bool:
        """Whether a bound is too low to be of any use."""
        options = self.search.options
        return options.is_bound_enough and bound < options.useful_bound

    def prove(self) -> tuple[np.ndarray, ...]:
        """Proves the bound of the latest climb, where that is not done yet; the choices that were decoded then."""
        decoded = () if self._unproven is None else self._unproven()
        self._unproven = None
        return decoded

    def leaner(self) -> np.ndarray | None:
        """Choices for the whole problem, as decoded after the latest climb where memory is dearer, if some fit: at the
        best prices those that fit are often no better than those that do not."""
        if self._decoded_at is None:
            return None
        decoded = map(self._decoded_at, DEARER)
        return next((whole for whole in decoded if not self.excesses(whole)), None)

    def offer(self, whole: np.ndarray, phase: str) -> bool:
        """Offers choices for the whole problem; where they exceed the capacity, the worst instants count from now on.

        Returns:
          Whether they fit.
        """
        if self.count_exceeded(whole):
            return False
        self.search.offer(whole.tolist(), phase)
        return True

    def count_exceeded(self, whole: np.ndarray) -> float:
        """Lets the worst instants count at which choices exceed the capacity; by how much they do, 0 if they fit."""
        excesses = self.excesses(whole)
        self.exceeded.update(excesses)
        return next(iter(excesses.values()), 0.0)

    def excesses(self, whole: np.ndarray) -> dict[int, float]:
        """By how much choices exceed the capacity at the worst instants, the worst first; empty if they fit."""
        problem = self.search.problem
        if problem.capacity is None or not self.columns.instants:
            return {}
        usage = usage_over_time(problem, self.columns, whole)
        peaks = worst_instants(usage, problem.capacity * (1 + CAPACITY_TOLERANCE))
        return {instant: float(usage[instant]) - problem.capacity for instant in peaks}

    def offer_repaired(self, bands: int, whole: np.ndarray, phase: str) -> bool:
        """Offers choices; as long as they exceed the capacity, repairs them as those of the quotient problem.

        Returns:
          Whether some fit in the end.
        """
        for _ in range(REPAIRS):
            if self.offer(whole, phase):
                return True
            quotient = self.quotient(bands)
            if quotient is None:
                return False
            graph, _ = factor_graph_of(Network(quotient.tied))
            labels = whole[quotient.partition.first_node]
            floor = PENALTY * abs(labels_cost(graph, labels)) / max(self.search.problem.capacity or 0.0, 1e-300)
            weights = np.array([max(self.start.prices.get(t, 0.0), floor) for t in quotient.instants])
            if not repair(graph, labels, weights, 30, np.zeros(int(np.diff(graph.label_start).max()))):
                return False
            whole = quotient.expanded(labels)
        return False


def search_lifted(search: Search, start: LiftedStart | None = None) -> None:
    """Offers solutions and proves bounds by folding; does nothing where little is repeated.

    Args:
      search: Is told what is found. start: Of a problem like this one; takes what this one leaves.
    """
    state = _LiftedSearch(search, start or LiftedStart())
    quotient = state.quotient(0)
    if quotient is None:
        return
    climbed = state.climb(quotient)
    state.prove()
    fits = climbed is not None and state.offer(quotient.expanded(climbed.choices), "quotient")
    if fits and not search.done():
        choices = _tied_choices(search, quotient)
        if choices is not None:
            state.offer(quotient.expanded(choices), "tied")
    if not state.exceeded:
        return  # nothing binds: bands would change nothing
    for bands in BANDS:
        for _ in range(CUTS):
            quotient = None if search.done() else state.quotient(bands)
            climbed = None if quotient is None else state.climb(quotient)
            state.prove()
            if quotient is None or climbed is None:
                return
            before = len(state.exceeded)
            fits = state.offer_repaired(bands, quotient.expanded(climbed.choices), "quotient")
            if search.done() or not fits or len(state.exceeded) > before:
                continue  # new instants count: the bound can rise
            if not bands:
                break  # solutions without bands are not worth much
            choices = _tied_choices(search, quotient)
            if choices is None or state.offer_repaired(bands, quotient.expanded(choices), "tied"):
                break


@collection_paused()
def relax_lifted(search: Search, start: LiftedStart | None = None) -> Relaxed | None:
    """Proves a bound by folding.

    Args:
      search: Is told what is found. start: As for `search_lifted`.

    Returns:
      What comes with it; None where little is repeated, or there is no solution.
    """
    state = _LiftedSearch(search, start or LiftedStart())
    found, before, exceeded = (), -np.inf, 0.0
    is_priced = any(state.start.prices.get(t, 0.0) > 0 for t in state.start.binding)  # by problems before
    for _ in range(RELAXED_CUTS):
        quotient = state.quotient(0)
        climbed = None if quotient is None else state.climb(quotient, state.is_worth_presolving(quotient))
        if quotient is None or climbed is None:
            break
        whole = quotient.expanded(climbed.choices)
        found = tuple(tuple(own.tolist()) for own in (whole, *map(quotient.expanded, climbed.decoded)))
        enough = RELAXED_GAIN * search.options.wanted_gap * abs(climbed.value)
        exceeded = state.count_exceeded(whole)
        # what more instants can gain is what they exceed the capacity by, at about the prices of those that count
        gain = exceeded * sum(state.start.prices.get(t, 0.0) for t in state.start.binding) if is_priced else np.inf
        if not exceeded or search.done() or min(climbed.value - before, gain) < enough:
            break
        if quotient.instants and state.is_of_no_use(climbed.value):
            break  # choices know what memory costs, and more instants would hardly raise the bound
        before = climbed.value
    of_whole = state.prove()
    if not found or search.infeasible:
        return None
    found = (*found, *(tuple(own.tolist()) for own in of_whole))
    lean = state.leaner() if exceeded else None
    if lean is not None:
        found = (*found, tuple(lean.tolist()))
    prices = {t: price for t in sorted(state.start.binding) if (price := state.start.prices.get(t, 0.0)) > 0}
    return Relaxed(tuple(dict.fromkeys(found)), prices)


def _satisfying(search: Search) -> float:
    """The cost at which the gap to the bound proven so far is small enough."""
    gap = search.options.wanted_gap
    return search.bound / (1 - gap if search.bound > 0 else 1 + gap) if gap < 1 else np.inf


def _decoded(graph: FactorGraph, ascent: DualAscent) -> np.ndarray:
    """The better of the labels decoded last, made to fit the instants that count."""
    best, lowest = ascent.decoded[0], (True, np.inf)
    for decoded in ascent.decoded:
        labels = decoded.copy()
        fits = repair(graph, labels, ascent.penalties(), 30, ascent.scratch[0])
        value = (not fits, labels_cost(graph, labels))
        if value < lowest:
            best, lowest = labels, value
    return best


def _tied_choices(search: Search, quotient: Quotient) -> np.ndarray | None:
    """Choices of the tied problem: message passing, its labels polished, and a tree_search over trees from the best."""
    network = Network(quotient.tied)
    presolve(network)
    if network.infeasible:
        return None
    if not any(network.alive):
        return np.array(network.postsolve({}))
    graph, nodes = factor_graph_of(network)
    ascent = DualAscent(graph)
    enough = _satisfying(search) - network.constant
    best, lowest = None, np.inf
    done = 0
    while done < PAIRS and search.budget.remaining() > 0:
        stall = min(5e-3 * (lowest - ascent.bound), 1e-4 * abs(ascent.bound))
        steps = ascent.climb(CHUNK, lowest, np.inf, stall)
        search.budget.spend(3 * steps * table_entries(graph))
        done += steps
        for decoded in ascent.decoded:
            labels = decoded.copy()
            if repair(graph, labels, ascent.penalties(), 30, ascent.scratch[0]) and labels_cost(graph, labels) < lowest:
                best, lowest = labels, labels_cost(graph, labels)
        if lowest <= enough or steps < CHUNK:
            break
    if best is None:
        return None
    if lowest > enough:
        point = ascent.reparametrization()
        stop = lambda: search.budget.remaining() <= 0
        search.budget.spend(4 * TREE_ROUNDS * table_entries(graph))
        best = descend_trees(point.graph, best, point.unary, point.tables, TREE_ROUNDS, search.options.seed, stop)
    return np.array(network.postsolve_labels(nodes, best))
