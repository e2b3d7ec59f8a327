"""The meshes that a stage may have on a slice of the cluster."""

import math
from collections.abc import Sequence

from autoshard.annotations.block import Block
from autoshard.cluster import LogicalMesh, Slice
from autoshard.cluster.wiring import part_of_level
from autoshard.plans.annotated import has_degrees


def usual_devices(part: Slice) -> int:
    """The most devices that a stage has unless the caller allows more: two nodes, since more stages and replicas serve
    larger slices better than collectives across many nodes.
    """
    return part.num_devices if len(part.levels) < 2 else 2 * part.levels[0].size


def stage_meshes(part: Slice, max_devices: int, nested: Sequence[Sequence[Block]] = ()) -> list[LogicalMesh]:
    """The meshes that a stage on a slice may have: part of a node, or whole nodes, as one axis or as one for each
    hardware level.

    Args:
      part: The slice. max_devices: Of a mesh.
      nested: Annotated blocks inside one another; meshes of up to three axes that have their degrees come too.
    """
    counts = [n for n in range(1, part.num_devices + 1) if n <= max_devices and part.num_devices % n == 0]
    inner = part.levels[0].size if part.levels else 1
    counts += [n for n in range(2, inner + 1) if inner % n == 0 and n <= max_devices]
    meshes = []
    for n in sorted(set(counts)):
        sub = sub_slice(part, n)
        if sub is None:
            continue
        meshes.append(sub.logical_mesh({"data": n}))
        if len(sub.levels) > 1:
            sizes = [math.prod(level.size for level in sub.levels[1:]), sub.levels[0].size]
            meshes.append(sub.logical_mesh(dict(zip(("data", "tensor"), sizes, strict=True))))
        for mesh in sub.logical_meshes(max_axes=3) if nested else ():
            is_new = all([a.levels for a in mesh.axes] != [a.levels for a in other.axes] for other in meshes)
            if is_new and any(has_degrees(mesh.shape, blocks) for blocks in nested):
                meshes.append(mesh)
    return meshes


def sub_slice(part: Slice, num_devices: int) -> Slice | None:
    """The first `num_devices` of a slice; None where they are neither part of a node nor whole nodes."""
    left, levels = num_devices, []
    for level in part.levels:
        if left == 1:
            break
        taken = min(left, level.size)
        if left % taken or level.size % taken:
            return None
        levels.append(part_of_level(level, 1, taken))
        left //= taken
        if taken < level.size and left > 1:
            return None
    return None if left > 1 else Slice(part.name, part.device_type, tuple(levels))
