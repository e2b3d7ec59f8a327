"""Which sums are made by an exchange: each device sends every other its part of the piece that that one keeps, and adds
up what it gets.

XLA:TPU makes kernels wait for all-reduces and reduce-scatters. A sum that is scattered over all chips of a slice of
4 x 4 it does not even scatter: it all-reduces the whole, twice the bytes, and takes a slice (libtpu 0.0.42.1; over 2 x
4 it scatters, in one ring). All-to-alls it can run beside kernels (`options.py`), and one sends as many bytes as a
reduce-scatter. So a gradient that is scattered over up to `MOST_DEVICES` devices is exchanged there.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

from autoshard.cluster import MeshAxis
from autoshard.compiler.planned_graph import PlannedGraph
from autoshard.compiler.read_in_turn import awaited_values
from autoshard.graph.computations import Computation
from autoshard.graph.equation_plan import SCATTERING

EXCHANGED = SCATTERING | {"scatter-add"}
"""Operations whose sums can be exchanged: execution runs them by shards."""

MOST_DEVICES = 16
"""Over more chips an exchange takes longer than the all-reduce in whose place it runs. In a square slice of side n,
whose axes end and have w bytes/s each, an all-to-all of B bytes takes n / 4 B / w, as half of them cross the middle of
an axis; an all-reduce over both axes (1 - 1 / n^2) B / w (`cost/torus.py`). At n = 4 they take as long, and the
exchange hides."""


def may_be_exchanged(operation: str, size_bytes: float, least_bytes: float) -> bool:
    """Whether an operation's sums may be exchanged: `size_bytes` is what its result takes, whole; what takes less than
    `least_bytes` is not."""
    return operation in EXCHANGED and size_bytes >= least_bytes


def exchanged_on(axes: Sequence[MeshAxis]) -> frozenset[tuple[str, ...]]:
    """The names of mesh axes, in any order, over which sums may be exchanged."""
    chosen = (some for n in range(1, len(axes) + 1) for some in itertools.permutations(axes, n))
    return frozenset(tuple(a.name for a in some) for some in chosen if math.prod(a.size for a in some) <= MOST_DEVICES)


def exchanged_sums(planned: PlannedGraph, computations: Sequence[Computation], least_bytes: float) -> frozenset[int]:
    """The equations whose scattered sums are exchanged: of those that no product waits for.

    Args:
      planned: The program. computations: All of its computations.
      least_bytes: What their results take at least, whole.
    """
    awaited = awaited_values(planned.graph, by_products=True)
    found = set()
    for instruction in itertools.chain.from_iterable(computations):
        plan = planned.plan_of(instruction)
        if not plan.scatters or plan.pieces or plan.exchange or instruction.operation is None:
            continue
        if not awaited.isdisjoint(instruction.results) or not _is_over_few(plan.scatters, planned.axis_sizes):
            continue
        if may_be_exchanged(instruction.name, planned.graph.values[instruction.result()].size_bytes, least_bytes):
            found.add(instruction.equation)
    return frozenset(found)


def _is_over_few(scatters: Sequence[tuple[str, int]], axis_sizes: Mapping[str, int]) -> bool:
    """Whether each sum that is scattered onto one dimension is over so few devices that it may be exchanged."""
    dims = {dim for _, dim in scatters}
    return all(math.prod(axis_sizes[a] for a, d in scatters if d == dim) <= MOST_DEVICES for dim in dims)
