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

At the slowest level, between nodes behind switches, a sum may run through two binary trees in place of a ring, and does
where that is faster, as for small tensors among many nodes:

    all-reduce, in trees    2 ceil(log2 n) 2 a + 2 B/(0.9 w)

(Sanders, Speck, Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009: each half of the
data goes up one tree and down again, so that a device in the middle sends 2 B; on average all send what they send in a
ring. NCCL, src/graph/tuning.cc: `log2i(nNodes)` hops each way, of twice the latency of a ring's in each protocol, and
0.9 of the bandwidth.) NCCL has no trees for other kinds.

Levels that are axes of a torus work at once and count as one (`torus.py`).

Where a link has measured figures for a kind of collective and a number of devices (`Link.figures`), these are its a and
w, so that the formula gives the measured time, by whatever algorithm; it stays linear in B. Levels of one such link
count as one level, since what was measured is a group of devices, and not a hierarchy of groups.

Gathered or scattered along a dimension that others are in front of, pieces are no whole blocks of memory: compilers put
that dimension outermost for the collective, and back afterwards. Where a link's figures say how fast that is
(`inner_bytes_per_s`), B over it is added. An all-to-all always has such a dimension.

The compiler joins small collectives that do not wait for each other, such as those of gradients, into large ones; each
then pays its share of what is paid once (`joined`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from autoshard.cluster import AxisLevel, CollectiveKind, DeviceType, MeasuredCollective, MeshAxis
from autoshard.cluster.room import within_room
from autoshard.cluster.wiring import joined_parts
from autoshard.cost.compute import kernel_s
from autoshard.cost.torus import as_one_ring, exchanged_s_per_byte, is_torus


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective as priced.

    Attributes:
      kind: See `CollectiveKind`.
      axes: Names of the mesh axes it runs over.
      wire_bytes: Bytes that each device sends.
      time_s: Time for all of it.
      fixed_s: The part of it that does not grow with the bytes: latencies and launches.
      buffer_bytes: Size of its larger side on one device, input or result.
      separate_s: The part of `fixed_s` that it pays even where the compiler could join it with others.
      slower: The same by another algorithm, which takes longer as it is, but may not where others share `fixed_s`.
      count: How many collectives it stands for.
      beside_s: The time that they take beside the pieces of their own product, on top of `time_s` (`in_pieces.py`);
        None for collectives that are no transfers of such pieces.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    wire_bytes: float
    time_s: float
    fixed_s: float
    buffer_bytes: float
    separate_s: float = 0.0
    slower: "Collective | None" = None
    count: int = 1
    beside_s: float | None = None


_TREE_HOPS, _TREE_BANDWIDTH = 2.0, 0.9
"""Latency of a hop in a tree and bandwidth there, as shares of a ring's. Source: NCCL, `hwLat` and `busBw` in
src/graph/tuning.cc (between nodes LL 5.0 against 2.7 us, LL128 8.5 against 4.0, Simple 28 against 14; `busBw * .9`).
"""

COMBINED_BYTES = 30 * 2**20
"""Up to this size XLA joins independent collectives of one kind over the same devices.

Source: OpenXLA, `xla_gpu_all_reduce_combine_threshold_bytes` and its siblings for all-gather and reduce-scatter in
xla/debug_options_flags.cc, default 30 MiB.
"""
MOST_JOINED = 256
"""Most collectives that XLA joins into one.

Source: OpenXLA, `combine_threshold_count` of the combiner passes in xla/service/gpu/gpu_compiler.cc.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Joining:
    """What the compiler joins of collectives of one kind.

    Attributes:
      number: How many it can join. up_to_bytes: The size up to which it joins them.
    """

    number: int
    up_to_bytes: float = COMBINED_BYTES


def sent_share(kind: CollectiveKind, num_devices: int) -> float:
    """Bytes that each of a group of devices on one level sends, for each byte of the larger side on one device."""
    if kind is CollectiveKind.PERMUTE:
        return 1.0
    passes = 2 if kind is CollectiveKind.ALL_REDUCE else 1
    return passes * (num_devices - 1) / num_devices


def rings(axes: Sequence[MeshAxis]) -> list[AxisLevel]:
    """All levels of the axes as rings, fastest first; those of one measured link as one, and those of a torus."""
    levels = _levels(axes)
    torus = [level for level in levels if is_torus(level)]
    if len(torus) > 1:
        levels = [as_one_ring(torus), *(level for level in levels if not is_torus(level))]
    return _measured_as_one(levels)


def _levels(axes: Sequence[MeshAxis]) -> list[AxisLevel]:
    """All levels of the axes, parts of one axis of a torus together, and none with more peers than there are."""
    return within_room(joined_parts([level for axis in axes for level in axis.levels if level.size > 1]))


def _measured_as_one(levels: list[AxisLevel]) -> list[AxisLevel]:
    """Levels, fastest first; those of one measured link as one."""
    levels.sort(key=lambda l: (-l.link.bandwidth_bytes_per_s, l.link.latency_s))
    merged: list[AxisLevel] = []
    for level in levels:
        if merged and level.link.collectives and merged[-1].link == level.link:
            merged[-1] = AxisLevel(merged[-1].size * level.size, level.link)
        else:
            merged.append(level)
    return merged


@functools.lru_cache(maxsize=4096)
def _rings_with_figures(
    kind: CollectiveKind, axes: tuple[MeshAxis, ...]
) -> tuple[tuple[AxisLevel, MeasuredCollective], ...]:
    """`rings`, each with what this kind of collective takes there."""
    return tuple((level, level.link.figures(kind, level.size)) for level in rings(axes))


def _ring(
    kind: CollectiveKind, axes: Sequence[MeshAxis], whole_bytes: float, passes: int, is_inner: bool = False
) -> Collective:
    fixed_s = sending_s = separate_s = wire_bytes = 0.0
    buffer_bytes = whole_bytes
    for level, figures in _rings_with_figures(kind, tuple(axes)):
        n = level.size
        if is_inner and figures.inner_bytes_per_s is not None:
            sending_s += whole_bytes / figures.inner_bytes_per_s
        sent = sent_share(kind, n) * whole_bytes
        hops_s = passes * (n - 1) * figures.latency_s
        fixed_s += hops_s
        separate_s += hops_s * figures.separate_share
        sending_s += sent / figures.bandwidth_bytes_per_s
        wire_bytes += sent
        whole_bytes /= n  # the next, slower level handles only one n-th
    names = tuple(a.name for a in axes)
    return Collective(kind, names, wire_bytes, fixed_s + sending_s, fixed_s, buffer_bytes, separate_s)


def all_gather(axes: Sequence[MeshAxis], result_bytes: float, is_inner: bool = False) -> Collective:
    """Every device ends with `result_bytes`, the pieces of all devices along `axes`.

    Args:
      is_inner: Whether other dimensions are in front of the one that is gathered.
    """
    return _ring(CollectiveKind.ALL_GATHER, axes, result_bytes, 1, is_inner)


def reduce_scatter(axes: Sequence[MeshAxis], partial_bytes: float, is_inner: bool = False) -> Collective:
    """Every device starts with a partial sum of `partial_bytes` and ends with its piece of the sum.

    Args:
      is_inner: Whether other dimensions are in front of the one that is scattered.
    """
    return _ring(CollectiveKind.REDUCE_SCATTER, axes, partial_bytes, 1, is_inner)


def all_reduce(axes: Sequence[MeshAxis], partial_bytes: float) -> Collective:
    """Every device starts with a partial sum of `partial_bytes` and ends with the whole sum."""
    ring = _ring(CollectiveKind.ALL_REDUCE, axes, partial_bytes, 2)
    levels = [level for level, _ in _rings_with_figures(CollectiveKind.ALL_REDUCE, tuple(axes))]
    if not levels or not _has_trees(levels[-1]):
        return ring
    slowest, link = levels[-1].size, levels[-1].link
    inside = partial_bytes / math.prod(level.size for level in levels[:-1])
    hops_s = 2 * (math.ceil(math.log2(slowest)) * _TREE_HOPS - (slowest - 1)) * link.latency_s
    sent = inside * (1 / _TREE_BANDWIDTH - (slowest - 1) / slowest)
    time_s = ring.time_s + hops_s + 2 * sent / link.bandwidth_bytes_per_s
    return _by_time(ring, dataclasses.replace(ring, time_s=time_s, fixed_s=ring.fixed_s + hops_s))


def _has_trees(level: AxisLevel) -> bool:
    link = level.link
    return link.level > 0 and not link.collectives and not is_torus(level)


def _by_time(*algorithms: Collective) -> Collective:
    """The fastest of the same collective by one or two algorithms."""
    fastest = min(algorithms, key=lambda c: c.time_s)
    others = [c for c in algorithms if c is not fastest]
    return dataclasses.replace(fastest, slower=dataclasses.replace(others[0], slower=None) if others else None)


def changed(collective: Collective, change: Callable[[Collective], Collective]) -> Collective:
    """The collective by that of its algorithms that is the fastest after a change of its times."""
    if collective.slower is None:
        return change(collective)
    return _by_time(change(collective), change(collective.slower))


def all_to_all(axes: Sequence[MeshAxis], local_bytes: float) -> Collective:
    """Every device exchanges its `local_bytes` in equal parts with all devices along `axes`."""
    fixed_s = sending_s = separate_s = wire_bytes = 0.0
    reach, all_devices = 1, math.prod(axis.size for axis in axes)  # devices within reach so far, and in the end
    levels = _levels(axes)
    for level, figures in _rings_with_figures(CollectiveKind.ALL_TO_ALL, tuple(axes)):
        wider = reach * level.size
        sent = (wider - reach) / all_devices * local_bytes
        hops_s = (level.size - 1) * figures.latency_s
        fixed_s += hops_s
        separate_s += hops_s * figures.separate_share
        if is_torus(level):
            sending_s += wider / all_devices * local_bytes * exchanged_s_per_byte(list(filter(is_torus, levels)))
        else:
            sending_s += sent / figures.bandwidth_bytes_per_s
        if figures.inner_bytes_per_s is not None:
            sending_s += local_bytes / figures.inner_bytes_per_s
        wire_bytes += sent
        reach = wider
    kind, time_s, names = CollectiveKind.ALL_TO_ALL, fixed_s + sending_s, tuple(a.name for a in axes)
    return Collective(kind, names, wire_bytes, time_s, fixed_s, local_bytes, separate_s)


def permute(axes: Sequence[MeshAxis], local_bytes: float) -> Collective:
    """Every device sends its `local_bytes` to one other; the slowest link of `axes` decides."""
    slowest = _measured_as_one(_levels(axes))[-1]
    figures = slowest.link.figures(CollectiveKind.PERMUTE, slowest.size)
    names, fixed_s = tuple(a.name for a in axes), figures.latency_s
    time_s, separate_s = fixed_s + local_bytes / figures.bandwidth_bytes_per_s, fixed_s * figures.separate_share
    return Collective(CollectiveKind.PERMUTE, names, local_bytes, time_s, fixed_s, local_bytes, separate_s)


def launched(collective: Collective, device: DeviceType) -> Collective:
    """The collective with the launch of its kernel on `device` added to its time."""
    return changed(collective, lambda c: with_fixed(c, c.fixed_s + device.launch_overhead_s))


def ordered(collective: Collective, device: DeviceType) -> Collective:
    """The collective with the kernel of a GPU that puts what it gathers, or is to scatter, in order: `needs_order`."""
    if not device.is_gpu or device.measured is not None:
        return collective
    launch_s = device.launch_overhead_s
    moving_s = kernel_s(device, 0.0, 2 * collective.buffer_bytes, 1) - launch_s
    slower = lambda c: dataclasses.replace(c, time_s=c.time_s + moving_s)
    return changed(collective, lambda c: with_fixed(slower(c), c.fixed_s + launch_s))


def needs_order(local_shape: Sequence[int], dim: int) -> bool:
    """Whether what is gathered or to be scattered along `dim` is in another order in memory than kernels need it in.

    XLA:GPU has a collective run along the outermost dimension in memory. Of a matrix either may be this, as products
    take both; of more dimensions, those in front of `dim` are put there by a kernel of its own, which reads and writes
    all (seen in programs compiled for H100s: weights of heads by features by width of a head).

    Args:
      local_shape: Of the larger side, on one device.
    """
    several = [d for d, extent in enumerate(local_shape) if extent > 1]
    return len(several) > 2 and dim > several[0]


def with_fixed(collective: Collective, fixed_s: float) -> Collective:
    """The collective, by the same algorithm, with other latencies and launches."""
    return dataclasses.replace(collective, time_s=collective.time_s - collective.fixed_s + fixed_s, fixed_s=fixed_s)


def joined_share(buffer_bytes: np.ndarray | float, joining: Joining) -> np.ndarray:
    """The share of its latencies and launch that a collective of `buffer_bytes` pays where the compiler joins it with
    others; for each of several as an array.
    """
    return np.minimum(1.0, np.maximum(buffer_bytes / joining.up_to_bytes, 1 / joining.number))


def joined(collective: Collective, joining: Joining) -> Collective:
    """The collective as one of those that the compiler joins; see `joined_share`."""
    share = float(joined_share(collective.buffer_bytes, joining))
    return changed(collective, lambda c: with_fixed(c, c.separate_s + (c.fixed_s - c.separate_s) * share))
