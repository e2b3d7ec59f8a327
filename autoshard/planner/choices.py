"""The choices of each group, and what each costs on one device.

A choice assigns mesh axes to factors. A factor that is reduced leaves partial results: they are summed by an
all-reduce, or by a reduce-scatter onto a dimension of the result. Two choices that give every operand and result the
same layout are one decision; the cheaper stays.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set

import numpy as np

from autoshard.cluster import LogicalMesh
from autoshard.compiler.live_ranges import LiveRanges
from autoshard.cost.collectives import Collective, all_reduce, changed, launched, permute, reduce_scatter
from autoshard.cost.compute import Work, flops_s, kernel_s, transposing_s, work_of
from autoshard.cost.reshard import inner_dims, out_of_order
from autoshard.graph.graph import Dims, Factor, FixedLayout, Graph, Operation, Value
from autoshard.graph.groups import Group, map_dims
from autoshard.graph.layout import (
    WHOLE,
    Assignment,
    Layout,
    fits,
    is_contiguous,
    layout_of,
    shard_bytes,
    spec_entries,
)
from autoshard.trace.rules.indexing import COMBINERS


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One way to run a group.

    Attributes:
      assignment: The factor that each mesh axis splits.
      scatter: For each axis that splits a reduced factor, the result dimension that its reduce-scatter leaves
        sharded; `WHOLE` for an all-reduce and for all other axes.
    """

    assignment: Assignment
    scatter: Layout


@dataclasses.dataclass(frozen=True, slots=True)
class ChoiceTable:
    """All choices of a group, with their layouts and costs; row k of everything belongs to choice k.

    Attributes:
      choices: The choices.
      reads, writes: For each access of the group, its layout under each choice.
      compute_s: [K] seconds of local computation in one run of the group. flops: [K] per device.
      collectives: The collectives of each choice (the resolution of partial results).
      partial_bytes: [K] extra memory while a partial result waits for its reduce-scatter.
    """

    choices: tuple[Choice, ...]
    reads: tuple[tuple[Layout, ...], ...]
    writes: tuple[tuple[Layout, ...], ...]
    compute_s: np.ndarray
    flops: np.ndarray
    collectives: tuple[tuple[Collective, ...], ...]
    partial_bytes: np.ndarray

    @property
    def comm_s(self) -> np.ndarray:
        """[K] seconds of collectives in one run, if each of them is waited for."""
        return np.array([sum(c.time_s for c in steps) for steps in self.collectives])


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """Operations of a group that compute alike.

    Attributes:
      own: Their factors. dtype: Of their first operand. work: What they compute.
      sides: Of matrix products, the factors of the rows, of the columns, and of what is summed.
      flops: All of them together, unsharded. count: How many operations they are.
    """

    own: tuple[int, ...]
    dtype: str
    work: Work
    sides: tuple[tuple[int, ...], ...]
    flops: float
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class GroupShape:
    """What a group's choices depend on, and nothing else: groups of equal shape share one table.

    Attributes:
      factors: The iteration space.
      reads, writes: For each access: dims, whole size in bytes, shape.
      kernels: What its operations compute.
      launches: Kernels that the compiler makes of the group.
      fetched: For each read, whether it is read whole; not so where only a part of it is touched.
      stored: For each write, whether it is written whole: it reaches memory, and is not a changed operand.
      touched: The parts that are touched of other reads and writes: dims, whole size in bytes.
      transposed: What its operations put into another order of dimensions: dims, whole size in bytes.
      is_scalar_sum: Whether the result is a scalar: XLA combines the all-reduces of scalars (norms, losses, counts)
        into one (`overlap.py` tells what each pays of it).
      is_summed_at_once: Whether XLA sums over all axes in one all-reduce where only some of them end in a
        reduce-scatter, or on several dimensions: it partitions a scatter by itself, which cannot run by shards.
    """

    factors: tuple[Factor, ...]
    reads: tuple[tuple[Dims, float, tuple[int, ...]], ...]
    writes: tuple[tuple[Dims, float, tuple[int, ...]], ...]
    kernels: tuple[Kernel, ...]
    launches: int
    fetched: tuple[bool, ...]
    stored: tuple[bool, ...]
    touched: tuple[tuple[Dims, float], ...]
    transposed: tuple[tuple[Dims, float], ...]
    is_scalar_sum: bool
    is_summed_at_once: bool


