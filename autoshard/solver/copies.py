"""Solves problems with repeated structure by folding copies into one node, in time that depends on what is distinct.

  1. The capacity counts nowhere at first. The relaxed folded problem gives a bound and decoded labels; where these,
     unfolded, exceed the capacity, the worst instants are added, and copies that are alive there are told from those
     that are not (`refinement.py`). So a few instants stand for tens of thousands.
  2. With those, the tied folded problem gives solutions. Evenly spaced instants are added, more in each round: they
     part the copies into bands that may choose differently, which lets solutions fill the capacity more closely.

Every solution is unfolded and priced on the whole problem; every bound holds for the whole problem (`fold.py`).
"""

import numpy as np

from autoshard.solver.ascent import Ascent
from autoshard.solver.columns import columns_of, usage_over_time
from autoshard.solver.evaluate import CAPACITY_TOLERANCE
from autoshard.solver.flat import Flat, flatten
from autoshard.solver.fold import Folded, fold
from autoshard.solver.network import Network
from autoshard.solver.presolve import presolve
from autoshard.solver.primal import labels_cost, settle
from autoshard.solver.refinement import refine
from autoshard.solver.search import Search
from autoshard.solver.trees import walk_trees

WORTHWHILE = 0.6
"""Folding goes on while classes are at most this share of the nodes."""
CUTS = 12
"""Most rounds of adding instants where the capacity is exceeded."""
PEAKS = 3
"""Instants added in a round."""
APART = 0.02
"""Instants added in one round are at least this share of all apart."""
BANDS = (0, 8, 16, 32)
"""Evenly spaced instants added, round by round."""
PAIRS, CHUNK = 300, 25
"""Pairs of sweeps of an ascent, and between two polished solutions."""
WALKS = 8
"""Rounds of the local search over trees."""


class _Copies:
    """The state of the search: which instants count."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.columns = columns_of(search.problem)
        self.exceeded: set[int] = set()

    def folded(self, bands: int) -> Folded | None:
        """The problem folded for the instants that count and `bands` more; None if that is hardly smaller."""
        problem, count = self.search.problem, self.columns.instants
        even = np.linspace(0, count - 1, bands + 2)[1:-1].astype(int).tolist() if count and bands else []
        instants = sorted(self.exceeded.union(even)) if problem.capacity is not None else []
        partition = refine(self.columns, instants)
        if len(partition.first_node) > WORTHWHILE * len(problem.nodes):
            return None
        return fold(problem, self.columns, partition, instants)

    def climb(self, folded: Folded) -> tuple[Flat, Ascent]:
        """Raises the bound of the relaxed problem and proves it where it may be."""
        search = self.search
        flat, _ = flatten(Network(folded.relaxed))
        ascent = Ascent(flat)
        done = 0
        while done < PAIRS and not search.done():
            gap = search.objective - folded.constant - ascent.bound
            stall = min(5e-3 * gap, 1e-4 * abs(ascent.bound))
            steps = ascent.climb(CHUNK, search.objective - folded.constant, np.inf, stall)
            done += steps
            if folded.partition.is_equitable:
                search.prove(ascent.bound + folded.constant, "folded messages")
            if steps < CHUNK:
                break
        return flat, ascent

    def offer(self, folded: Folded, choices: np.ndarray, phase: str) -> bool:
        """Offers unfolded choices; where they exceed the capacity, the worst instants count from now on.

        Returns:
          Whether they fit.
        """
        whole = folded.unfolded(choices)
        problem = self.search.problem
        if problem.capacity is not None and self.columns.instants:
            usage = usage_over_time(problem, self.columns, whole)
            peaks = _peaks(usage, problem.capacity * (1 + CAPACITY_TOLERANCE))
            if peaks:
                self.exceeded.update(peaks)
                return False
        self.search.offer(whole.tolist(), phase)
        return True


def search_copies(search: Search) -> None:
    """Offers solutions and proves bounds by folding; does nothing where little is repeated."""
    state = _Copies(search)
    folded = state.folded(0)
    if folded is None:
        return
    for _ in range(CUTS):
        flat, ascent = state.climb(folded)
        if search.done() or state.offer(folded, _decoded(flat, ascent), "folded"):
            break
        folded = state.folded(0)
        if folded is None:
            return
    for bands in BANDS:
        if search.done():
            return
        if bands:
            if not state.exceeded:
                return  # nothing binds: bands would change nothing
            folded = state.folded(bands)
            if folded is None:
                return
            state.climb(folded)
        for _ in range(CUTS):
            if search.done():
                return
            choices = _tied_choices(search, folded)
            if choices is None or state.offer(folded, choices, "tied"):
                break
            folded = state.folded(bands)
            if folded is None:
                return


def _satisfying(search: Search) -> float:
    """The cost at which the gap to the bound proven so far is small enough."""
    gap = search.wanted_gap()
    return search.bound / (1 - gap if search.bound > 0 else 1 + gap) if gap < 1 else np.inf


def _peaks(usage: np.ndarray, capacity: float) -> list[int]:
    """Up to `PEAKS` instants that exceed the capacity most, some way apart."""
    over = np.where(usage > capacity, usage, 0.0)
    apart = max(int(APART * len(over)), 1)
    found: list[int] = []
    for _ in range(PEAKS):
        at = int(np.argmax(over))
        if over[at] <= 0:
            break
        found.append(at)
        over[max(0, at - apart) : at + apart] = 0.0
    return found


def _decoded(flat: Flat, ascent: Ascent) -> np.ndarray:
    """The better of the labels decoded last, made to fit the instants that count."""
    best, lowest = ascent.decoded[0], (True, np.inf)
    for decoded in ascent.decoded:
        labels = decoded.copy()
        fits = settle(flat, labels, ascent.penalties(), 30, ascent.scratch[0])
        value = (not fits, labels_cost(flat, labels))
        if value < lowest:
            best, lowest = labels, value
    return best


def _tied_choices(search: Search, folded: Folded) -> np.ndarray | None:
    """Choices of the tied problem: message passing, its labels polished, and a walk over trees from the best."""
    network = Network(folded.tied)
    presolve(network)
    if network.infeasible:
        return None
    if not any(network.alive):
        return np.array(network.complete({}))
    flat, nodes = flatten(network)
    ascent = Ascent(flat)
    enough = _satisfying(search) - network.constant
    best, lowest = None, np.inf
    done = 0
    while done < PAIRS and search.remaining_s() > 0:
        stall = min(5e-3 * (lowest - ascent.bound), 1e-4 * abs(ascent.bound))
        steps = ascent.climb(CHUNK, lowest, np.inf, stall)
        done += steps
        for decoded in ascent.decoded:
            labels = decoded.copy()
            if settle(flat, labels, ascent.penalties(), 30, ascent.scratch[0]) and labels_cost(flat, labels) < lowest:
                best, lowest = labels, labels_cost(flat, labels)
        if lowest <= enough or steps < CHUNK:
            break
    if best is None:
        return None
    if lowest > enough:
        _, tables, _ = ascent.state()
        stop = lambda: search.remaining_s() <= 0
        best = walk_trees(flat, best, ascent.priced_unary(), tables, WALKS, search.options.seed, stop)
    chosen = {int(node): int(network.labels[node][label]) for node, label in zip(nodes, best, strict=True)}
    return np.array(network.complete(chosen))
