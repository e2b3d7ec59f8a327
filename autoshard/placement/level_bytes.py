"""How many bytes cross each level of the hardware."""

import dataclasses
import math
from collections.abc import Sequence

from autoshard.cluster import AxisLevel, CollectiveKind, MeshAxis
from autoshard.cost.collectives import rings, sent_share
from autoshard.placement.flows import Flow


@dataclasses.dataclass(frozen=True, slots=True)
class LevelBytes:
    """What each device sends over one level of the hardware in a step.

    Attributes:
      level: As in `Link`: 0 inside a node, 1 between nodes, and so on.
      bandwidth_bytes_per_s: The least that any of these collectives has there.
      sent_bytes: By each device.
    """

    level: int
    bandwidth_bytes_per_s: float
    sent_bytes: float


def level_bytes(flows: Sequence[Flow], axes: Sequence[MeshAxis]) -> tuple[LevelBytes, ...]:
    """What the flows send over each level, innermost first."""
    found: dict[int, LevelBytes] = {}
    for flow in flows:
        own = [axis for axis in axes if axis.name in flow.axes and axis.size > 1]
        for ring, share in sent_shares(flow.kind, rings(own)) if own else ():
            level, rate = ring.link.level, ring.link.bandwidth_bytes_per_s
            known = found.get(level, LevelBytes(level, rate, 0.0))
            sent_bytes = known.sent_bytes + share * flow.size_bytes
            found[level] = LevelBytes(level, min(rate, known.bandwidth_bytes_per_s), sent_bytes)
    return tuple(found[level] for level in sorted(found))


def sent_shares(kind: CollectiveKind, levels: Sequence[AxisLevel]) -> list[tuple[AxisLevel, float]]:
    """For each level, fastest first, the bytes that a device sends there for each byte of the larger side.

    The same as in `cost/collectives.py`, level by level.
    """
    if kind is CollectiveKind.PERMUTE:
        return [(levels[-1], 1.0)]
    total = math.prod(level.size for level in levels)
    found, before = [], 1
    for level in levels:
        if kind is CollectiveKind.ALL_TO_ALL:
            share = before * (level.size - 1) / total
        else:
            share = sent_share(kind, level.size) / before
        found.append((level, share))
        before *= level.size
    return found
