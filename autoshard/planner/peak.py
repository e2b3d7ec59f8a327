"""The most memory that a plan holds at once on one device, and what it is made of."""

from collections.abc import Sequence, Set

import numpy as np

from autoshard.compiler.buffer_assignment import LiveBuffers
from autoshard.compiler.buffer_uses import BufferKind, BufferUse
from autoshard.planner.build import Formulation
from autoshard.planner.estimate import MemoryItem

_CLASSES = {
    BufferKind.PARTIAL_SUM: "partial sums",
    BufferKind.WORKSPACE: "workspaces",
    BufferKind.OPERAND_COPY: "resharded copies",
    BufferKind.HOST_COPY: "copies from the host",
}


def counted_bytes(f: Formulation, picks: Sequence[int], spared: Set[int] = frozenset()) -> np.ndarray:
    """[n] bytes of each buffer of a formulation under the solution `picks`, less the copies of flows in `spared`."""
    edges = f.problem.edges
    values = [u.amounts[picks[u.node]] for u in f.problem.usages]
    pairs = [(u, edges[u.edge]) for u in f.problem.edge_usages]
    copies = [
        0.0 if u.edge in spared else u.amounts[e.source_class[picks[e.source]], e.target_class[picks[e.target]]]
        for u, e in pairs
    ]
    return np.array([*values, *copies], np.float64)


def peak(f: Formulation, held: LiveBuffers) -> tuple[float, str, tuple[MemoryItem, ...]]:
    """The most memory alive at once, where, and what it is made of, largest first."""
    graph, starts, stops, sizes_bytes = f.program.graph, held.starts, held.stops, held.sizes_bytes
    total = np.zeros(max(len(held.instants), 1) + 1)
    np.add.at(total, starts, sizes_bytes)
    np.add.at(total, stops, -sizes_bytes)
    usage = np.cumsum(total)[:-1]
    at = int(np.argmax(usage))
    alive = np.flatnonzero((starts <= at) & (at < stops) & (sizes_bytes != 0))
    items = memory_items(f, held, alive.tolist())
    peak_at = ""
    if len(held.instants) and graph.operations:
        operation = graph.operations[held.instants[at]]
        peak_at = operation.label
    return float(usage[at]), peak_at, tuple(sorted(items, key=lambda m: -m.size_bytes))


def memory_items(f: Formulation, held: LiveBuffers, buffers: Sequence[int]) -> list[MemoryItem]:
    """What these buffers of `held` hold."""
    graph = f.program.graph
    state = {graph.arguments[o.successor_of].value for o in graph.outputs if o.successor_of is not None}
    return [_item(f, held.uses[k], float(held.sizes_bytes[k]), state) for k in buffers]


def _item(f: Formulation, use: BufferUse, size_bytes: float, state: Set[int]) -> MemoryItem:
    """What a buffer holds; `state` are the arguments that have a successor."""
    graph = f.program.graph
    match use.kind:
        case BufferKind.OPERAND_COPY:
            value = f.flows[use.owner].value
            tensor, operation = graph.values[value], f.program.analysis.chains.producer[value]
            name = tensor.name if operation is None else operation.label
            return MemoryItem(f"copy of {name}", _CLASSES[use.kind], tensor.shape, size_bytes)
        case BufferKind.HOST_COPY:
            tensor = graph.values[use.owner]
            return MemoryItem(f"copy of {tensor.name} from the host", _CLASSES[use.kind], tensor.shape, size_bytes)
        case BufferKind.VALUE | BufferKind.AROUND_HOST:
            tensor, operation = graph.values[use.owner], f.program.analysis.chains.producer[use.owner]
            if operation is None:
                kind = "state" if use.owner in state else "inputs"
                return MemoryItem(tensor.name, kind, tensor.shape, size_bytes)
            return MemoryItem(operation.label, "intermediates", tensor.shape, size_bytes)
        case _:
            group = f.program.groups[use.owner]
            operation, shape = graph.operations[group.operations[0]], graph.values[group.writes[0].value].shape
            return MemoryItem(operation.label, _CLASSES[use.kind], shape, size_bytes)
