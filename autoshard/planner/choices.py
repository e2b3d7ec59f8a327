"""The choices of each group, and what each costs on one device.

A choice assigns mesh axes to factors. A factor that is reduced leaves partial results: they are summed by an
all-reduce, or by a reduce-scatter onto a dimension of the result. Two choices that give every operand and result the
same layout are one decision; the cheaper stays.

Of a look-up, an axis may also be *exchanged*: it splits both the ids and the rows of the table, and the devices along
it send each other ids and rows (`cost/lookups.py`), so that no partial results are left. And a matrix product may run
in *pieces*, beside the transfers of what it gathers or scatters along an axis (`in_pieces.py`).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autoshard.cluster import LogicalMesh
from autoshard.compiler.two_stage_sums import FIRST_ROWS, is_in_stages
from autoshard.cost.collectives import Collective, launched
from autoshard.cost.compute import COLUMN_ROWS, MOST_ROWS, columns_s, flops_s, kernel_s, transposing_s, unaligned_factor
from autoshard.cost.in_pieces import InPieces
from autoshard.cost.lookups import MOST_KEYS, Exchange, Lookups, exchange_of, scattered
from autoshard.cost.reshard import inner_dims, ordered_dims, out_of_order
from autoshard.graph.graph import PLACES, Dims, Factor, FixedLayout, LookUp
from autoshard.graph.groups import Group
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
from autoshard.planner.group_shapes import GroupShape, Kernel, RegionCollective, RegionKernels, RegionWork, Table
from autoshard.planner.in_pieces import Pieces, price, product_of, ways_in_pieces
from autoshard.planner.region_collectives import region_collective
from autoshard.planner.sum_prices import SumPrices


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One way to run a group.

    Attributes:
      assignment: The factor that each mesh axis splits.
      scatter: For each axis that splits a reduced factor, the result dimension that its reduce-scatter leaves
        sharded; `WHOLE` for an all-reduce and for all other axes.
      exchanged: The axes, of those that split ids, that split the rows of the table too.
      pieces: Of a matrix product that runs in pieces; None for any other.
    """

    assignment: Assignment
    scatter: Layout
    exchanged: tuple[int, ...] = ()
    pieces: Pieces | None = None

    def layout_of(self, dims: Dims, look_up: LookUp | None) -> Layout:
        """The layout before any reduction of a tensor whose dimensions are `dims`; `look_up` is the group's."""
        layout = _layout(dims, self.assignment, self.exchanged, look_up)
        return layout if self.pieces is None else self.pieces.layout_of(dims, layout)


@dataclasses.dataclass(frozen=True)
class ChoiceTable:
    """All choices of a group, with their layouts and costs; row k of everything belongs to choice k.

    Attributes:
      choices: The choices.
      reads, writes: For each access of the group, its layout under each choice.
      compute_s: [K] seconds of local computation in one run of the group. flops: [K] per device.
      collectives: The collectives of each choice (the resolution of partial results).
      partial_bytes: [K] extra memory while a partial result waits for its reduce-scatter.
      workspace_bytes: [K] extra memory while it runs: ids and rows that are exchanged, or what a region holds inside.
      exchanges: What each choice exchanges; None for no look-up, or one that exchanges nothing.
      inside: What a region takes, under every choice; None for anything else.
    """

    choices: tuple[Choice, ...]
    reads: tuple[tuple[Layout, ...], ...]
    writes: tuple[tuple[Layout, ...], ...]
    compute_s: np.ndarray
    flops: np.ndarray
    collectives: tuple[tuple[Collective, ...], ...]
    partial_bytes: np.ndarray
    workspace_bytes: np.ndarray
    exchanges: tuple[Exchange | None, ...]
    inside: "RegionCosts | None"

    @property
    def comm_s(self) -> np.ndarray:
        """[K] seconds of collectives in one run, if each of them is waited for."""
        return np.array([sum(c.time_s for c in steps) for steps in self.collectives])

    @functools.cached_property
    def distinct_collectives(self) -> tuple[tuple[tuple[Collective, ...], ...], np.ndarray]:
        """What there is in `collectives`, each once, and [K] which of it a choice has."""
        number = {steps: n for n, steps in enumerate(dict.fromkeys(self.collectives))}
        return tuple(number), np.array([number[steps] for steps in self.collectives])

    @functools.cached_property
    def beside_s(self) -> np.ndarray:
        """[K] seconds of `compute_s` beside which pieces of a product travel."""
        return np.array([sum(c.beside_s or 0.0 for c in steps) for steps in self.collectives])

    @functools.cached_property
    def free_s(self) -> np.ndarray:
        """[K] the rest of `compute_s`."""
        return self.compute_s - self.beside_s