def shape_of(
    group: Group, graph: Graph, live: LiveRanges, in_memory: Set[int], pointwise: Sequence[bool]
) -> GroupShape:
    """The shape of `group`; `in_memory` are the values that are stored under some name, and `pointwise` tells of each
    operation whether it is (`pointwise_operations`).
    """
    operations = [graph.operations[o] for o in group.operations]
    describe = lambda access: (
        access.dims,
        float(graph.values[access.value].size_bytes),
        graph.values[access.value].shape,
    )
    partly_read, partly_written, touched = _partial_accesses(group, operations, graph.values, in_memory)
    return GroupShape(
        group.factors,
        tuple(map(describe, group.reads)),
        tuple(map(describe, group.writes)),
        _kernels(group, operations, graph.values),
        max(
            len({live.region[o.index] for o in operations if o.rule.flops or o.rule.is_heavy}),
            sum(o.rule.is_heavy for o in operations),
        ),
        tuple((a.value, a.operations) not in partly_read for a in group.reads),
        tuple(
            a.value not in partly_written and (a.value in live.stored or not pointwise[a.operations[0]])
            for a in group.writes
        ),
        touched,
        _transposed(group, operations, graph.values),
        all(not graph.values[a.value].shape for a in group.writes),
        any(o.name in COMBINERS for o in operations),
    )


def _partial_accesses(
    group: Group, operations: Sequence[Operation], values: Sequence[Value], in_memory: Set[int]
) -> tuple[set[tuple[int, tuple[int, ...]]], set[int], tuple[tuple[Dims, float], ...]]:
    """What the group reads in part (value, who reads it) and writes in part (value), and the parts (dims, bytes).

    An operand that is changed is changed where it is. One that is not in memory yet, such as the zeros to which the
    gradient of a look-up is added, is made there first: written whole, not read.
    """
    read, written = set(), set()
    touched: list[tuple[Dims, float]] = []
    for operation, factor_map in zip(operations, group.factor_maps, strict=True):
        part, source = operation.rule.touched, operation.operands[0] if operation.operands else None
        if part is None or source is None:
            continue
        read.add((source, (operation.index,)))
        times = 1
        if part.is_update:
            times = 2  # read and written
            if source in in_memory:
                written.add(operation.results[0])
        size_bytes = part.num_elements * values[source].itemsize_bytes
        touched.append((map_dims(part.dims, factor_map), float(times * size_bytes)))
    return read, written, tuple(touched)


def _transposed(
    group: Group, operations: Sequence[Operation], values: Sequence[Value]
) -> tuple[tuple[Dims, float], ...]:
    """The results of transpositions, but for those that only move dimensions of one element: dims, bytes."""
    found = []
    for operation, factor_map in zip(operations, group.factor_maps, strict=True):
        if operation.name == "transpose" and operation.operands[0] is not None and operation.results[0] is not None:
            size_bytes, factors = float(values[operation.results[0]].size_bytes), operation.rule.factors
            before, after = (
                [f for dim in dims for f in dim if factors[f].size > 1]
                for dims in (operation.rule.operands[0], operation.rule.results[0])
            )
            if before != after:
                found.append((map_dims(operation.rule.results[0], factor_map), size_bytes))
    return tuple(found)


def _kernels(group: Group, operations: Sequence[Operation], values: Sequence[Value]) -> tuple[Kernel, ...]:
    kernels: dict[tuple, Kernel] = {}
    for operation, factor_map in zip(operations, group.factor_maps, strict=True):
        if not operation.rule.flops:
            continue
        one = Kernel(
            tuple(sorted(set(factor_map))),
            _dtype_of(operation.operands, values),
            work_of(operation.name),
            _sides(operation, factor_map) if operation.name == "dot_general" else (),
            operation.rule.flops,
            1,
        )
        key = one.own, one.dtype, one.work, one.sides
        known = kernels.get(key)
        kernels[key] = (
            one
            if known is None
            else dataclasses.replace(one, flops=known.flops + one.flops, count=known.count + one.count)
        )
    return tuple(kernels.values())


