"""The meshes that a search goes over, each with its devices in an order that suits its axes.

Before a plan is known, so is not its traffic. Where levels are plain, row-major order over all sizes of axes gives each
axis its turn at the fastest links (`Slice.logical_meshes`). Where they are not (a torus, several tiers of switches,
uneven nodes), an axis may be laid over the hardware in many ways, some of which are worse than others for all axes.
What is left is thinned out: for each choice of sizes the order that suits one axis most, for each axis in turn.
"""

from collections.abc import Iterable, Iterator

from autoshard.cluster import CollectiveKind, LogicalMesh, Slice
from autoshard.cluster.slices import AXIS_NAMES, ordered_factors
from autoshard.placement.flows import Flow, total_s
from autoshard.placement.place import listed_mesh, place, placements

_BYTES = 1e9
"""Of a collective along each axis: any size that bandwidth rules."""
_MOST_TRAFFIC = 8.0
"""How many times more an axis sends than the others where an order is to suit it."""
_PLAIN_LEVELS = 2


def is_plain(hardware: Slice) -> bool:
    """Whether row-major order is as good as any other, once the axes may have all sizes."""
    return hardware.uneven is None and not hardware.torus and len(hardware.levels) <= _PLAIN_LEVELS


def candidate_meshes(hardware: Slice, max_axes: int) -> tuple[LogicalMesh, ...]:
    """The meshes of 1 to `max_axes` axes that a search looks at, fewer axes first.

    Raises:
      MeshError: If `max_axes` is not 1, 2 or 3.
    """
    plain = hardware.logical_meshes(max_axes)
    if is_plain(hardware) or hardware.num_devices == 1:
        return plain
    found: list[LogicalMesh] = []
    seen: set[frozenset] = set()
    for names in AXIS_NAMES[:max_axes]:
        every = ordered_factors(hardware.num_devices, len(names))
        for sizes in every:
            if sizes != tuple(sorted(sizes, reverse=True)):
                continue  # orders of sizes are one mesh under other names, where the order of the devices is free
            for mesh in _suiting(hardware, names, sizes):
                kinds = frozenset((axis.size, axis.levels) for axis in mesh.axes)
                if kinds not in seen:
                    seen.add(kinds)
                    found.append(mesh)
    return tuple(found) or plain


def _suiting(hardware: Slice, names: tuple[str, ...], sizes: tuple[int, ...]) -> Iterator[LogicalMesh]:
    """For each axis, the mesh whose order suits it most and the others as well as that leaves."""
    every = list(_undominated(placements(hardware, names, sizes))) if hardware.uneven is None else []
    for axis in range(len(sizes)):
        flows = [
            Flow(CollectiveKind.ALL_GATHER, (name,), _BYTES * (_MOST_TRAFFIC if a == axis else 1.0), 1.0)
            for a, name in enumerate(names)
        ]
        if every:
            yield min(every, key=lambda mesh: total_s(flows, mesh.axes))
        elif hardware.uneven is not None and (listed := listed_mesh(hardware, names, sizes)) is not None:
            yield place(hardware, listed, flows).mesh


def _undominated(meshes: Iterable[LogicalMesh]) -> list[LogicalMesh]:
    """Those than which no other is better for one axis and as good for all."""
    flow = lambda axis: Flow(CollectiveKind.ALL_GATHER, (axis.name,), _BYTES, 1.0)
    times = [(tuple(flow(axis).seconds([axis]) for axis in mesh.axes), mesh) for mesh in meshes]
    worse = lambda mine, other: other != mine and all(o <= m for o, m in zip(other, mine, strict=True))
    return [mesh for own, mesh in times if not any(worse(own, other) for other, _ in times)]
