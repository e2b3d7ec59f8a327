"""What a plan holds in memory on one device: most at once, and in all when every buffer has its place."""

import collections
import dataclasses
from collections.abc import Container, Mapping, Sequence, Set

import numpy as np

from autoshard.compiler.heap_simulator import in_rooms, packed_bytes
from autoshard.graph.graph import Graph, Operation
from autoshard.graph.layout import WHOLE, Layout, shard_bytes
from autoshard.planner.build import Formulation
from autoshard.planner.estimate import MemoryItem
from autoshard.planner.memory import instants_that_matter
from autoshard.planner.needed_whole import NeededWhole


@dataclasses.dataclass(frozen=True, slots=True)
class Holdings:
    """Each usage of the problem, then each usage of an edge: when, and how much.

    Attributes:
      starts, stops: Positions in `instants`. sizes_bytes: On one device; 0 where there is none.
      instants: The operations at which anything is there together that ever is.
    """

    starts: np.ndarray
    stops: np.ndarray
    sizes_bytes: np.ndarray
    instants: np.ndarray


def held_as_counted(f: Formulation, picks: Sequence[int], spared: Set[int] = frozenset()) -> Holdings:
    """What the solution `picks` holds as the solver counts it, less the copies of flows in `spared`."""
    edges = f.problem.edges
    values = [u.amounts[picks[u.node]] for u in f.problem.usages]
    pairs = [(u, edges[u.edge]) for u in f.problem.edge_usages]
    copies = [
        0.0 if u.edge in spared else u.amounts[e.source_class[picks[e.source]], e.target_class[picks[e.target]]]
        for u, e in pairs
    ]
    return _holdings(f.spans, np.array([*values, *copies], np.float64))


def held_as_compiled(
    f: Formulation,
    picks: Sequence[int],
    layouts: Mapping[int, Layout],
    targets: Sequence[Layout],
    spared: Set[int],
) -> Holdings:
    """What the solution `picks` holds as the compiler makes it.

    Args:
      f: The formulation. picks: One choice per node.
      layouts: The layout of each value. targets: The layout in which each flow's value is read.
      spared: Flows whose copies the compiler does not make (`as_compiled.py`).
    """
    counted = held_as_counted(f, picks, spared)
    return _holdings(*NeededWhole(f, layouts, targets, counted.sizes_bytes).shortened())


def _holdings(spans: np.ndarray, sizes_bytes: np.ndarray) -> Holdings:
    instants = instants_that_matter(*spans.T)
    return Holdings(*np.searchsorted(instants, spans).T, sizes_bytes, instants)


def peak(f: Formulation, held: Holdings) -> tuple[float, str, tuple[MemoryItem, ...]]:
    """The most memory alive at once, where, and what it is made of, largest first."""
    graph, starts, stops, sizes_bytes = f.program.graph, held.starts, held.stops, held.sizes_bytes
    total = np.zeros(max(len(held.instants), 1) + 1)
    np.add.at(total, starts, sizes_bytes)
    np.add.at(total, stops, -sizes_bytes)
    usage = np.cumsum(total)[:-1]
    at = int(np.argmax(usage))
    state = {graph.arguments[o.successor_of].value for o in graph.outputs if o.successor_of is not None}
    producer = {r: o for o in graph.operations for r in o.results if r is not None}

    def item(k: int) -> MemoryItem:
        size_bytes, count = float(sizes_bytes[k]), len(f.problem.usages)
        if k >= count:
            tensor = graph.values[f.flows[f.problem.edge_usages[k - count].edge].value]
            return MemoryItem(f"copy of {tensor.name}", "resharded copies", tensor.shape, size_bytes)
        value = f.usage_values[k]
        if value is None:
            group = f.program.groups[f.problem.usages[k].node - len(graph.arguments)]
            operation = graph.operations[group.operations[0]]
            shape = graph.values[group.writes[0].value].shape
            kind = "workspaces" if k in f.workspaces else "partial sums"
            return MemoryItem(f"{operation.name} at {operation.source}", kind, shape, size_bytes)
        tensor, operation = graph.values[value], producer.get(value)
        if operation is not None:
            return MemoryItem(f"{operation.name} at {operation.source}", "intermediates", tensor.shape, size_bytes)
        return MemoryItem(tensor.name, "state" if value in state else "inputs", tensor.shape, size_bytes)

    alive = np.flatnonzero((starts <= at) & (at < stops) & (sizes_bytes != 0))
    peak_at = ""
    if len(held.instants) and graph.operations:
        operation = graph.operations[held.instants[at]]
        peak_at = f"{operation.name} at {operation.source}" if operation.source else operation.name
    return float(usage[at]), peak_at, tuple(sorted(map(item, alive.tolist()), key=lambda m: -m.size_bytes))


