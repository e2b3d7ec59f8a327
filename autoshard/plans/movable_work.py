"""How long a plan computes on units that can move between devices, and what the controller is told of it."""

import collections
from collections.abc import Mapping, Sequence

from autoshard.balance.places import Placing, Room
from autoshard.balance.policy import Part
from autoshard.balance.regions import Island, evaluation
from autoshard.balance.units import UnitDimension, UnitDimensions
from autoshard.graph.graph import Graph
from autoshard.plans.program_plan import ProgramPlan


def island_seconds(plan: ProgramPlan, graph: Graph, dims: UnitDimensions) -> dict[int, float]:
    """For each unit dimension, the seconds that a device computes on its units in a step, at even shares."""
    unit_of: dict[int, int] = {}
    for stage in evaluation(graph, dims):
        if isinstance(stage, Island):
            unit_of.update({op.operation.equation: stage.unit for op in stage.ops})
    found = {unit.index: 0.0 for unit in dims.found}
    for item in plan.estimate.compute:
        if item.equation in unit_of:
            found[unit_of[item.equation]] += item.compute_s
    return found


def busiest_axis(units: Sequence[UnitDimension], own_s: Mapping[int, float]) -> tuple[str, float]:
    """The mesh axis along which most work can move, and the seconds of that.

    Args:
      units: The unit dimensions, of which there is one at least. own_s: As of `island_seconds`.
    """
    by_axis: dict[str, float] = collections.defaultdict(float)
    for unit in units:
        by_axis[unit.axis] += own_s[unit.index]
    axis = max(by_axis, key=lambda a: by_axis[a])
    return axis, by_axis[axis]


def parts_of(
    placed: Sequence[tuple[Room, Placing]],
    own_s: Sequence[float],
    other_s: float,
    bytes_per_s: float,
    scale: float = 1.0,
) -> list[Part]:
    """The unit dimensions as the controller sees them; what does not move is shared out in proportion to their work.

    Args:
      placed: Each unit dimension, and where its units are. own_s: Seconds on the units of each, at even shares.
      other_s: Seconds on all else. bytes_per_s: The bandwidth between two devices.
      scale: How many times longer work takes than these seconds.
    """
    movable_s, parts = sum(own_s), []
    for (room, placing), seconds in zip(placed, own_s, strict=True):
        unit_s = scale * seconds / (room.unit.size / room.unit.ways)
        fixed_s = scale * other_s * seconds / movable_s
        parts.append(Part(room, placing, unit_s, fixed_s, room.unit.bytes / bytes_per_s))
    return parts