def _layout(dims: Dims, assignment: Assignment, exchanged: Sequence[int], look_up: LookUp | None) -> Layout:
    """`layout_of` where some axes are exchanged: no tensor has both rows and ids."""
    layout = layout_of(dims, assignment)
    if look_up is None or not exchanged:
        return layout
    rows = layout_of(dims, tuple(look_up.rows if a in exchanged else WHOLE for a in range(len(assignment))))
    return tuple(r if r != WHOLE else d for d, r in zip(layout, rows, strict=True))


def choice_table(
    shape: GroupShape,
    mesh: LogicalMesh,
    lookups: Lookups = Lookups(),  # noqa: B008 - frozen
    in_pieces: InPieces = InPieces(),  # noqa: B008 - frozen
) -> ChoiceTable:
    """Enumerates and prices the choices of a group of this shape on `mesh`.

    Args:
      shape: The group. mesh: The mesh. lookups: Of tables.
      in_pieces: Which products may run in pieces.
    """
    sizes = mesh.shape
    reading = tuple(dict.fromkeys(dims for dims, _, _ in shape.reads))
    writing = tuple(dict.fromkeys(dims for dims, _, _ in shape.writes))
    look_up = None if shape.table is None else shape.table.look_up
    product = None if in_pieces.decompose == "never" else product_of(shape)
    sums = SumPrices(mesh)
    rows: dict[tuple, _Row] = {}
    computed: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, float]] = {}
    for assignment, exchanged, scatters in _ways(shape, sizes, lookups):
        reads = {dims: _layout(dims, assignment, exchanged, look_up) for dims in reading}
        local = {dims: _layout(dims, assignment, exchanged, look_up) for dims in writing}
        exchange = _exchange(shape, assignment, exchanged, sizes, lookups)
        alike = _splits(shape, assignment, sizes), exchanged  # whichever axes split the factors
        if alike not in computed:
            computed[alike] = _compute(shape, assignment, reads, local, mesh, sizes, exchange)
        compute_s, flops = computed[alike]
        for scatter in scatters:
            choice = Choice(assignment, scatter, exchanged)
            key = (*reads.values(), *(_merge(layout, scatter) for layout in local.values()))
            resolved = _resolve(shape, choice, local, mesh, sizes, exchange, sums)
            row = _Row(choice, compute_s + _turned_s(shape, choice, local, mesh), flops, *resolved, exchange)
            best = rows.get(key)
            if best is None or row.cost_s < best.cost_s:
                rows[key] = row
            if product is not None:
                for own in _in_pieces(shape, product, row, mesh, in_pieces):
                    read = [own.choice.layout_of(dims, None) for dims in reading]
                    rows[(*read, *key[len(reading) :], own.choice.pieces)] = own
    column = lambda name: [getattr(row, name) for row in rows.values()]
    # accesses of equal dimensions share one column
    by_dims = {dims: tuple(key[n] for key in rows) for n, dims in enumerate(reading)}
    written = {dims: tuple(key[n] for key in rows) for n, dims in enumerate(writing, len(reading))}
    is_update = shape.table is not None and shape.table.is_update
    kept = [0.0 if e is None else e.buffer_bytes(is_update=is_update) for e in column("exchange")]
    compute_s, flops = np.array(column("compute_s")), np.array(column("flops"))
    inside = None if shape.work is None else region_costs(shape.work, mesh)
    kept = [k + row.pieces_bytes for k, row in zip(kept, rows.values(), strict=True)]
    if inside is not None:
        kept = [inside.workspace_bytes] * len(rows)
        compute_s, flops = np.full(len(rows), inside.compute_s), np.full(len(rows), inside.flops)
    return ChoiceTable(
        tuple(column("choice")),
        tuple(by_dims[dims] for dims, _, _ in shape.reads),
        tuple(written[dims] for dims, _, _ in shape.writes),
        compute_s,
        flops,
        tuple(column("collectives")),
        np.array(column("partial_bytes")),
        np.array(kept),
        tuple(column("exchange")),
        inside,
    )


