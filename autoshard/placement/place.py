"""The order of the devices under which a plan's traffic takes least.

    minimise   sum over flows of   seconds(flow, levels of its axes under the order)

over the ways to lay the mesh over the hardware. Where levels tell all (nodes under even switches, a torus), these are
the splits of the levels among the axes (`cluster/splits.py`); all are tried. Where they do not (racks of different
sizes, speeds of single pairs), the inside of the units is split likewise, and the units are arranged on the grid that
is left (`arrange.py`): exactly where they are few, else by a descent. The order of the devices as listed is always
among what is compared, and a bound tells what no order can beat (`bound.py`).
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from autoshard.cluster import LogicalMesh, MeshAxis, Slice
from autoshard.cluster.splits import Split, all_splits, row_major
from autoshard.cost.torus import is_torus
from autoshard.placement.arrange import best_arrangement
from autoshard.placement.bound import least_s, reaches
from autoshard.placement.flows import Flow, total_s
from autoshard.placement.unit_grid import UnitGrid, slowest_of

MOST_GRIDS = 4
"""Ways to share out the inside of units for which the units are arranged: those that look best before."""


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """A mesh with its devices in the best order found.

    Attributes:
      mesh: The mesh.
      comm_s: What the traffic takes in this order, hidden or not. listed_s: In the order in which devices are listed;
        None where the axes straddle nodes then. bound_s: No order takes less.
      is_exact: Whether every order that keeps parts of levels together was looked at.
    """

    mesh: LogicalMesh
    comm_s: float
    listed_s: float | None
    bound_s: float
    is_exact: bool


def place(hardware: Slice, mesh: LogicalMesh, flows: Sequence[Flow]) -> Placement:
    """The best order of a slice's devices for a mesh and the traffic over its axes.

    Args:
      hardware: The slice. mesh: Its axes tell names and sizes; its order is what to beat.
      flows: The traffic of a plan on that mesh.
    """
    names, sizes, flows = mesh.axis_names, mesh.shape, tuple(flows)
    listed = listed_mesh(hardware, names, sizes)
    known = [m for m in (listed, mesh) if m is not None]
    best = min(known, key=lambda m: total_s(flows, m.axes))
    is_exact = True
    if hardware.uneven is None:
        for split in _splits(hardware, sizes):
            best = _better(best, hardware.laid(names, sizes, split), flows)
    else:
        for grid in _grids(hardware, names, sizes, flows):
            found = best_arrangement(grid.shape, grid.starts(), grid.seconds)
            is_exact = is_exact and found.is_exact
            best = _better(best, grid.mesh(found.arrangement), flows)
        is_exact = is_exact and len(list(_unit_splits(hardware, sizes))) <= MOST_GRIDS
    return Placement(
        best,
        total_s(flows, best.axes),
        None if listed is None else total_s(flows, listed.axes),
        _bound_s(hardware, names, sizes, flows),
        is_exact,
    )


def _better(best: LogicalMesh, other: LogicalMesh, flows: Sequence[Flow]) -> LogicalMesh:
    """The mesh whose traffic takes less by more than rounding; the first one where both take the same."""
    return other if total_s(flows, other.axes) < (1 - 1e-9) * total_s(flows, best.axes) else best


def placements(hardware: Slice, names: Sequence[str], sizes: Sequence[int]) -> Iterator[LogicalMesh]:
    """Every way to lay axes over an even slice: one mesh for each combination of levels."""
    seen = set()
    for split in _splits(hardware, sizes):
        mesh = hardware.laid(names, sizes, split)
        if mesh.axes not in seen:
            seen.add(mesh.axes)
            yield mesh


def _splits(hardware: Slice, sizes: Sequence[int]) -> Iterator[Split]:
    levels = hardware.levels
    return all_splits([level.size for level in levels], sizes, [is_torus(level) for level in levels])


def _unit_splits(hardware: Slice, sizes: Sequence[int]) -> Iterator[Split]:
    """The inside of units shared out, and the units as one more level."""
    assert hardware.uneven is not None
    levels = [*(level.size for level in hardware.uneven.inside), hardware.uneven.num_units]
    return all_splits(levels, sizes, [False] * len(levels))


def _grids(hardware: Slice, names: Sequence[str], sizes: Sequence[int], flows: tuple[Flow, ...]) -> list[UnitGrid]:
    every = [UnitGrid(hardware, tuple(names), tuple(sizes), split, flows) for split in _unit_splits(hardware, sizes)]
    return sorted(every, key=lambda grid: min(map(grid.seconds, grid.starts())))[:MOST_GRIDS]


def listed_mesh(hardware: Slice, names: Sequence[str], sizes: Sequence[int]) -> LogicalMesh | None:
    """The mesh with devices in the order in which they are listed, row-major; None where its axes straddle nodes.

    On a torus devices are listed by their coordinates.
    """
    uneven = hardware.uneven
    levels = hardware.levels if uneven is None else uneven.inside
    across = [] if uneven is None else [uneven.num_units]
    split = row_major([*(level.size for level in levels), *across], sizes)
    if split is None:
        return None
    if uneven is None and not hardware.order:
        return hardware.laid(names, sizes, split)
    numbers = np.arange(hardware.num_devices).reshape(tuple(sizes))
    axes = []
    for a, (name, size) in enumerate(zip(names, sizes, strict=True)):
        lines = np.moveaxis(numbers, a, -1).reshape(-1, size).tolist()
        axes.append(slowest_of([MeshAxis(name, size, hardware.levels_between(line)) for line in lines]))
    return LogicalMesh(tuple(axes), hardware.device_type, host=hardware.host)


def _bound_s(hardware: Slice, names: Sequence[str], sizes: Sequence[int], flows: Sequence[Flow]) -> float:
    if hardware.torus:
        every = list(placements(hardware, names, sizes))
        return sum(min(flow.seconds(mesh.axes) for mesh in every) for flow in flows)
    tiers = reaches(hardware)
    size_of = dict(zip(names, sizes, strict=True))
    return sum(least_s(flow, math.prod(size_of[a] for a in flow.axes), tiers) for flow in flows)
