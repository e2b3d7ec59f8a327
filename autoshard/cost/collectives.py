"""The time of collectives: latency-bandwidth, ring, hierarchical over the levels of a mesh axis.

For n devices on one level with hop latency a (s) and one-way bandwidth w (bytes/s per device):

    all-gather      (n-1) a + (n-1)/n B/w       B: bytes of the gathered result on each device
    reduce-scatter  the same, B: bytes of the partial input on each device
    all-reduce      reduce-scatter + all-gather
    all-to-all      (n-1) a + (n-1)/n B/w       B: bytes held by each device
    permute         a + B/w                     B: bytes sent by each device

(Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, ring algorithms.)
Over several levels an all-gather runs the slowest level first, on the smallest pieces, and a reduce-scatter runs it
last: what crosses the slow links is what must cross them. Each collective is a kernel, and pays a launch (`launched`).
"""

import dataclasses
import enum
import math
from collections.abc import Sequence

from autoshard.cluster import AxisLevel, DeviceType, MeshAxis


class CollectiveKind(enum.Enum):
    """The collectives that autoshard predicts, by their XLA names."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    PERMUTE = "collective-permute"


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective as priced.

    Attributes:
      kind: See `CollectiveKind`.
      axes: Names of the mesh axes it runs over.
      wire_bytes: Bytes that each device sends.
      time_s: Time for all of it.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    wire_bytes: float
    time_s: float


def _levels(axes: Sequence[MeshAxis]) -> list[AxisLevel]:
    """All levels of the axes, fastest first."""
    levels = [level for axis in axes for level in axis.levels if level.size > 1]
    return sorted(levels, key=lambda l: (-l.link.bandwidth_bytes_per_s, l.link.latency_s))


def _ring(kind: CollectiveKind, axes: Sequence[MeshAxis], whole_bytes: float, passes: int) -> Collective:
    time_s = wire_bytes = 0.0
    for level in _levels(axes):
        n, link = level.size, level.link
        sent = (n - 1) / n * whole_bytes
        time_s += passes * ((n - 1) * link.latency_s + sent / link.bandwidth_bytes_per_s)
        wire_bytes += passes * sent
        whole_bytes /= n  # the next, slower level handles only one n-th
    return Collective(kind, tuple(a.name for a in axes), wire_bytes, time_s)


def all_gather(axes: Sequence[MeshAxis], result_bytes: float) -> Collective:
    """Every device ends with `result_bytes`, the pieces of all devices along `axes`."""
    return _ring(CollectiveKind.ALL_GATHER, axes, result_bytes, 1)


def reduce_scatter(axes: Sequence[MeshAxis], partial_bytes: float) -> Collective:
    """Every device starts with a partial sum of `partial_bytes` and ends with its piece of the sum."""
    return _ring(CollectiveKind.REDUCE_SCATTER, axes, partial_bytes, 1)


def all_reduce(axes: Sequence[MeshAxis], partial_bytes: float) -> Collective:
    """Every device starts with a partial sum of `partial_bytes` and ends with the whole sum."""
    return _ring(CollectiveKind.ALL_REDUCE, axes, partial_bytes, 2)


def all_to_all(axis: MeshAxis, local_bytes: float) -> Collective:
    """Every device exchanges its `local_bytes` in equal parts with all devices along `axis`."""
    time_s = wire_bytes = 0.0
    reach = 1  # devices within reach so far
    for level in _levels([axis]):
        wider = reach * level.size
        sent = (wider - reach) / math.prod(l.size for l in axis.levels) * local_bytes
        time_s += (level.size - 1) * level.link.latency_s + sent / level.link.bandwidth_bytes_per_s
        wire_bytes += sent
        reach = wider
    return Collective(CollectiveKind.ALL_TO_ALL, (axis.name,), wire_bytes, time_s)


def permute(axes: Sequence[MeshAxis], local_bytes: float) -> Collective:
    """Every device sends its `local_bytes` to one other; the slowest link of `axes` decides."""
    slowest = _levels(axes)[-1].link
    time_s = slowest.latency_s + local_bytes / slowest.bandwidth_bytes_per_s
    return Collective(CollectiveKind.PERMUTE, tuple(a.name for a in axes), local_bytes, time_s)


def launched(collective: Collective, device: DeviceType) -> Collective:
    """The collective with the launch of its kernel on `device` added to its time."""
    return dataclasses.replace(collective, time_s=collective.time_s + device.launch_overhead_s)
