"""A graph prepared for planning: what can be computed before any mesh is known."""

import dataclasses

from autoshard.compiler.analysis import ProgramAnalysis, analyse
from autoshard.garbage import collection_paused
from autoshard.graph.graph import Graph
from autoshard.graph.groups import Group
from autoshard.graph.pointwise import pointwise_operations
from autoshard.planner.group_shapes import GroupShape, shape_of


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


@collection_paused()
def prepare(graph: Graph) -> Program:
    """Groups the operations of `graph`, and finds what the compiler makes of them."""
    analysis, pointwise = analyse(graph), pointwise_operations(graph)
    live, interned = analysis.live, dict[GroupShape, GroupShape]()
    in_memory = live.stored.union(live.alias_stop)
    shapes = (shape_of(g, graph, live, in_memory, pointwise) for g in analysis.groups)
    return Program(analysis, tuple(interned.setdefault(s, s) for s in shapes))
