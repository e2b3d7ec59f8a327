"""The logical meshes that come into question for a program."""

import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from autoshard.cluster import LogicalMesh, Slice
from autoshard.errors import MeshError
from autoshard.graph.graph import Graph
from autoshard.placement.candidates import candidate_meshes
from autoshard.placement.place import listed_mesh
from autoshard.plans.options import PlanOptions
from autoshard.plans.pins import as_spec
from autoshard.plans.region_mesh import region_mesh
from autoshard.trace.annotations import fixed_of_spec

MOST_AXES, _FEW_AXES = 3, 2
"""Of meshes that come into question, the most axes; and of those that are all searched, if nothing else is asked."""


def logical_meshes(
    graph: Graph,
    hardware: Slice,
    mesh: Mapping[str, int] | None,
    pins: Mapping[str, PartitionSpec] | None,
    options: PlanOptions,
) -> list[LogicalMesh]:
    """The given mesh, that of the program's own regions, or all of up to as many axes as are wanted (three, unless
    `PlanOptions.max_mesh_axes` says less): those that have the axes that pins and annotations name.

    Raises:
      MeshError: If the mesh does not fit the devices or the regions, or none has the named axes.
    """
    mesh = region_mesh(graph, mesh, hardware.num_devices)
    in_turn = options.device_order == "listed"
    if mesh is not None:
        return [_as_listed(hardware, hardware.logical_mesh(mesh)) if in_turn else hardware.logical_mesh(mesh)]
    most_axes = MOST_AXES if options.max_mesh_axes is None else options.max_mesh_axes
    if in_turn:
        every = [_as_listed(hardware, m) for m in hardware.logical_meshes(most_axes)]
    else:
        every = list(candidate_meshes(hardware, most_axes))
    meshes = sorted(every, key=lambda m: _unlikeliness(m, hardware))
    fixed = [a.fixed for a in graph.arguments]
    fixed += [l for o in graph.operations for l in (*(o.fixed_operands or ()), *(o.fixed_results or ()))]
    fixed += [fixed_of_spec(as_spec(pattern, spec), len(spec)) for pattern, spec in (pins or {}).items()]
    named = {axis for layout in fixed for entry in layout or () for axis in entry or ()}
    fitting = [m for m in meshes if named <= set(m.axis_names)]
    if not fitting:
        raise MeshError(
            f"Pins or annotations name the mesh axes {sorted(named)}, which no searched mesh of "
            f"{hardware.num_devices} devices has "
            f"(they use {sorted({axis.name for m in meshes for axis in m.axes})}). Pass mesh= with the axes that "
            "they mean."
        )
    return fitting


def searched_and_further(
    meshes: Sequence[LogicalMesh], options: PlanOptions
) -> tuple[Sequence[LogicalMesh], Sequence[LogicalMesh]]:
    """Of the meshes that may be taken, those that are all searched, and those that a walk may come by: where
    `PlanOptions.max_mesh_axes` leaves it open, those of few axes, and the others.
    """
    few = [m for m in meshes if len(m.axes) <= _FEW_AXES]
    if options.max_mesh_axes is not None or not few:
        return meshes, ()
    return few, [m for m in meshes if len(m.axes) > _FEW_AXES]


def several_meshes(what: str, meshes: Sequence[LogicalMesh]) -> str:
    """The message that one problem needs one mesh."""
    shown = "; ".join(",".join(f"{axis.name}={axis.size}" for axis in mesh.axes) for mesh in meshes)
    return (
        f"{what} belongs to the problem of one mesh, but none is given, and there are several: {shown}. "
        "Choose one of them: --mesh, or mesh= in code."
    )


def _as_listed(hardware: Slice, mesh: LogicalMesh) -> LogicalMesh:
    """A mesh with its devices in the order in which the cluster lists them."""
    return listed_mesh(hardware, mesh.axis_names, mesh.shape) or mesh


def _unlikeliness(mesh: LogicalMesh, hardware: Slice) -> float:
    """How far the innermost axis is from what the fastest links join: the first plans found should be hard to beat,
    so that most meshes need no more than a bound.
    """
    inner = hardware.levels[0].size if hardware.levels else 1
    return abs(math.log2(mesh.shape[-1] / inner))
