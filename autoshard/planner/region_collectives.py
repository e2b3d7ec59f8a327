"""What the collectives cost that a program names itself, in a part that it splits by hand (`shard_map`)."""

from autoshard.cluster import LogicalMesh
from autoshard.cost.collectives import Collective, all_gather, all_reduce, all_to_all, launched, permute, reduce_scatter
from autoshard.planner.group_shapes import RegionCollective


def region_collective(collective: RegionCollective, mesh: LogicalMesh) -> Collective | None:
    """One run of a collective of a region; None over axes of one device, where nothing is sent.

    Every kind of JAX's is one of XLA's: sums, maxima and minima are all-reduces.
    """
    axes = [axis for axis in mesh.axes if axis.name in collective.axes and axis.size > 1]
    if not axes:
        return None
    name, operand_bytes = collective.name, collective.operand_bytes
    if "all_to_all" in name:
        priced = all_to_all(axes, operand_bytes)
    elif "all_gather" in name:
        priced = all_gather(axes, collective.result_bytes)
    elif "reduce_scatter" in name:
        priced = reduce_scatter(axes, operand_bytes)
    elif name == "ppermute":
        priced = permute(axes, operand_bytes)
    else:
        priced = all_reduce(axes, operand_bytes)
    return launched(priced, mesh.device_type)
