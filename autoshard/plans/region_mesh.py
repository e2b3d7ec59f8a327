"""The mesh of a program that is split by hand in part: its `shard_map` regions say what it is."""

import math
from collections.abc import Mapping

from autoshard.errors import MeshError
from autoshard.graph.graph import Graph


def region_mesh(graph: Graph, mesh: Mapping[str, int] | None, num_devices: int) -> Mapping[str, int] | None:
    """The mesh to plan for: that of the regions of `graph`, or `mesh` if there are none.

    Args:
      graph: The program. mesh: The mesh that was asked for, if any. num_devices: Those that there are.

    Raises:
      MeshError: If regions are written for several meshes, for another than `mesh`, or for other numbers of devices.
    """
    regions = [(o.region.mesh, o.source or "an unknown line") for o in graph.operations if o.region is not None]
    if not regions:
        return mesh
    axes, line = regions[0]
    rule = "A `shard_map` region runs on the plan's devices, so its mesh must have the plan's axes in the plan's order"
    for others, elsewhere in regions:
        if others != axes:
            raise MeshError(
                f"{rule}: the region at {line} has {dict(axes)}, and the one at {elsewhere} has {dict(others)}. Write "
                "both for one mesh; a region may leave axes of it alone, as `in_specs` without them do."
            )
    if mesh is not None and tuple(mesh.items()) != axes:
        raise MeshError(
            f"{rule}: the region at {line} has {dict(axes)}, and mesh={dict(mesh)} was asked for. Leave mesh= out, or "
            "write the region for the mesh that you want."
        )
    if math.prod(size for _, size in axes) != num_devices:
        raise MeshError(
            f"{rule}: the region at {line} has {dict(axes)}, and there are {num_devices} devices to plan for. Make its "
            f"mesh of {num_devices} devices (`jax.sharding.AbstractMesh` where they are not at hand), or plan for "
            "another cluster."
        )
    return dict(axes)