def _sides(operation: Operation, factor_map: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The group's factors of a product's rows, of its columns, and of what it sums."""
    left, right, result = (
        {factor for factors in dims for factor in factors}
        for dims in (*operation.rule.operands[:2], operation.rule.results[0])
    )
    sides = ((left & result) - right, (right & result) - left, (left & right) - result)
    return tuple(tuple(sorted(factor_map[f] for f in side)) for side in sides)


def _dtype_of(operands: Sequence[int | None], values: Sequence[Value]) -> str:
    return next((values[o].dtype for o in operands if o is not None), "float32")


def choice_table(shape: GroupShape, mesh: LogicalMesh) -> ChoiceTable:
    """Enumerates and prices the choices of a group of this shape on `mesh`."""
    sizes = mesh.shape
    reading = tuple(dict.fromkeys(dims for dims, _, _ in shape.reads))
    writing = tuple(dict.fromkeys(dims for dims, _, _ in shape.writes))
    rows: dict[tuple, tuple[Choice, float, float, tuple[Collective, ...], float]] = {}
    for assignment, scatters in legal_choices(shape, sizes):
        reads = {dims: layout_of(dims, assignment) for dims in reading}
        local = {dims: layout_of(dims, assignment) for dims in writing}
        compute_s, flops = _compute(shape, assignment, reads, local, mesh, sizes)
        for scatter in scatters:
            choice = Choice(assignment, scatter)
            key = (*reads.values(), *(_merge(layout, scatter) for layout in local.values()))
            collectives, partial_bytes = _resolve(shape, choice, local, mesh, sizes)
            cost = compute_s + sum(c.time_s for c in collectives)
            best = rows.get(key)
            if best is None or cost < best[1] + sum(c.time_s for c in best[3]):
                rows[key] = (choice, compute_s, flops, collectives, partial_bytes)
    column = lambda k: [row[k] for row in rows.values()]
    # accesses of equal dimensions share one column
    by_dims = {dims: tuple(key[n] for key in rows) for n, dims in enumerate(reading)}
    written = {dims: tuple(key[n] for key in rows) for n, dims in enumerate(writing, len(reading))}
    return ChoiceTable(
        tuple(column(0)),
        tuple(by_dims[dims] for dims, _, _ in shape.reads),
        tuple(written[dims] for dims, _, _ in shape.writes),
        np.array(column(1)),
        np.array(column(2)),
        tuple(column(3)),
        np.array(column(4)),
    )


def _merge(layout: Layout, scatter: Layout) -> Layout:
    return tuple(s if s != WHOLE else d for d, s in zip(layout, scatter, strict=True))


def scatter_order(scatter: Layout) -> tuple[tuple[int, ...], ...]:
    """The axes that are reduce-scattered together, since onto one dimension, in the order in which this happens: inner
    axes, whose links are faster, first, so that the slower ones carry less.
    """
    together: dict[int, list[int]] = {}
    for a, d in enumerate(scatter):
        if d != WHOLE:
            together.setdefault(d, []).append(a)
    return tuple(tuple(axes) for axes in sorted(together.values(), key=lambda axes: -axes[-1]))


def legal_choices(shape: GroupShape, sizes: tuple[int, ...]) -> Iterator[tuple[Assignment, list[Layout]]]:
    """All assignments that split every factor evenly and keep every piece contiguous, with their resolutions."""
    factor_sizes = tuple(f.size for f in shape.factors)
    accesses = tuple(dict.fromkeys(dims for dims, _, _ in (*shape.reads, *shape.writes)))
    several = [dims for dims in accesses if any(len(factors) > 1 for factors in dims)]
    present = {f for dims in accesses for fs in dims for f in fs}
    # a factor of one access only (no other access ties it) still helps memory and reduces work: keep all
    candidates = [WHOLE, *(f for f in range(len(shape.factors)) if factor_sizes[f] > 1 and f in present)]
    results = {dims for dims, _, _ in shape.writes}
    for assignment in _even_assignments(candidates, factor_sizes, sizes):
        if not all(is_contiguous(dims, assignment, factor_sizes, sizes) for dims in several):
            continue
        reduced = [a for a, f in enumerate(assignment) if f != WHOLE and shape.factors[f].reduction is not None]
        options: list[tuple[int, ...]] = [(WHOLE,)] * len(sizes)
        if reduced and len(results) == 1:
            dims, _, extents = shape.writes[-1]
            for a in reduced:
                if shape.factors[assignment[a]].reduction == "add":
                    options[a] = (WHOLE, *range(len(extents)))
        scatters = list(itertools.product(*options))
        if len(scatters) > 1:
            dims, _, extents = shape.writes[-1]
            local = layout_of(dims, assignment)
            scatters = [s for s in scatters if fits(_merge(local, s), extents, sizes)]
        yield assignment, scatters


def _even_assignments(
    candidates: Sequence[int], factor_sizes: Sequence[int], sizes: Sequence[int]
) -> Iterator[Assignment]:
    """A candidate for each mesh axis, in all ways in which the axes on every factor divide it."""
    left = [((), dict(enumerate(factor_sizes)))]
    for size in sizes:
        left = [
            ((*chosen, f), room if f == WHOLE else {**room, f: room[f] // size})
            for chosen, room in left
            for f in candidates
            if f == WHOLE or room[f] % size == 0
        ]
    return (chosen for chosen, _ in left)


def _compute(
    shape: GroupShape,
    assignment: Assignment,
    reads: Mapping[Dims, Layout],
    local: Mapping[Dims, Layout],
    mesh: LogicalMesh,
    sizes: tuple[int, ...],
) -> tuple[float, float]:
    """Seconds and flops of one run on one device; `reads` and `local` are layouts before any reduction, by dims."""
    turned_s = sum(
        transposing_s(mesh.device_type, shard_bytes(size_bytes, layout_of(dims, assignment), sizes))
        for dims, size_bytes in shape.transposed
    )
    if not shape.kernels and shape.launches == 0:
        return turned_s, 0.0
    total_flops = arithmetic_s = 0.0
    for kernel in shape.kernels:
        here = kernel.flops / math.prod(n for n, f in zip(sizes, assignment, strict=True) if f in kernel.own)
        total_flops += here
        least = _least_dim(shape.factors, kernel.sides, assignment, sizes)
        arithmetic_s += flops_s(mesh.device_type, here, kernel.dtype, kernel.work, kernel.count, least)
    parts = {dims: shard_bytes(1.0, layout, sizes) for dims, layout in (*reads.items(), *local.items())}
    moved = sum(
        size_bytes * parts[dims]
        for (dims, size_bytes, _), is_fetched in zip(shape.reads, shape.fetched, strict=True)
        if is_fetched
    )
    moved += sum(shard_bytes(size_bytes, layout_of(dims, assignment), sizes) for dims, size_bytes in shape.touched)
    for (dims, size_bytes, _), is_stored in zip(shape.writes, shape.stored, strict=True):
        if is_stored:
            moved += size_bytes * parts[dims]
    return turned_s + kernel_s(mesh.device_type, arithmetic_s, moved, shape.launches), total_flops


def _least_dim(
    factors: Sequence[Factor], sides: tuple[tuple[int, ...], ...], assignment: Assignment, sizes: tuple[int, ...]
) -> float:
    """The least dimension of a product on one device; infinite for other work."""
    return min(
        (
            math.prod(factors[f].size for f in side)
            / math.prod(n for n, f in zip(sizes, assignment, strict=True) if f in side)
            for side in sides
        ),
        default=math.inf,
    )


def _resolve(
    shape: GroupShape, choice: Choice, local: Mapping[Dims, Layout], mesh: LogicalMesh, sizes: tuple[int, ...]
) -> tuple[tuple[Collective, ...], float]:
    """The collectives that sum partial results, and the bytes of the partial result before a reduce-scatter."""
    summed = [
        a
        for a, f in enumerate(choice.assignment)
        if f != WHOLE and sizes[a] > 1 and shape.factors[f].reduction is not None
    ]
    if not summed:
        return (), 0.0
    steps: list[Collective] = []
    extra_bytes = 0.0
    scattered = [a for a in summed if choice.scatter[a] != WHOLE]
    reduced = [a for a in summed if choice.scatter[a] == WHOLE]
    # several writes of equal dimensions are the terms of one sum, reduced once, as the last of them
    results = shape.writes[-1:] if len(local) == 1 else shape.writes
    for dims, size_bytes, extents in results:
        left_bytes = shard_bytes(size_bytes, local[dims], sizes)
        if scattered:
            extra_bytes += left_bytes
        together = [axes for axes in ([a for a in s if sizes[a] > 1] for s in scatter_order(choice.scatter)) if axes]
        if shape.is_summed_at_once and len(together) + bool(reduced) > 1:
            steps.append(all_reduce([mesh.axes[a] for a in summed], left_bytes))
            left_bytes /= math.prod(sizes[a] for a in scattered)
        else:
            for axes in together:
                is_inner = inner_dims(extents)[choice.scatter[axes[0]]]
                steps.append(reduce_scatter([mesh.axes[a] for a in axes], left_bytes, is_inner))
                left_bytes /= math.prod(sizes[a] for a in axes)
            if reduced:
                steps.append(all_reduce([mesh.axes[a] for a in reduced], left_bytes))
        split = [a for a, n in enumerate(sizes) if n > 1]
        if shifted := out_of_order(local[dims], _merge(local[dims], choice.scatter), split):
            steps.append(permute([mesh.axes[a] for a in shifted], left_bytes))
    if shape.is_scalar_sum:
        slowest = mesh.axes[summed[0]].levels[-1].link.bandwidth_bytes_per_s
        at_pace = lambda c: dataclasses.replace(c, time_s=c.fixed_s + c.wire_bytes / slowest, separate_s=0.0)
        steps = [changed(c, at_pace) for c in steps]
    return tuple(launched(c, mesh.device_type) for c in steps), extra_bytes


def satisfies(layout: Layout, fixed: FixedLayout, axis_names: Sequence[str]) -> bool:
    """Whether `layout` shards every dimension that `fixed` constrains exactly as it demands."""
    entries = spec_entries(layout, len(fixed), axis_names)
    return all(want is None or set(want) == set(have) for want, have in zip(fixed, entries, strict=True))
