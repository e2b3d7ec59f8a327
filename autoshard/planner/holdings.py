"""What a plan holds in memory on one device: most at once, and in all when every buffer has its place."""

import collections
from collections.abc import Container, Mapping, Sequence, Set

import numpy as np

from autoshard.graph.graph import Graph, Operation
from autoshard.graph.layout import WHOLE, Layout, shard_bytes
from autoshard.planner.build import Formulation
from autoshard.planner.estimate import MemoryItem
from autoshard.solver.packing import in_rooms, packed_bytes


def held_bytes(f: Formulation, picks: Sequence[int], spared: Set[int] = frozenset()) -> np.ndarray:
    """Bytes on one device of each usage of the problem, then of each usage of an edge; 0 where there is none.

    `spared`: Flows whose copies the compiler does not make (`as_compiled.py`).
    """
    edges = f.problem.edges
    values = [u.amounts[picks[u.node]] for u in f.problem.usages]
    pairs = [(u, edges[u.edge]) for u in f.problem.edge_usages]
    copies = [
        0.0 if u.edge in spared else u.amounts[e.source_class[picks[e.source]], e.target_class[picks[e.target]]]
        for u, e in pairs
    ]
    return np.array([*values, *copies], np.float64)


def peak(f: Formulation, sizes_bytes: np.ndarray) -> tuple[float, str, tuple[MemoryItem, ...]]:
    """The most memory alive at once, where, and what it is made of, largest first. `sizes_bytes`: `held_bytes`."""
    graph, (starts, stops) = f.program.graph, _times(f)
    total = np.zeros(max(len(f.instants), 1) + 1)
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
    if f.instants and graph.operations:
        operation = graph.operations[f.instants[at]]
        peak_at = f"{operation.name} at {operation.source}" if operation.source else operation.name
    return float(usage[at]), peak_at, tuple(sorted(map(item, alive.tolist()), key=lambda m: -m.size_bytes))


def reserved_bytes(f: Formulation, sizes_bytes: np.ndarray, layouts: Mapping[int, Layout]) -> float:
    """What must be there for the program to run.

    The caller's buffers are there from first to last: all arguments, and all outputs that do not take the place of a
    donated argument. What fits into outputs before they are made lies there, all else in one allocation, with gaps
    (`packing.py`).

    Args:
      f: The formulation. sizes_bytes: `held_bytes`. layouts: The layout of each value that has one.
    """
    graph, (starts, stops) = f.program.graph, _times(f)
    first = {value: k for k, value in reversed([*enumerate(f.usage_values)])}
    outside = [first[a.value] for a in graph.arguments if a.value in first]
    total_bytes, rooms = float(sizes_bytes[outside].sum()), []
    producer = {r: o for o in graph.operations for r in o.results if r is not None}
    last = {value: k for value, k in first.items() if value in producer and stops[k] == len(f.instants)}
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


def _times(f: Formulation) -> tuple[np.ndarray, np.ndarray]:
    """(first instants, those after the last) of all usages, then of all usages of edges."""
    usages = [*f.problem.usages, *f.problem.edge_usages]
    return np.array([u.start for u in usages], np.int64), np.array([u.stop for u in usages], np.int64)


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
