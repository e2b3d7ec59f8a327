"""A plan and the order of its devices, in turn: the order is sought for the plan, then the plan for the order.

The problem of a mesh prices collectives by the links that each axis crosses, which depend on the order of the devices.
So the search goes over meshes in orders that suit one axis or another (`placement/candidates.py`), and for its best
plan the order is sought under which that very plan's step takes least, with what hides then; on the mesh in that order
the problem is solved again, from the plan. No round can make the plan worse, and the rounds end when none makes it
better. Other plans may be faster in orders in which this one is not (`search.py`).
"""

import collections
import heapq
from collections.abc import Sequence

from autoshard.cluster import CollectiveKind, LogicalMesh, Slice
from autoshard.garbage import collection_paused
from autoshard.placement.flows import Flow, flow_of, joined_flows, total_s
from autoshard.placement.place import place, placements
from autoshard.planner.decode import Evaluation
from autoshard.planner.estimate import CommunicationItem, Estimate
from autoshard.plans.placement_summary import PlacementSummary

MOST_ROUNDS = 3
"""How often a plan is made again for a better order of its devices."""

_MOST_TIMED = 12
"""Of the orders under which a plan's traffic takes least, for how many its step is timed; meshes of three axes on nodes
under even switches have ten."""


def flows_of(communication: Sequence[CommunicationItem], mesh: LogicalMesh) -> tuple[Flow, ...]:
    """The traffic of a plan on `mesh`."""
    return joined_flows(
        [
            flow_of(CollectiveKind(c.kind), c.axes, c.wire_bytes, c.time_s, c.count, mesh)
            for c in communication
            if c.is_collective
        ]
    )


def orders_of(hardware: Slice, evaluation: Evaluation) -> list[tuple[float, LogicalMesh]]:
    """The mesh of a plan with its devices in other orders, and what the plan's step would take, the fastest first:
    those under which its traffic takes least. None where all orders are alike.
    """
    mesh, times = evaluation.reader.f.mesh, evaluation.times
    if len({level.link for axis in mesh.axes for level in axis.levels}) < 2 and hardware.uneven is None:
        return []  # all devices are equally far from each other
    flows = flows_of(times.communication, mesh)
    if hardware.uneven is None:
        every = placements(hardware, mesh.axis_names, mesh.shape)
        others = heapq.nsmallest(_MOST_TIMED, every, key=lambda other: total_s(flows, other.axes))
    else:
        others = [place(hardware, mesh, flows).mesh]
    timed = [(_step_s(evaluation, other), other) for other in others if other.axes != mesh.axes]
    return sorted(timed, key=lambda own: own[0])


@collection_paused()
def better_order(hardware: Slice, evaluation: Evaluation, relative_gap: float) -> LogicalMesh | None:
    """The mesh of a plan with its devices in the order in which its step would take least; None where that cannot save
    more than a share `relative_gap` of it.
    """
    times = evaluation.times
    if times.comm_s - times.hidden_s <= relative_gap * times.step_s:
        return None
    for step_s, mesh in orders_of(hardware, evaluation)[:1]:
        if times.step_s - step_s > relative_gap * times.step_s:
            return mesh
    return None


@collection_paused()
def close_orders(hardware: Slice, evaluation: Evaluation, relative_gap: float) -> list[LogicalMesh]:
    """The mesh of a plan with its devices in other orders, those first in which its step would take least: other plans
    may be faster there. None where kernels wait for less than a share `relative_gap` of the step, and none that is the
    order of the plan or one before under other names of axes.
    """
    times = evaluation.times
    if times.comm_s - times.hidden_s <= relative_gap * times.step_s:
        return []
    every = [evaluation.reader.f.mesh, *(mesh for _, mesh in orders_of(hardware, evaluation))]
    first = {frozenset(collections.Counter((a.size, a.levels) for a in m.axes).items()): m for m in reversed(every)}
    return [mesh for mesh in every[1:] if any(mesh is own for own in first.values())]


def _step_s(evaluation: Evaluation, other: LogicalMesh) -> float:
    """What a plan's step would take with the devices of its mesh in another order."""
    mesh, known = evaluation.reader.f.mesh, {}
    comm_s = []
    for c in evaluation.times.communication:
        key = c.kind, c.axes, c.wire_bytes, c.time_s, c.count
        if key not in known:
            flows = flows_of([c], mesh)
            known[key] = total_s(flows, other.axes) if flows else c.time_s
        comm_s.append(known[key])
    return evaluation.times.step_with(comm_s)


def placement_summary(hardware: Slice | None, figures: Estimate, mesh: LogicalMesh) -> PlacementSummary | None:
    """What the order of a plan's devices gains; None where all orders are alike."""
    if hardware is None or not figures.collectives:
        return None
    flows = flows_of(figures.communication, mesh)
    placed = place(hardware, mesh, flows)
    comm_s = total_s(flows, mesh.axes)
    return PlacementSummary(comm_s, placed.listed_s, min(placed.bound_s, comm_s), placed.is_exact)
