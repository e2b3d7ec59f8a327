"""Moving a tensor from one layout to another: the steps, and the collectives that XLA emits for them.

XLA is good at one thing at a time; asked for several at once it may fall back to replicating the tensor ("involuntary
full rematerialization"). So a move is planned, priced and executed as a path of simple steps, each on the least bytes:

  1. axes that newly shard a dimension: every device keeps its slice, nothing moves (later, if it does not divide yet);
  2. axes that leave one dimension for another: an all-to-all for each such pair of dimensions, over all axes that go
     the same way at once, as if they were one axis;
  3. axes that no longer shard anything: an all-gather for each dimension that they leave, the major axes first,
     since these have the slower links (asked for all at once, XLA goes by dimension and may leave the slowest last);
  4. pieces in the wrong order, because an axis joins or leaves a dimension in front of one that stays:
     a collective-permute, within the step that causes it. Axes that can only change places all at once
     are one collective-permute too, where every dimension keeps its number of parts.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

from autoshard.cluster import CollectiveKind, LogicalMesh
from autoshard.cost.collectives import Collective, all_gather, all_to_all, launched, needs_order, ordered, permute
from autoshard.graph.layout import WHOLE, Layout, fits, shard_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step of a path: from layout `before` to `after`, by changing `axes` (mesh axis indices)."""

    before: Layout
    after: Layout
    axes: tuple[int, ...]


def _changed(layout: Layout, axes: Sequence[int], target: Layout) -> Layout:
    return tuple(target[a] if a in axes else d for a, d in enumerate(layout))


def path(shape: Sequence[int], source: Layout, target: Layout, axis_sizes: Sequence[int]) -> tuple[Step, ...]:
    """The steps from `source` to `target` of a tensor of `shape`; empty if they are equal.

    Axes that cannot change one after another, because an intermediate layout would not divide the tensor, change last
    and together.
    """
    pairs = list(enumerate(zip(source, target, strict=True)))
    slices = [a for a, (s, t) in pairs if s == WHOLE and t != WHOLE]
    moves = [a for a, (s, t) in pairs if s != t and WHOLE not in (s, t)]
    gathers = [a for a, (s, t) in pairs if s != WHOLE and t == WHOLE]
    stages = [alike for kind in (slices, moves, gathers) for alike in _alike(kind, source, target)]
    steps: list[Step] = []
    now, waiting = source, stages
    while waiting:
        ready = next((s for s in waiting if fits(_changed(now, s, target), shape, axis_sizes)), None)
        if ready is None:
            ready = sorted(a for s in waiting for a in s)
            waiting = [ready]
        after = _changed(now, ready, target)
        steps.append(Step(now, after, tuple(ready)))
        now, waiting = after, [s for s in waiting if s is not ready]
    return tuple(_join_slices(steps))


def _alike(axes: Sequence[int], source: Layout, target: Layout) -> list[list[int]]:
    """`axes` by the dimensions that they leave and join; slower links come first, as in the mesh."""
    alike: dict[tuple[int, int], list[int]] = {}
    for a in axes:
        alike.setdefault((source[a], target[a]), []).append(a)
    return list(alike.values())


