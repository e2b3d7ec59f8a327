"""Layouts: which dimension of a tensor each mesh axis shards.

A layout over a mesh of A axes is a tuple of A entries: `layout[a]` is the dimension that axis a shards, or `WHOLE` if
every device along that axis holds the same piece. Axes that share a dimension split it in mesh order, the earlier axis
being the major one. That makes a layout a normal form of a PartitionSpec.

Invariant: the product of the axis sizes on a dimension divides its extent.
"""

import math
from collections.abc import Mapping, Sequence

from autoshard.graph.graph import Dims

WHOLE = -1

Layout = tuple[int, ...]
Assignment = tuple[int, ...]
"""For each mesh axis, the factor of an operation that it splits, or `WHOLE`."""
SpecEntries = tuple[tuple[str, ...], ...]
"""For each dimension of a tensor, the mesh axes that shard it, major to minor: the entries of a PartitionSpec."""


def shard_bytes(size_bytes: float, layout: Layout, axis_sizes: Sequence[int]) -> float:
    """Bytes of one device's piece of a tensor of `size_bytes` in `layout`."""
    return size_bytes / math.prod(n for n, d in zip(axis_sizes, layout, strict=True) if d != WHOLE)


def spec_shard_bytes(size_bytes: float, entries: SpecEntries, axis_sizes: Mapping[str, int]) -> float:
    """Bytes of one device's piece of a tensor of `size_bytes` that lies as `entries` say."""
    return size_bytes / math.prod(axis_sizes[axis] for axes in entries for axis in axes)


def layout_of(dims: Dims, assignment: Assignment) -> Layout:
    """The layout that splitting factors by `assignment` gives to a tensor whose dimensions are `dims`."""
    home = {f: d for d, factors in enumerate(dims) for f in factors}
    return tuple(home.get(f, WHOLE) for f in assignment)


def is_contiguous(dims: Dims, assignment: Assignment, factor_sizes: Sequence[int], axis_sizes: Sequence[int]) -> bool:
    """Whether each device's piece under `assignment` is one block of every dimension.

    Where a dimension is made of several factors (major to minor), a minor factor may be split only if every factor
    before it is split completely, by earlier mesh axes.
    """
    for factors in dims:
        if len(factors) < 2:
            continue
        last_axis, complete = -1, True
        for f in factors:
            axes = [a for a, g in enumerate(assignment) if g == f]
            if axes and (not complete or axes[0] < last_axis):
                return False
            complete = complete and math.prod(axis_sizes[a] for a in axes) == factor_sizes[f]
            last_axis = axes[-1] if axes else last_axis
    return True


def spec_entries(layout: Layout, rank: int, axis_names: Sequence[str]) -> SpecEntries:
    """The layout as axis names for each of `rank` dimensions, major to minor: the entries of a PartitionSpec."""
    return tuple(tuple(axis_names[a] for a, d in enumerate(layout) if d == dim) for dim in range(rank))


def is_slice(entries: SpecEntries, wanted: SpecEntries) -> bool:
    """Whether what a device holds in the layout `wanted` is part of what it holds in the layout `entries`."""
    return all(of[: len(own)] == own for own, of in zip(entries, wanted, strict=True))


def all_layouts(shape: Sequence[int], axis_sizes: Sequence[int]) -> tuple[Layout, ...]:
    """Every legal layout of a tensor of `shape`, the wholly replicated one first."""
    layouts: list[Layout] = [()]
    for _ in axis_sizes:
        layouts = [(*l, d) for l in layouts for d in (WHOLE, *range(len(shape)))]
    return tuple(l for l in layouts if fits(l, shape, axis_sizes))


def fits(layout: Layout, shape: Sequence[int], axis_sizes: Sequence[int]) -> bool:
    """Whether the axes on every dimension divide it."""
    left = list(shape)
    for size, dim in zip(axis_sizes, layout, strict=True):
        if dim != WHOLE:
            left[dim], rest = divmod(left[dim], size)
            if rest:
                return False
    return True


def is_gather(source: Layout, target: Layout) -> bool:
    """Whether a move from `source` to `target` gathers along some axis: its result is larger than what it came from."""
    return any(s != WHOLE and t == WHOLE for s, t in zip(source, target, strict=True))


def is_sent(source: Layout, target: Layout) -> bool:
    """Whether a move from `source` to `target` takes a collective: it is not a slice alone."""
    return any(s not in (WHOLE, t) for s, t in zip(source, target, strict=True))
