"""What a compiled program sends over each level of the hardware, recounted from its replica groups.

A compiled program names positions in the mesh. The plan's order tells which device is at each, and the cluster how
these devices are joined; so what is counted here depends neither on the plan's own view of its axes nor on its prices.
"""

import math
from collections.abc import Sequence

import numpy as np

from autoshard.cluster import AxisLevel, CollectiveKind, LogicalMesh, MeshAxis, Slice
from autoshard.cost.collectives import rings, sent_share
from autoshard.hlo.collectives import LIKE, CompiledCollective
from autoshard.placement.level_bytes import LevelBytes, sent_shares, tallied


def level_traffic(
    collectives: Sequence[CompiledCollective], mesh: LogicalMesh, hardware: Slice
) -> tuple[LevelBytes, ...]:
    """Bytes that a device sends over each level in a step, innermost first; of unlike groups those of the slowest.

    Args:
      collectives: Of the compiled program. mesh: Of the plan: which device is at each position.
      hardware: How the devices are joined.
    """
    numbers = np.array(mesh.device_numbers)
    known: dict[tuple[int, ...], tuple[AxisLevel, ...]] = {}
    sent: list[tuple[AxisLevel, float]] = []
    for collective in collectives:
        kind = CollectiveKind(LIKE.get(collective.kind, collective.kind))
        every = []
        for group in {tuple(sorted(group)) for group in numbers[collective.groups].tolist()}:
            if group not in known:
                known[group] = hardware.levels_between(group)
            every.append(known[group])
        size = len(collective.groups[0])
        size_bytes = collective.wire_bytes / sent_share(kind, size)
        shares = [sent_shares(kind, _rings(levels)) for levels in set(every)]
        sent += [(ring, share * size_bytes) for ring, share in max(shares, key=_seconds)]
    return tallied(sent)


def _rings(levels: tuple[AxisLevel, ...]) -> list[AxisLevel]:
    return rings([MeshAxis("group", math.prod(level.size for level in levels), levels)])


def _seconds(shares: list[tuple[AxisLevel, float]]) -> float:
    return sum(share / ring.link.bandwidth_bytes_per_s for ring, share in shares)
