"""A graph prepared for planning: what can be computed before any mesh is known."""

import dataclasses
from collections.abc import Mapping

from autoshard.compiler.collective_combiner import Joining, joining_of
from autoshard.compiler.live_ranges import LiveRanges, live_ranges
from autoshard.garbage import collection_paused
from autoshard.graph.graph import Graph
from autoshard.graph.groups import Group, group_operations
from autoshard.graph.pointwise import pointwise_operations
from autoshard.graph.state import gradient_values, weight_values
from autoshard.planner.alone_sums import waited_for
from autoshard.planner.choices import GroupShape, shape_of
from autoshard.planner.kernels_first import kernels_first


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A graph prepared for planning: its groups and live ranges, which no mesh changes.

    Attributes:
      graph: The graph. groups: Its groups. live: When its values are alive.
      shapes: The shape of each group; groups of equal shape share one object.
      weights, gradients: The values whose collectives nobody waits for; see `overlap.py`.
      joining: How many of those the compiler joins.
      alone: The products whose sums are waited for; see `alone_sums.py`.
      kernels_first: The gradients of convolution kernels that are waited for; see `kernels_first.py`.
    """

    graph: Graph
    groups: tuple[Group, ...]
    live: LiveRanges
    shapes: tuple[GroupShape, ...]
    weights: frozenset[int]
    gradients: frozenset[int]
    joining: Joining
    alone: Mapping[int, int]
    kernels_first: Mapping[int, int]


@collection_paused()
def prepare(graph: Graph) -> Program:
    """Groups the operations of `graph` and finds when values are alive."""
    groups, live, pointwise = group_operations(graph), live_ranges(graph), pointwise_operations(graph)
    interned: dict[GroupShape, GroupShape] = {}
    in_memory = live.stored.union(value for value, _ in live.alias_stop)
    shapes = (shape_of(g, graph, live, in_memory, pointwise) for g in groups)
    shapes = tuple(interned.setdefault(s, s) for s in shapes)
    gradients = gradient_values(graph, pointwise)
    weights = weight_values(graph, pointwise)
    joining, alone, first = joining_of(graph, groups, gradients), waited_for(graph), kernels_first(graph, gradients)
    return Program(graph, groups, live, shapes, weights, gradients, joining, alone, first)
