"""A plan and the order of its devices, in turn: the order is sought for the plan's traffic, then the plan for the
order.

The problem of a mesh prices collectives by the links that each axis crosses, which depend on the order of the devices.
So the search goes over meshes in orders that suit one axis or another (`placement/candidates.py`), and for its best
plan the order is sought under which that very plan sends least; on the mesh in that order the problem is solved again,
from the plan. No round can make the plan worse, and the rounds end when none makes it better.
"""

from collections.abc import Sequence

from autoshard.cluster import CollectiveKind, LogicalMesh, Slice
from autoshard.garbage import collection_paused
from autoshard.placement.flows import Flow, flow_of, joined_flows, total_s
from autoshard.placement.place import place
from autoshard.planner.decode import Evaluation
from autoshard.planner.estimate import CommunicationItem, Estimate
from autoshard.plans.placement_summary import PlacementSummary

MOST_ROUNDS = 3
"""How often a plan is made again for a better order of its devices."""


def flows_of(communication: Sequence[CommunicationItem], mesh: LogicalMesh) -> tuple[Flow, ...]:
    """The traffic of a plan on `mesh`."""
    return joined_flows(
        [
            flow_of(CollectiveKind(c.kind), c.axes, c.wire_bytes, c.time_s, c.count, mesh)
            for c in communication
            if c.is_collective
        ]
    )


@collection_paused()
def better_order(hardware: Slice, evaluation: Evaluation, relative_gap: float) -> LogicalMesh | None:
    """The mesh of a plan with its devices in an order under which the plan's traffic takes less; None where that cannot
    save more than a share `relative_gap` of the step.
    """
    mesh = evaluation.reader.f.mesh
    if len({level.link for axis in mesh.axes for level in axis.levels}) < 2 and hardware.uneven is None:
        return None  # all devices are equally far from each other
    times = evaluation.times
    if times.comm_s - times.hidden_s <= relative_gap * times.step_s:
        return None
    flows = flows_of(times.communication, mesh)
    placed = place(hardware, mesh, flows)
    saved_s = total_s(flows, mesh.axes) - placed.comm_s
    return placed.mesh if saved_s > relative_gap * times.step_s else None


def placement_summary(hardware: Slice | None, figures: Estimate, mesh: LogicalMesh) -> PlacementSummary | None:
    """What the order of a plan's devices gains; None where all orders are alike."""
    if hardware is None or not figures.collectives:
        return None
    flows = flows_of(figures.communication, mesh)
    placed = place(hardware, mesh, flows)
    comm_s = total_s(flows, mesh.axes)
    return PlacementSummary(comm_s, placed.listed_s, min(placed.bound_s, comm_s), placed.is_exact)
