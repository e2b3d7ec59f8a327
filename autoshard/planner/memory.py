"""Memory over time: which bytes each choice takes on one device, and when.

Stored values take memory over their live ranges (`compiler/live_ranges.py`), a partial result while it waits for its
reduction, the resharded copy of an operand and the workspace of a product while the operation that needs them runs.
Time is the index of an operation; only the instants that matter are kept: any set of values alive together is alive at
one of them.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from autoshard.cluster import LogicalMesh
from autoshard.compiler.buffers import is_alias
from autoshard.cost.collectives import COMBINED_BYTES
from autoshard.graph.graph import Graph, OperationKind
from autoshard.graph.layout import shard_bytes
from autoshard.planner.allowed import Decision
from autoshard.planner.choices import ChoiceTable
from autoshard.planner.exponentials import exponentials
from autoshard.planner.layout_columns import LayoutColumn
from autoshard.planner.partial_sums import partial_sums
from autoshard.planner.products import workspaces
from autoshard.planner.program import Program
from autoshard.solver.problem import EdgeUsage, Usage


@dataclasses.dataclass(frozen=True, slots=True)
class Copies:
    """Bytes of a resharded copy for each pair of classes of an edge, 0 where nothing is moved.

    Attributes:
      size_bytes: Any copy. sent_bytes: Those that take a collective; a slice takes none.
    """

    size_bytes: np.ndarray
    sent_bytes: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """What takes memory, and when.

    Attributes:
      usages: Values, partial results, and workspaces of products; `values`: for each of them the value, None for the
        others. `workspaces`: The usages that are workspaces.
      edge_usages: Resharded copies.
      spans: int64 (n, 2). The first operation of each usage, then of each edge's, and the one after its last.
      instants: The operation that runs at each instant.
    """

    usages: tuple[Usage, ...]
    values: tuple[int | None, ...]
    workspaces: range
    edge_usages: tuple[EdgeUsage, ...]
    spans: np.ndarray
    instants: tuple[int, ...]


def memory_over_time(
    program: Program,
    mesh: LogicalMesh,
    tables: Sequence[ChoiceTable],
    decisions: Sequence[Decision],
    reads: Sequence[tuple[int, int | None]],
    copies: Sequence[Copies | None],
    defined: Callable[[int], tuple[int, LayoutColumn] | None],
) -> Memory:
    """Collects usages of memory.

    Args:
      program, mesh: What is planned. tables: The choice table of each group. decisions: The nodes of the problem.
      reads: For each edge, the decision that reads and which of its group's reads it is (None: not a read).
      copies: For each edge, what a resharded copy takes; None if there never is one.
      defined: The decision and layouts of a value; None for a constant.
    """
    first_group = len(program.graph.arguments)
    partial = partial_sums(program, mesh, tables, decisions, first_group)
    values = [*_stored(program, mesh, defined), *partial]
    num_values = len(values)
    values.extend(workspaces(program, mesh, decisions, first_group))
    pairs = list(_copies(program, reads, copies, first_group))
    starts = np.array([start for _, start, _, _, _ in values] + [start for _, start, _, _ in pairs], np.int64)
    stops = np.array([stop for _, _, stop, _, _ in values] + [stop for _, _, stop, _ in pairs], np.int64)
    instants = instants_that_matter(starts, stops)
    first = np.searchsorted(instants, starts).tolist()
    last = np.searchsorted(instants, stops).tolist()
    kept = [k for k in range(len(values)) if first[k] < last[k]]
    usages = tuple(Usage(values[k][0], first[k], last[k], values[k][3]) for k in kept)
    moved = [k for k in range(len(values), len(first)) if first[k] < last[k]]
    edge_usages = tuple(
        EdgeUsage(edge, first[k], last[k], amounts) for k in moved for edge, _, _, amounts in [pairs[k - len(values)]]
    )
    beside = range(sum(k < num_values for k in kept), len(kept))
    spans = np.stack([starts, stops], axis=1)[[*kept, *moved]]
    return Memory(usages, tuple(values[k][4] for k in kept), beside, edge_usages, spans, tuple(instants.tolist()))


def instants_that_matter(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """The fewest instants at which every maximal set of intervals `start <= t < stop` alive together is alive.

    An instant matters only if it is the last start before some interval stops. Returns rising int64.
    """
    if not len(starts):
        return np.zeros(0, np.int64)
    begins, ends = np.unique(starts), np.unique(stops)
    following = np.append(begins[1:], np.iinfo(np.int64).max)
    next_end = np.searchsorted(ends, begins, side="right")
    is_end = next_end < len(ends)
    return begins[is_end & (ends[np.minimum(next_end, len(ends) - 1)] <= following)]


def _stored(program: Program, mesh: LogicalMesh, defined: Callable[[int], tuple[int, LayoutColumn] | None]):
    """(node, start, stop, bytes of each choice, value) of every stored value."""
    values = program.graph.values
    cache: dict[tuple[int, int], np.ndarray] = {}
    for life in program.live.ranges:
        found = defined(life.value)
        size_bytes = values[life.value].size_bytes
        if found is None or size_bytes == 0:
            continue
        node, column = found
        key = size_bytes, id(column)
        if key not in cache:
            own = np.array([shard_bytes(float(size_bytes), l, mesh.shape) for l in column.layouts])
            cache[key] = own[column.of_choice]
        yield node, life.start, life.stop, cache[key], life.value
    yield from exponentials(program, mesh, defined)


def _copies(
    program: Program, reads: Sequence[tuple[int, int | None]], copies: Sequence[Copies | None], first_group: int
):
    """(edge, start, stop, bytes of each pair of classes) of every resharded copy.

    XLA:GPU begins a collective as soon as it can, and execution lets a weight be gathered as soon as the reader's other
    operand is there, which may wait for a sum that is reduced alone (`alone_sums.py`). Its partial sum takes as much as
    the copy. Indices that come with the arguments are there from the start: all tables that they are looked up in are
    gathered before the first is read. A copy that came by a collective stays for as long as anything needs it: where
    its reader is computed inside other kernels, for the last of these; and a sum made in a product's buffer is made in
    the copy of the product. Slices are computed there like their reader, and copies of gradients wait for others to be
    joined with, unless they are too large for that. Activations are moved as soon as they are there, too, if a product
    of the same checkpointed function reads them. The weight of a convolution waits for the gradient of a kernel that is
    made before (`kernels_first.py`).
    """
    graph: Graph = program.graph
    live = program.live
    alias_stop, fused_stop = dict(live.alias_stop), dict(live.fused_stop)
    births = {life.value: life.start for life in live.ranges}
    at_once, place = _made_at_once(graph), graph.checkpoint_of()
    first: dict[int, list[int]] = {}  # of each value, the gradients of kernels that its later readers wait for
    for convolution, value in program.kernels_first.items():
        first.setdefault(value, []).append(convolution)
    awaited: dict[int, list[int]] = {}  # of each value, the products whose sums its later readers wait for
    for product, value in program.alone.items():
        awaited.setdefault(value, []).append(product)
    for edge, ((target, read), copy) in enumerate(zip(reads, copies, strict=True)):
        if read is None or copy is None:
            continue
        access = program.groups[target - first_group].reads[read]
        is_weight = access.value in program.weights
        is_kept = access.value not in program.gradients and copy.sent_bytes.any()
        kept_from = 0
        for o in access.operations:
            operation = graph.operations[o]
            if operation.kind in (OperationKind.LOOP_CARRY, OperationKind.SCAN_STACK):
                continue  # the loop's own buffer, counted as a value
            stop = o + 1
            results = [r for r in operation.results if r is not None]
            if is_alias(operation):
                stop = max([stop, *(alias_stop.get(r, 0) for r in results)])
            start = o
            if is_weight and operation.rule.is_heavy:
                others = [v for v in operation.operands if v is not None and v != access.value]
                start = min(o, births.get(others[0], o) + 1) if others else o
                start = max([start, *(k + 1 for v in others[:1] for k in first.get(v, ()) if k < o)])
                if place[o] != -1:  # what enters a checkpointed function is there once all of it is
                    start = max(start, graph.checkpoints[place[o]][0])
                if operation.name == "gather" and all([v in at_once for v in others]):
                    start = 0
                sums = [k for v in others[:1] for k in awaited.get(v, ()) if start <= k < o]
                if sums:
                    yield edge, start, max(sums) + 1, np.where(copy.size_bytes > COMBINED_BYTES, 0.0, copy.size_bytes)
                    start = max(sums) + 1
            elif operation.rule.is_heavy and is_kept and o == access.operations[0]:
                there = births.get(access.value, o)
                if there + 1 < o and place[there] == place[o] != -1:
                    yield edge, there + 1, o, copy.sent_bytes
            kept_until = max([max(fused_stop.get(r, 0), alias_stop.get(r, 0)) for r in results], default=0)
            yield edge, start, stop, copy.size_bytes
            kept_from = max(kept_from, stop)
            if kept_until > kept_from:
                kept_bytes = copy.sent_bytes if is_kept else _too_large_to_join(copy.sent_bytes)
                if kept_bytes.any():
                    yield edge, kept_from, kept_until, kept_bytes
                kept_from = kept_until


def _too_large_to_join(size_bytes: np.ndarray) -> np.ndarray:
    """The sizes of gradients that are gathered as soon as they are there, since none are joined with them; else 0."""
    return np.where(size_bytes > COMBINED_BYTES, size_bytes, 0.0)


def _made_at_once(graph: Graph) -> frozenset[int]:
    """Values that nothing heavy is needed for but the program's arguments: they are there as soon as it begins."""
    found = {argument.value for argument in graph.arguments}
    for operation in graph.operations:
        if operation.kind is OperationKind.EQUATION and not operation.rule.is_heavy:
            if all([o is None or o in found for o in operation.operands]):
                found.update(r for r in operation.results if r is not None)
    return frozenset(found)
