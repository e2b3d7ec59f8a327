"""What all buffers of a program take when each has its place: buffer assignment.

The caller's buffers are there from first to last: all arguments, and all outputs that do not take the place of a
donated argument. What fits into outputs before they are made lies there, all else in one allocation, with gaps
(OpenXLA, xla/service/buffer_assignment.cc; `heap_simulator.py`).
"""

import collections
import dataclasses
from collections.abc import Container, Mapping, Sequence

import numpy as np

from autoshard.compiler.buffer_uses import BufferKind, BufferUse
from autoshard.compiler.heap_simulator import in_rooms, packed_bytes
from autoshard.compiler.instants import instants_that_matter
from autoshard.compiler.solved import SolvedProgram
from autoshard.graph.graph import Graph, Operation
from autoshard.graph.layout import WHOLE, Layout, shard_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class LiveBuffers:
    """Each buffer of a solved program: when it is there, and how much it takes.

    Attributes:
      uses: What they hold.
      starts, stops: Positions in `instants`. sizes_bytes: On one device; 0 where there is none.
      instants: The operations at which anything is there together that ever is.
    """

    uses: Sequence[BufferUse]
    starts: np.ndarray
    stops: np.ndarray
    sizes_bytes: np.ndarray
    instants: np.ndarray


def live_buffers(uses: Sequence[BufferUse], spans: np.ndarray, sizes_bytes: np.ndarray) -> LiveBuffers:
    """The buffers `uses`, [n], which are there during `spans`, int64 [n, 2], and take `sizes_bytes`, [n]."""
    instants = instants_that_matter(*spans.T)
    starts, stops = np.searchsorted(instants, spans).T
    return LiveBuffers(uses, starts, stops, sizes_bytes, instants)


def reserved_bytes(solved: SolvedProgram, held: LiveBuffers) -> float:
    """What must be there on one device for the program to run."""
    graph, producer = solved.analysis.graph, solved.analysis.chains.producer
    starts, stops, sizes_bytes = held.starts, held.stops, held.sizes_bytes
    first = {use.owner: k for k, use in reversed([*enumerate(held.uses)]) if use.kind is BufferKind.VALUE}
    outside = [first[a.value] for a in graph.arguments if a.value in first]
    total_bytes, rooms = float(sizes_bytes[outside].sum()), []
    last = {v: k for v, k in first.items() if producer[v] is not None and stops[k] == len(held.instants)}
    for value, size_bytes in _own_outputs(graph, solved.layouts, solved.mesh.shape):
        total_bytes += size_bytes
        at = _buffer_of(value, graph, producer, first, last)
        if at in last and sizes_bytes[last[at]] == size_bytes:
            outside.append(last.pop(at))
            rooms.append((int(starts[outside[-1]]), size_bytes))
    inside = np.setdiff1d(np.arange(len(sizes_bytes)), outside)
    inside = inside[~in_rooms(starts[inside], stops[inside], sizes_bytes[inside], rooms)]
    return total_bytes + packed_bytes(starts[inside], stops[inside], sizes_bytes[inside])


def _buffer_of(
    value: int, graph: Graph, producer: Sequence[Operation | None], first: Mapping[int, int], last: Container[int]
) -> int | None:
    """The value in whose buffer `value` is: itself, or one of `last` that it is another name of or added to."""
    seen, ahead = {value}, [value]
    while ahead:
        at = ahead.pop()
        if at in last:
            return at
        made = producer[at]
        if at not in first and made is not None:
            alike = [o for o in made.operands if o is not None and o not in seen]
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
