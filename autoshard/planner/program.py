"""A graph prepared for planning: what can be computed before any mesh is known."""

import collections
import dataclasses
from collections.abc import Set

import numpy as np

from autoshard.compiler.analysis import ProgramAnalysis, analyse
from autoshard.compiler.kernel_traffic import Traffic
from autoshard.garbage import collection_paused
from autoshard.graph.graph import Graph, Operation
from autoshard.graph.groups import Group
from autoshard.graph.pointwise import pointwise_operations
from autoshard.planner.group_shapes import GroupShape, RegionCollective, RegionKernels, RegionWork, shape_of


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A graph prepared for planning.

    Attributes:
      analysis: What the compiler makes of it whatever the mesh.
      shapes: The shape of each group; groups of equal shape share one object.
    """

    analysis: ProgramAnalysis
    shapes: tuple[GroupShape, ...]

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.analysis.graph

    @property
    def groups(self) -> tuple[Group, ...]:
        """Its groups."""
        return self.analysis.groups

    @property
    def added_in_place(self) -> frozenset[int]:
        """The values that the compiler adds to another value as it makes them, where both lie alike."""
        writes = zip(self.groups, self.shapes, strict=True)
        return frozenset(a.value for g, s in writes for a, is_added in zip(g.writes, s.zeros, strict=True) if is_added)


@collection_paused()
def prepare(graph: Graph) -> Program:
    """Groups the operations of `graph`, and finds what the compiler makes of them."""
    analysis, pointwise = analyse(graph), pointwise_operations(graph)
    live, interned = analysis.live, dict[GroupShape, GroupShape]()
    in_place, works = frozenset(live.alias_stop), _region_works(graph)
    in_memory = live.stored | in_place
    traffic = Traffic(analysis.chains, live, pointwise)
    shapes = (shape_of(g, graph, traffic, in_memory, in_place, works.get(g.operations[0])) for g in analysis.groups)
    return Program(analysis, tuple(interned.setdefault(s, s) for s in shapes))


def _region_works(graph: Graph) -> dict[int, RegionWork]:
    """By operation, what each device does in the regions of `graph`; what equal ones do is found once."""
    known: dict[Graph, RegionWork] = {}
    works = {}
    for operation in graph.operations:
        if operation.region is not None:
            body = operation.region.body
            if body not in known:
                known[body] = _region_work(prepare(body))
            works[operation.index] = known[body]
    return works


def _region_work(inside: Program) -> RegionWork:
    """What each device does in a region with this body."""
    graph = inside.graph
    trips: dict[tuple[str, str, GroupShape], float] = collections.defaultdict(float)
    sent = [_collective(o, graph) for o in graph.operations if o.over]
    for group, shape in zip(inside.groups, inside.shapes, strict=True):
        first = graph.operations[group.operations[0]]
        if shape.work is not None:  # a region in this one
            for k in shape.work.kernels:
                trips[k.name, k.source, k.shape] += group.trips * k.trips
            sent += [dataclasses.replace(c, trips=group.trips * c.trips) for c in shape.work.collectives]
        elif not first.over:
            trips[first.name, first.source, shape] += group.trips
    kernels = tuple([RegionKernels(*alike, times) for alike, times in trips.items()])
    return RegionWork(kernels, tuple(sent), _workspace_bytes(inside))


def _collective(operation: Operation, graph: Graph) -> RegionCollective:
    size_bytes = lambda values: float(sum(graph.values[v].size_bytes for v in values if v is not None))
    shape = next((graph.values[r].shape for r in operation.results if r is not None), ())
    moved = size_bytes(operation.operands), size_bytes(operation.results)
    return RegionCollective(operation.name, operation.over, *moved, shape, operation.trips, operation.source)


def _workspace_bytes(inside: Program) -> float:
    """The most that a region with this body holds at once, beside its operands and results."""
    graph = inside.graph
    outside = {*(a.value for a in graph.arguments), *(o.value for o in graph.outputs)}
    return most_stored_bytes(inside, outside)


def most_stored_bytes(program: Program, outside: Set[int | None]) -> float:
    """The most that a program stores at once beside the values `outside`, all of it whole."""
    graph = program.graph
    change = np.zeros(len(graph.operations) + 2)
    for live in program.analysis.live.ranges:
        if live.value not in outside:
            change[live.start] += graph.values[live.value].size_bytes
            change[live.stop] -= graph.values[live.value].size_bytes
    for group, shape in zip(program.groups, program.shapes, strict=True):
        if shape.work is not None:
            change[group.operations[0]] += shape.work.workspace_bytes
            change[group.operations[0] + 1] -= shape.work.workspace_bytes
    return max(0.0, float(change.cumsum().max()))