def fastest_kernels_s(groups: Sequence[Group], tables: Sequence[ChoiceTable]) -> float:
    """Seconds of all kernels of a program, each as fast as any of its choices makes it; `tables`: of `groups`."""
    return sum(g.trips * float(t.compute_s.min()) for g, t in zip(groups, tables, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class RegionCosts:
    """What one run of a region takes on each device.

    Attributes:
      kernels: Each of `RegionWork.kernels` with its seconds and flops, all runs together.
      collectives: Those of `RegionWork.collectives` that send anything, each with the price of one run.
      workspace_bytes: As in `RegionWork`.
    """

    kernels: tuple[tuple[RegionKernels, float, float], ...]
    collectives: tuple[tuple[RegionCollective, Collective], ...]
    workspace_bytes: float

    @property
    def compute_s(self) -> float:
        """Seconds of all kernels."""
        return sum(compute_s for _, compute_s, _ in self.kernels)

    @property
    def flops(self) -> float:
        """Of all kernels."""
        return sum(flops for _, _, flops in self.kernels)

    @property
    def comm_s(self) -> float:
        """Seconds of all runs of all collectives."""
        return sum(c.trips * price.time_s for c, price in self.collectives)


def region_costs(work: RegionWork, mesh: LogicalMesh) -> RegionCosts:
    """Prices the work of a region on `mesh`."""
    whole, kernels = (WHOLE,) * len(mesh.shape), []
    for k in work.kernels:
        reads, writes = ({dims: layout_of(dims, whole) for dims, _, _ in a} for a in (k.shape.reads, k.shape.writes))
        once_s, flops = _compute(k.shape, whole, reads, writes, mesh, mesh.shape, None)
        kernels.append((k, k.trips * once_s, k.trips * flops))
    priced = [(c, region_collective(c, mesh)) for c in work.collectives]
    sent = tuple([(c, price) for c, price in priced if price is not None])
    return RegionCosts(tuple(kernels), sent, work.workspace_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """A row of a `ChoiceTable` in the making."""

    choice: Choice
    compute_s: float
    flops: float
    collectives: tuple[Collective, ...]
    partial_bytes: float
    exchange: Exchange | None
    pieces_bytes: float = 0.0

    @property
    def cost_s(self) -> float:
        return self.compute_s + sum(c.time_s for c in self.collectives)


def _in_pieces(shape: GroupShape, product: Kernel, row: _Row, mesh: LogicalMesh, in_pieces: InPieces) -> Iterator[_Row]:
    """The ways to run the product of `row` in pieces that are wanted."""
    assignment = row.choice.assignment
    least_dim = lambda own, sizes: _least_dim(shape.factors, product.sides, own, sizes)
    for pieces in ways_in_pieces(shape, assignment, row.choice.scatter, mesh):
        cost = price(shape, product, assignment, pieces, mesh, in_pieces.hidden_share, least_dim)
        sums = row.collectives if pieces.is_gathered else ()
        choice = dataclasses.replace(row.choice, pieces=pieces)
        own = _Row(
            choice,
            cost.compute_s,
            row.flops,
            (cost.sent, *sums),
            row.partial_bytes if pieces.is_gathered else 0.0,
            None,
            cost.workspace_bytes,
        )
        if in_pieces.decompose == "any" or own.cost_s < row.cost_s + cost.spared_s:
            yield own


def _ways(
    shape: GroupShape, sizes: tuple[int, ...], lookups: Lookups
) -> Iterator[tuple[Assignment, tuple[int, ...], list[Layout]]]:
    """All legal choices: assignment, exchanged axes, and ways to resolve what is partial."""
    table = shape.table
    may_exchange = table is not None and _may_exchange(shape, table, lookups)
    for assignment, scatters in legal_choices(shape, sizes):
        yield assignment, (), scatters
        if table is None or not may_exchange or table.look_up.rows in assignment:
            continue  # rows are either exchanged or found for everybody
        asking = [a for a, f in enumerate(assignment) if f in table.look_up.ids and sizes[a] > 1]
        for count in range(1, len(asking) + 1):
            for exchanged in itertools.combinations(asking, count):
                if shape.factors[table.look_up.rows].size % math.prod(sizes[a] for a in exchanged) == 0:
                    # what is exchanged is no longer partial
                    left = [s for s in scatters if all(s[a] == WHOLE for a in exchanged)]
                    yield assignment, exchanged, _that_fit(shape, assignment, exchanged, left, sizes)


def _that_fit(
    shape: GroupShape,
    assignment: Assignment,
    exchanged: tuple[int, ...],
    scatters: list[Layout],
    sizes: tuple[int, ...],
) -> list[Layout]:
    """Those of `scatters` that still divide the result, of which the exchanged axes split the rows."""
    dims, _, extents = shape.writes[-1]
    local = _layout(dims, assignment, exchanged, shape.table and shape.table.look_up)
    return [s for s in scatters if fits(_merge(local, s), extents, sizes)]


def _may_exchange(shape: GroupShape, table: Table, lookups: Lookups) -> bool:
    """Whether the caller lets rows of this table be exchanged for ids, and they can be numbered."""
    size = lambda factors: math.prod(shape.factors[f].size for f in factors)
    num_rows = shape.factors[table.look_up.rows].size
    if lookups.exchange == "never" or num_rows * size(table.look_up.tables) > MOST_KEYS:
        return False
    return lookups.exchange == "any" or shape.is_sparse


def _exchange(
    shape: GroupShape, assignment: Assignment, exchanged: Sequence[int], sizes: tuple[int, ...], lookups: Lookups
) -> Exchange | None:
    """What a choice exchanges."""
    table = shape.table
    if table is None or not exchanged:
        return None
    here = lambda factors: (
        math.prod(shape.factors[f].size for f in factors)
        // math.prod(n for n, f in zip(sizes, assignment, strict=True) if f in factors)
    )
    owners, tables = math.prod(sizes[a] for a in exchanged), here(table.look_up.tables)
    row_bytes = _row_bytes(table, assignment, sizes)
    num_rows = shape.factors[table.look_up.rows].size
    return exchange_of(owners, here(table.look_up.ids) * tables, tables, num_rows, row_bytes, lookups)


def _row_bytes(table: Table, assignment: Assignment, sizes: tuple[int, ...]) -> float:
    """Bytes of the part of a row that a device has."""
    return table.row_bytes / math.prod(n for n, f in zip(sizes, assignment, strict=True) if f in table.row)


def _merge(layout: Layout, scatter: Layout) -> Layout:
    return tuple([s if s != WHOLE else d for d, s in zip(layout, scatter, strict=True)])


@functools.lru_cache(maxsize=4096)
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


def _splits(shape: GroupShape, assignment: Assignment, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """In how many parts each factor is split."""
    splits = [1] * len(shape.factors)
    for size, f in zip(sizes, assignment, strict=True):
        if f != WHOLE:
            splits[f] *= size
    return tuple(splits)


def _is_partial(shape: GroupShape, assignment: Assignment, sizes: tuple[int, ...]) -> bool:
    """Whether each device makes only a part of a sum."""
    splits = _splits(shape, assignment, sizes)
    return any(n > 1 and f.reduction is not None for n, f in zip(splits, shape.factors, strict=True))


def _compute(
    shape: GroupShape,
    assignment: Assignment,
    reads: Mapping[Dims, Layout],
    local: Mapping[Dims, Layout],
    mesh: LogicalMesh,
    sizes: tuple[int, ...],
    exchange: Exchange | None,
) -> tuple[float, float]:
    """Seconds and flops of one run on one device; `reads` and `local` are layouts before any reduction, by dims."""
    turned_s = sum(
        transposing_s(mesh.device_type, shard_bytes(size_bytes, layout_of(dims, assignment), sizes))
        for dims, size_bytes in shape.transposed
    )
    counted = math.ceil(shape.iterations) if mesh.device_type.is_gpu else 0
    if not shape.kernels and shape.launches + counted == 0:
        return turned_s, 0.0
    total_flops = arithmetic_s = 0.0
    for kernel in shape.kernels:
        here = kernel.flops / math.prod(n for n, f in zip(sizes, assignment, strict=True) if f in kernel.own)
        total_flops += here
        least = _least_dim(shape.factors, kernel.sides, assignment, sizes)
        rows = [(_local_size(shape.factors, row, assignment, sizes), is_summed) for row, is_summed in kernel.rows]
        prolonged = unaligned_factor(mesh.device_type, kernel.dtype, rows)
        arithmetic_s += prolonged * flops_s(mesh.device_type, here, kernel.dtype, kernel.work, kernel.count, least)
    if exchange is not None:
        is_update = shape.table is not None and shape.table.is_update
        moved, launches = exchange.moved_bytes(is_update=is_update), shape.launches + exchange.launches
        if is_update:  # the table that it begins with is filled
            moved += sum(shard_bytes(b, local[dims], sizes) for dims, b, _ in shape.writes)
        return kernel_s(mesh.device_type, arithmetic_s, moved, launches), total_flops
    parts = {dims: shard_bytes(1.0, layout, sizes) for dims, layout in (*reads.items(), *local.items())}
    moved = sum(
        fetched_bytes * parts[dims]
        for (dims, _, _), fetched_bytes in zip(shape.reads, shape.fetched_bytes, strict=True)
    )
    touched = sum(shard_bytes(size_bytes, layout_of(dims, assignment), sizes) for dims, size_bytes in shape.touched)
    if shape.table is not None and shape.is_sparse:
        touched *= scattered(_row_bytes(shape.table, assignment, sizes))
    moved += touched
    for (dims, size_bytes, _), moves, has_zeros in zip(shape.writes, shape.moves, shape.zeros, strict=True):
        moved += (moves + (has_zeros and _is_partial(shape, assignment, sizes))) * size_bytes * parts[dims]
    local_size = lambda own: _local_size(shape.factors, own, assignment, sizes)
    rows = [size for size in map(local_size, shape.columns) if size <= MOST_ROWS]
    at_once = [min(size, FIRST_ROWS) if is_in_stages(size) else size for size in rows]
    steps = math.ceil(max(at_once, default=0.0) / COLUMN_ROWS)
    # which of them are one kernel with what makes their operands, and store that too, the compiler decides
    summing_s = columns_s(mesh.device_type, steps, is_storing=False, window_additions=0.0)
    launches = shape.launches + counted + sum(map(is_in_stages, rows)) * bool(summing_s)
    group_s = kernel_s(mesh.device_type, arithmetic_s, moved, launches, shape.row_passes, summing_s)
    return turned_s + group_s, total_flops


def _turned_s(shape: GroupShape, choice: Choice, local: Mapping[Dims, Layout], mesh: LogicalMesh) -> float:
    """Seconds of the kernel that turns the gradient of a convolution's kernel around before it is scattered: onto its
    output channels, which cuDNN has outermost, it is scattered as it lies."""
    if not shape.outermost or not mesh.device_type.is_gpu:
        return 0.0
    dims, size_bytes, _ = shape.writes[-1]
    scattered = {dims[d] for d, n in zip(choice.scatter, mesh.shape, strict=True) if d != WHOLE and n > 1}
    if scattered <= {shape.outermost}:
        return 0.0
    return kernel_s(mesh.device_type, 0.0, 2 * shard_bytes(size_bytes, local[dims], mesh.shape), 1)


def _least_dim(
    factors: Sequence[Factor], sides: tuple[tuple[int, ...], ...], assignment: Assignment, sizes: tuple[int, ...]
) -> float:
    """The least dimension of a product on one device; infinite for other work."""
    return min((_local_size(factors, side, assignment, sizes) for side in sides), default=math.inf)


def _local_size(
    factors: Sequence[Factor], own: tuple[int, ...], assignment: Assignment, sizes: tuple[int, ...]
) -> float:
    """The product of the extents of the factors `own` on one device."""
    split = math.prod(n for n, f in zip(sizes, assignment, strict=True) if f in own)
    return math.prod(factors[f].size for f in own) / split


def _resolve(
    shape: GroupShape,
    choice: Choice,
    local: Mapping[Dims, Layout],
    mesh: LogicalMesh,
    sizes: tuple[int, ...],
    exchange: Exchange | None,
    sums: SumPrices,
) -> tuple[tuple[Collective, ...], float]:
    """The collectives that exchange and that sum partial results, and the bytes of the partial result before a
    reduce-scatter.
    """
    summed = [
        a
        for a, f in enumerate(choice.assignment)
        if f != WHOLE and sizes[a] > 1 and shape.factors[f].reduction is not None and a not in choice.exchanged
    ]
    steps: list[Collective] = []
    if exchange is not None:
        steps += [launched(c, mesh.device_type) for c in exchange.collectives([mesh.axes[a] for a in choice.exchanged])]
    if not summed:
        return tuple(steps), 0.0
    extra_bytes = 0.0
    scattered = [a for a in summed if choice.scatter[a] != WHOLE]
    reduced = [a for a in summed if choice.scatter[a] == WHOLE]
    pace = mesh.axes[summed[0]].levels[-1].link.bandwidth_bytes_per_s if shape.is_scalar_sum else None
    # several writes of equal dimensions are the terms of one sum, reduced once, as the last of them
    results = shape.writes[-1:] if len(local) == 1 else shape.writes
    for dims, size_bytes, extents in results:
        left_bytes = shard_bytes(size_bytes, local[dims], sizes)
        if scattered:
            extra_bytes += left_bytes
        together = [axes for axes in ([a for a in s if sizes[a] > 1] for s in scatter_order(choice.scatter)) if axes]
        if shape.is_summed_at_once and exchange is None and len(together) + bool(reduced) > 1:
            steps.append(sums.all_reduce(summed, left_bytes, pace))
            left_bytes /= math.prod(sizes[a] for a in scattered)
        else:
            for number, axes in enumerate(together):
                dim = choice.scatter[axes[0]]
                is_in_order = number == 0 and not ordered_dims(extents, local[dims], sizes)[dim]
                steps.append(sums.reduce_scatter(axes, left_bytes, inner_dims(extents)[dim], is_in_order, pace))
                left_bytes /= math.prod(sizes[a] for a in axes)
            if reduced:
                is_place = any(shape.factors[choice.assignment[a]].reduction in PLACES for a in reduced)
                steps += [sums.all_reduce(reduced, left_bytes, pace)] * (2 if is_place else 1)
        split = [a for a, n in enumerate(sizes) if n > 1]
        if shifted := out_of_order(local[dims], _merge(local[dims], choice.scatter), split):
            steps.append(sums.permute(shifted, left_bytes, pace))
    return tuple(steps), extra_bytes


def satisfies(layout: Layout, fixed: FixedLayout, axis_names: Sequence[str]) -> bool:
    """Whether `layout` shards every dimension that `fixed` constrains exactly as it demands."""
    entries = spec_entries(layout, len(fixed), axis_names)
    return all(want is None or set(want) == set(have) for want, have in zip(fixed, entries, strict=True))
