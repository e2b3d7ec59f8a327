"""Integer programs over a part of the labels: better solutions where the whole is too large for one program.

* `solve_part` solves the program over given labels; what it proves holds for solutions made of those labels.
* `recover` takes the labels that message passing decoded lately. Around the best prices those are the labels of the
  relaxation's optimum, so that little is lost: the primal recovery of column generation.
* `walk` runs the local search over trees (`trees.py`) from the best solution.
* `roam` frees one neighbourhood of nodes after another and keeps the rest as in the best solution.
"""

import dataclasses
import math

import numpy as np

from autoshard.solver.bound.ascent import Ascent
from autoshard.solver.bound.flat import Flat, table_entries
from autoshard.solver.exact.ilp import ProgramResult, build_program, entry_estimate, solve_program
from autoshard.solver.primal.local_search import fits, labels_cost, labels_usage, settle
from autoshard.solver.primal.trees import walk_trees
from autoshard.solver.reduce.hints import labels_near
from autoshard.solver.reduce.network import Network
from autoshard.solver.search import Search

RECOVERY_ENTRIES = 150_000
"""Largest program of a recovery."""
ROAM_ENTRIES = 40_000
"""Aimed-at size of a neighbourhood's program."""
ROAM_NODES = 10_000
"""With more nodes, building programs takes longer than a search over trees: that comes first, while it helps."""
WALK_ROUNDS = 8
"""Rounds of the local search over trees between two programs."""
FAILURES = 30
"""Neighbourhoods in a row without a better solution after which the search gives up."""
BUILD_S_PER_FACTOR = 2e-4
"""How long it may take to build a program, for each factor; none is begun that could not be built in time."""
NODE_LIMIT = 2_000
"""Branch-and-bound nodes of a recovery or neighbourhood: a limit on work, not time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A flat problem with a dual state: what is needed to build programs and to read solutions back."""

    flat: Flat
    network: Network
    nodes: np.ndarray
    ascent: Ascent
    theta: np.ndarray
    tables: np.ndarray
    unary: np.ndarray
    """float64 [L], [tables]: priced costs without messages."""
    slack: np.ndarray
    """float64 [L]: excess over the bound of any solution with the label, at least."""


def solve_part(
    search: Search,
    part: Part,
    keep: np.ndarray,
    below: float,
    gap: float,
    time_limit_s: float,
    phase: str,
    node_limit: int | None = None,
) -> ProgramResult:
    """Solves the program over the labels `keep` (bool [L]) and offers its solution.

    Args:
      below: Factor entries with a reduced cost above this are left out. gap: relative gap to stop at.

    Returns:
      The result; its bound includes the network's constant.

    Rows for instants are added as solutions exceed them; a bound without some of the rows is a bound.
    """
    flat, ascent = part.flat, part.ascent
    if not search.affords_program(entry_estimate(flat, keep)):
        return ProgramResult(None, -math.inf, False)
    if (np.add.reduceat(keep.astype(np.int64), flat.label_start[:-1]) == 0).any():
        return ProgramResult(None, math.inf, True)
    if not search.has_time(BUILD_S_PER_FACTOR * len(flat.source)):
        return ProgramResult(None, -math.inf, False)
    scale = abs(search.objective) if search.choices is not None else abs(ascent.bound + part.network.constant)
    hint = incumbent_labels(search, part)
    active = ascent.prices > 0
    if hint is not None:
        active |= _peaks(flat, labels_usage(flat, hint), 0.98)
    bound, give_up_s = -math.inf, search.elapsed_s() + min(time_limit_s, search.remaining_s())
    while True:
        program = build_program(flat, part.theta, part.tables, ascent.messages, ascent.prices, keep, below, active)
        limit_s, nodes = search.program_limits(give_up_s - search.elapsed_s(), len(program.entry_row), node_limit)
        result = solve_program(
            flat, program, scale, gap * scale, limit_s, search.options.seed, nodes, hint, programs=search.programs
        )
        search.spend(result.work)
        if result.infeasible:
            return result
        bound = max(bound, result.bound + part.network.constant - float(ascent.prices @ flat.capacity))
        if result.labels is None:
            break
        exceeded = _peaks(flat, labels_usage(flat, result.labels), 1.0) & ~active
        if not exceeded.any():
            labels = result.labels
            # Rows hold up to the code's tolerance only, which may be a few bytes too many.
            if fits(flat, labels) or settle(flat, labels, ascent.penalties(), 30, ascent.scratch[0]):
                offer_labels(search, part.network, part.nodes, labels, phase)
            break
        if search.elapsed_s() >= give_up_s:
            break
        active |= exceeded
    return dataclasses.replace(result, bound=bound)


def _peaks(flat: Flat, usage: np.ndarray, share: float) -> np.ndarray:
    """Instants that take more than `share` of their capacity and, relative to it, no less than those beside them."""
    load = usage / np.maximum(flat.capacity, 1e-300)
    beside = np.concatenate([[-np.inf], load, [-np.inf]])
    return (load > share) & (load >= beside[:-2]) & (load >= beside[2:])


