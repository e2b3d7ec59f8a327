"""The time of a compiled program's collectives, by the same formulas that price the plan's (`cost/collectives.py`)."""

from collections.abc import Iterable

from autoshard.cluster import LogicalMesh
from autoshard.cost.collectives import Collective, all_gather, all_reduce, all_to_all, launched, permute, reduce_scatter
from autoshard.verify.collectives import CompiledCollective


def collectives_s(collectives: Iterable[CompiledCollective], mesh: LogicalMesh) -> float:
    """Seconds that `collectives` take on the links of `mesh`, one after another.

    Groups that extend along a part of an axis count as if they did along all of it.
    """
    return sum(c.times * launched(_priced(c, mesh), mesh.device_type).time_s for c in collectives)


def _priced(collective: CompiledCollective, mesh: LogicalMesh) -> Collective:
    """One run of a collective. Kinds that no plan has are priced as an all-to-all of their bytes."""
    axes = [mesh.axis(name) for name in collective.axes]
    own_bytes = sum(p.array.size_bytes for p in collective.pieces)
    match collective.kind:
        case "all-gather":
            return all_gather(axes, own_bytes * collective.num_devices)
        case "all-reduce":
            return all_reduce(axes, own_bytes)
        case "reduce-scatter":
            return reduce_scatter(axes, own_bytes)
        case "collective-permute":
            return permute(axes, own_bytes)
        case _:
            return all_to_all(axes, own_bytes)
