"""The traffic of a plan, by the mesh axes that it goes along, and what it takes on given links.

The time of every collective is a constant plus a time per byte (`cost/collectives.py`), so that all collectives of one
kind over the same axes are one flow: so many bytes, and so many times the constant.
"""

import dataclasses
from collections.abc import Callable, Sequence

from autoshard.cluster import CollectiveKind, LogicalMesh, MeshAxis
from autoshard.cost.collectives import (
    Collective,
    all_gather,
    all_reduce,
    all_to_all,
    permute,
    reduce_scatter,
    sent_share,
)

_PRICES: dict[CollectiveKind, Callable[[Sequence[MeshAxis], float], Collective]] = {
    CollectiveKind.ALL_GATHER: all_gather,
    CollectiveKind.ALL_REDUCE: all_reduce,
    CollectiveKind.REDUCE_SCATTER: reduce_scatter,
    CollectiveKind.ALL_TO_ALL: all_to_all,
    CollectiveKind.PERMUTE: permute,
}
_PROBE_BYTES = 1e9
"""Any size: prices are linear in it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Flow:
    """All collectives of one kind over the same axes, in one step.

    Attributes:
      kind: Of the collectives. axes: Names of the mesh axes that they run over.
      size_bytes: Of their larger sides, on each device, together.
      times: How often their latencies are paid; less than their number where the compiler joins them.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    size_bytes: float
    times: float

    def seconds(self, axes: Sequence[MeshAxis]) -> float:
        """What it takes over axes with the given links."""
        own = [axis for axis in axes if axis.name in self.axes and axis.size > 1]
        if not own:
            return 0.0
        price = _PRICES[self.kind](own, _PROBE_BYTES)
        return self.times * price.fixed_s + self.size_bytes * (price.time_s - price.fixed_s) / _PROBE_BYTES


def flow_of(
    kind: CollectiveKind, axes: tuple[str, ...], wire_bytes: float, time_s: float, count: float, mesh: LogicalMesh
) -> Flow:
    """The flow of some collectives of a plan.

    Args:
      kind, axes: As of `Flow`.
      wire_bytes, time_s: What each device sends in a step, and how long that takes, all of them together.
      count: How many run in a step. mesh: On which they take so long.
    """
    own = [mesh.axis(name) for name in axes if mesh.axis(name).size > 1]
    num_devices = 1
    for axis in own:
        num_devices *= axis.size
    if num_devices == 1:
        return Flow(kind, axes, 0.0, 0.0)
    size_bytes = wire_bytes / sent_share(kind, num_devices)
    price = _PRICES[kind](own, _PROBE_BYTES)
    fixed_s = time_s - size_bytes * (price.time_s - price.fixed_s) / _PROBE_BYTES
    times = min(max(fixed_s / price.fixed_s, 0.0), count) if price.fixed_s else 0.0
    return Flow(kind, axes, size_bytes, times)


def joined_flows(flows: Sequence[Flow]) -> tuple[Flow, ...]:
    """One flow for each kind and axes."""
    found: dict[tuple[CollectiveKind, tuple[str, ...]], Flow] = {}
    for flow in flows:
        own = found.get((flow.kind, flow.axes), Flow(flow.kind, flow.axes, 0.0, 0.0))
        found[flow.kind, flow.axes] = dataclasses.replace(
            own, size_bytes=own.size_bytes + flow.size_bytes, times=own.times + flow.times
        )
    return tuple(flow for flow in found.values() if flow.size_bytes)


def total_s(flows: Sequence[Flow], axes: Sequence[MeshAxis]) -> float:
    """What all flows take, one after another."""
    return sum(flow.seconds(axes) for flow in flows)