def offer_labels(search: Search, network: Network, nodes: np.ndarray, labels: np.ndarray, phase: str) -> bool:
    """Completes local labels int64 [n] to original choices and offers them."""
    return search.offer(network.complete_labels(nodes, labels), phase)


def incumbent_labels(search: Search, part: Part) -> np.ndarray | None:
    """The best solution as local labels int64 [n], within the capacity; None if there is none.

    A node whose choice was removed (as dominated, or because the solution itself is above the cutoff) takes the label
    that is cheapest beside the others.
    """
    if search.choices is None:
        return None
    flat = part.flat
    labels, whole = labels_near(search.choices, part.network, part.nodes, flat, np.zeros(len(part.ascent.scratch[0])))
    if not whole and not (fits(flat, labels) and np.isfinite(labels_cost(flat, labels))):
        if not settle(flat, labels, part.ascent.penalties(), 30, part.ascent.scratch[0]):
            return None
    return labels


def recover(search: Search, part: Part) -> None:
    """Solves the program over the labels decoded lately and those of the best solution."""
    current = incumbent_labels(search, part)
    gap = _open_gap(search, part)
    for seldom, fraction in ((0.01, 0.3), (0.01, 0.1), (0.01, 0.03), (0.01, 0.0), (0.1, 0.0), (1.0, 0.0), (4.0, 0.0)):
        keep = part.ascent.seen > seldom
        if fraction > 0:
            keep |= part.slack <= fraction * gap
        for labels in (*part.ascent.decoded, *([] if current is None else [current])):
            keep[part.flat.label_start[:-1] + labels] = True
        if entry_estimate(part.flat, keep) <= RECOVERY_ENTRIES:
            solve_part(
                search, part, keep, gap, 0.2 * search.wanted_gap(), 0.3 * search.remaining_s(), "recovery", NODE_LIMIT
            )
            return


def walk(search: Search, part: Part, rounds: int, seed: int) -> bool:
    """Runs the local search over trees from the best solution; returns whether it found a better one."""
    current = incumbent_labels(search, part)
    if current is None:
        return False
    labels = walk_trees(part.flat, current, part.unary, part.tables, rounds, seed, search.timekeeper())
    search.spend(4 * rounds * table_entries(part.flat))
    return labels_cost(part.flat, labels) < labels_cost(part.flat, current) and offer_labels(
        search, part.network, part.nodes, labels, "trees"
    )


def roam(search: Search, part: Part) -> None:
    """Frees windows of consecutive nodes and balls around random nodes, until neither helps any more."""
    rng = np.random.default_rng(search.options.seed)
    count = len(part.nodes)
    entries = entry_estimate(part.flat, part.slack <= _open_gap(search, part))
    size, failures = max(min(count // 4, count * ROAM_ENTRIES // max(entries, 1)), 1), 0
    for turn in range(search.options.neighbourhoods):
        current = incumbent_labels(search, part)
        if current is None or search.done() or failures >= FAILURES:
            return
        before = search.objective
        helped = walk(search, part, WALK_ROUNDS, search.options.seed + 1000 * turn)
        if count > ROAM_NODES and helped:
            failures = 0
            continue
        current = incumbent_labels(search, part)
        centre = int(rng.integers(count))
        if turn % 2 == 0:
            free = (np.arange(count) - centre) % count < size
        else:
            free = _ball(part.flat, centre, size)
        keep = part.slack <= _open_gap(search, part)
        keep &= np.repeat(free, np.diff(part.flat.label_start))
        kept = np.zeros(len(keep), bool)
        kept[part.flat.label_start[:-1] + current] = True
        keep |= kept
        result = solve_part(
            search,
            part,
            keep,
            _open_gap(search, part),
            0.1 * search.wanted_gap(),
            0.2 * search.remaining_s(),
            "neighbourhood",
            NODE_LIMIT,
        )
        failures = 0 if search.objective < before else failures + 1
        entries = entry_estimate(part.flat, keep) - entry_estimate(part.flat, kept)
        if entries > 2 * ROAM_ENTRIES or result.labels is None:
            size = max(int(size * 0.7), 2)
        elif entries < ROAM_ENTRIES:
            size = min(int(size * 1.3) + 1, count)


def _open_gap(search: Search, part: Part) -> float:
    """What a better solution may cost above the part's bound."""
    if search.choices is None:
        return math.inf
    return max(search.objective - part.network.constant - part.ascent.bound, 0.0)


def _ball(flat: Flat, centre: int, size: int) -> np.ndarray:
    """The `size` nodes nearest to `centre` over factors, bool [n]."""
    inside = np.zeros(len(flat.label_start) - 1, bool)
    inside[centre] = True
    queue = [centre]
    for node in queue:
        if len(queue) >= size:
            break
        into = flat.in_factors[flat.in_start[node] : flat.in_start[node + 1]]
        out = flat.out_factors[flat.out_start[node] : flat.out_start[node + 1]]
        for neighbour in (*flat.source[into], *flat.target[out]):
            if not inside[neighbour] and len(queue) < size:
                inside[neighbour] = True
                queue.append(int(neighbour))
    return inside
