"""How many bytes cross each level of the hardware."""

import dataclasses
import math
from collections.abc import Sequence

from autoshard.cluster import AxisLevel, CollectiveKind, MeshAxis
from autoshard.cost.collectives import rings, sent_share
from autoshard.cost.torus import is_torus
from autoshard.placement.flows import Flow


@dataclasses.dataclass(frozen=True, slots=True)
class LevelBytes:
    """What each device sends over one level of the hardware in a step.

    Attributes:
      level: As in `Link`: 0 inside a node, 1 between nodes, and so on.
      bandwidth_bytes_per_s: The least that any of these collectives has there. Collectives over other parts of a torus,
        with other wires, are counted apart.
      sent_bytes: By each device.
    """

    level: int
    bandwidth_bytes_per_s: float
    sent_bytes: float


def level_bytes(flows: Sequence[Flow], axes: Sequence[MeshAxis]) -> tuple[LevelBytes, ...]:
    """What the flows send over each level, innermost first."""
    sent = []
    for flow in flows:
        own = [axis for axis in axes if axis.name in flow.axes and axis.size > 1]
        if own:
            sent += [(ring, share * flow.size_bytes) for ring, share in sent_shares(flow.kind, rings(own))]
    return tallied(sent)


def tallied(sent: Sequence[tuple[AxisLevel, float]]) -> tuple[LevelBytes, ...]:
    """The bytes that devices send over rings, by the level that these are on."""
    found: dict[tuple[int, float], LevelBytes] = {}
    for ring, sent_bytes in sent:
        level, rate = ring.link.level, ring.link.bandwidth_bytes_per_s
        key = level, round(rate) if is_torus(ring) else 0.0
        known = found.get(key, LevelBytes(level, rate, 0.0))
        found[key] = LevelBytes(level, min(rate, known.bandwidth_bytes_per_s), known.sent_bytes + sent_bytes)
    return tuple(sorted(found.values(), key=lambda row: (row.level, -row.bandwidth_bytes_per_s)))


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