def waypoints(step: Step, rank: int, axis_sizes: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The layouts that a step passes through, the last one included: for each dimension its mesh axes, major to minor.

    Pieces change places by themselves, before a larger axis leaves a dimension and after it joins one, so that
    everything else goes along the axes of the step. Asked for both at once, XLA may go along parts of other axes.
    """
    split = [a for a, n in enumerate(axis_sizes) if n > 1]
    natural = lambda layout: tuple(tuple(a for a in split if layout[a] == d) for d in range(rank))
    ends = natural(step.before), natural(step.after)
    moved = [a for a in step.axes if WHOLE not in (step.before[a], step.after[a])]
    if len(_alike(moved, step.before, step.after)) > 1:  # together, as one permutation
        return (ends[1],)
    stays = [[a for a in before if a in after] for before, after in zip(*ends, strict=True)]
    leaving, joined = (
        tuple((*kept, *(a for a in axes if a not in kept)) for kept, axes in zip(stays, end, strict=True))
        for end in ends
    )
    way = [leaving] if leaving != ends[0] else []
    if joined not in (ends[1], way[-1] if way else ends[0]):
        way.append(joined)
    return (*way, ends[1])


def _join_slices(steps: list[Step]) -> list[Step]:
    """Successive slices are one step."""
    joined: list[Step] = []
    is_slice = lambda s: all(s.before[a] == WHOLE for a in s.axes)
    for step in steps:
        if joined and is_slice(step) and is_slice(joined[-1]):
            joined[-1] = Step(joined[-1].before, step.after, (*joined[-1].axes, *step.axes))
        else:
            joined.append(step)
    return joined


def out_of_order(before: Layout, after: Layout, axes: Sequence[int]) -> list[int]:
    """Those of `axes` that stay on their dimension but whose major neighbours there change, and those neighbours: along
    all of these, pieces change places.
    """
    shifted: set[int] = set()
    for a in axes:
        if before[a] != after[a] or before[a] == WHOLE:
            continue
        earlier = [b for b in axes if b < a]
        changed = [b for b in earlier if (before[b] == before[a]) != (after[b] == after[a])]
        if changed:
            shifted.update((a, *changed))
    return sorted(shifted)


def _parts(layout: Layout, axis_sizes: Sequence[int]) -> dict[int, int]:
    """Into how many parts each sharded dimension is split."""
    return {d: math.prod(n for n, e in zip(axis_sizes, layout, strict=True) if e == d) for d in layout if d != WHOLE}


@functools.lru_cache(maxsize=4096)
def inner_dims(shape: tuple[int, ...]) -> tuple[bool, ...]:
    """For each dimension, whether others of more than one element are in front of it."""
    return tuple(math.prod(shape[:d]) > 1 for d in range(len(shape)))


@functools.lru_cache(maxsize=4096)
def ordered_dims(shape: tuple[int, ...], layout: Layout, axis_sizes: tuple[int, ...]) -> tuple[bool, ...]:
    """For each dimension of a tensor, whether what is gathered along it into `layout` must be put in order."""
    ways = _parts(layout, axis_sizes)
    local = [extent // ways.get(d, 1) for d, extent in enumerate(shape)]
    return tuple(needs_order(local, d) for d in range(len(shape)))


def _price(
    step: Step, size_bytes: float, mesh: LogicalMesh, is_inner: Sequence[bool], is_ordered: Sequence[bool]
) -> list[Collective]:
    sizes = mesh.shape
    collectives: list[Collective] = []
    split = [a for a, n in enumerate(sizes) if n > 1]  # an axis of one device moves nothing
    moved = [a for a in split if a in step.axes and WHOLE not in (step.before[a], step.after[a])]
    gathered = [a for a in split if step.before[a] != WHOLE and step.after[a] == WHOLE]
    smallest_bytes = min(shard_bytes(size_bytes, step.before, sizes), shard_bytes(size_bytes, step.after, sizes))
    shifted = out_of_order(step.before, step.after, split)
    if len(moved) > 1 and _parts(step.before, sizes) == _parts(step.after, sizes):  # whole pieces change places
        axes = sorted({*moved, *shifted})
        return [launched(permute([mesh.axes[a] for a in axes], smallest_bytes), mesh.device_type)]
    for axes in _alike(moved, step.before, step.after):
        collectives.append(all_to_all([mesh.axes[a] for a in axes], smallest_bytes))
    if shifted:
        collectives.append(permute([mesh.axes[a] for a in shifted], smallest_bytes))
    if gathered:
        axes, result_bytes = [mesh.axes[a] for a in gathered], shard_bytes(size_bytes, step.after, sizes)
        gather = all_gather(axes, result_bytes, any(is_inner[step.before[a]] for a in gathered))
        collectives.append(
            ordered(gather, mesh.device_type) if any(is_ordered[step.before[a]] for a in gathered) else gather
        )
    return [launched(c, mesh.device_type) for c in collectives]


def reshard(
    shape: tuple[int, ...],
    size_bytes: float,
    source: Layout,
    target: Layout,
    mesh: LogicalMesh,
    is_inner: Sequence[bool] | None = None,
    is_ordered: Sequence[bool] | None = None,
) -> tuple[Collective, ...]:
    """The collectives that turn a tensor of `shape` and `size_bytes` (whole) from layout `source` into `target`.

    `is_inner` is `inner_dims` of the tensor, `is_ordered` its `ordered_dims` as it arrives, if `shape` does not tell.
    """
    if source == target:
        return ()
    is_inner = inner_dims(shape) if is_inner is None else is_inner
    is_ordered = ordered_dims(shape, target, mesh.shape) if is_ordered is None else is_ordered
    priced: list[Collective] = []
    for step in path(shape, source, target, mesh.shape):
        steps = _price(step, size_bytes, mesh, is_inner, is_ordered)
        priced += steps
        if any(c.kind is CollectiveKind.ALL_GATHER for c in steps):
            is_ordered = (True,) * len(is_ordered)  # what is gathered along one dimension, and then along another
    return tuple(priced)


def total_s(collectives: Iterable[Collective]) -> float:
    """Time of collectives that run one after another."""
    return sum(c.time_s for c in collectives)