def reserved_bytes(f: Formulation, held: Holdings, layouts: Mapping[int, Layout]) -> float:
    """What must be there for the program to run.

    The caller's buffers are there from first to last: all arguments, and all outputs that do not take the place of a
    donated argument. What fits into outputs before they are made lies there, all else in one allocation, with gaps
    (`packing.py`).

    Args:
      f: The formulation. held: What is held. layouts: The layout of each value that has one.
    """
    graph, starts, stops, sizes_bytes = f.program.graph, held.starts, held.stops, held.sizes_bytes
    first = {value: k for k, value in reversed([*enumerate(f.usage_values)])}
    outside = [first[a.value] for a in graph.arguments if a.value in first]
    total_bytes, rooms = float(sizes_bytes[outside].sum()), []
    producer = {r: o for o in graph.operations for r in o.results if r is not None}
    last = {value: k for value, k in first.items() if value in producer and stops[k] == len(held.instants)}
    for value, size_bytes in _own_outputs(graph, layouts, f.mesh.shape):
        total_bytes += size_bytes
        at = _buffer_of(value, graph, producer, first, last)
        if at in last and sizes_bytes[last[at]] == size_bytes:
            outside.append(last.pop(at))
            rooms.append((int(starts[outside[-1]]), size_bytes))
    inside = np.setdiff1d(np.arange(len(sizes_bytes)), outside)
    inside = inside[~in_rooms(starts[inside], stops[inside], sizes_bytes[inside], rooms)]
    return total_bytes + packed_bytes(starts[inside], stops[inside], sizes_bytes[inside])


def _buffer_of(
    value: int, graph: Graph, producer: Mapping[int, Operation], first: Mapping[int, int], last: Container[int]
) -> int | None:
    """The value in whose buffer `value` is: itself, or one of `last` that it is another name of or added to."""
    seen, ahead = {value}, [value]
    while ahead:
        at = ahead.pop()
        if at in last:
            return at
        if at not in first and at in producer:
            alike = [o for o in producer[at].operands if o is not None and o not in seen]
            alike = [o for o in alike if graph.values[o].size_bytes == graph.values[value].size_bytes]
            seen.update(alike)
            ahead += alike
    return None


def _own_outputs(graph: Graph, layouts: Mapping[int, Layout], mesh_shape: Sequence[int]) -> list[tuple[int, float]]:
    """(value, bytes on one device) of every output that does not take the place of an argument.

    Besides successors of donated arguments, `jax.jit` gives a donated argument's place to any output of equal shape,
    type and layout.
    """
    values, whole = graph.values, (WHOLE,) * len(mesh_shape)
    succeeded = {o.successor_of for o in graph.outputs}
    kind = lambda value, layout: (values[value].shape, values[value].dtype, layout)
    free = collections.Counter(
        kind(a.value, layouts[a.value]) for i, a in enumerate(graph.arguments) if a.donated and i not in succeeded
    )
    found = []
    for output in graph.outputs:
        if output.value is None:
            continue
        layout = layouts.get(output.value, whole)
        if output.successor_of is not None:
            argument = graph.arguments[output.successor_of]
            layout = layouts[argument.value]
            if argument.donated:
                continue
        key = kind(output.value, layout)
        if free[key]:
            free[key] -= 1
            continue
        found.append((output.value, shard_bytes(float(values[output.value].size_bytes), layout, mesh_shape)))
    return found
