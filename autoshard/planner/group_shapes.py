"""What the choices of a group depend on: its iteration space, what it reads, computes and writes.

Groups of equal shape share one table of choices (`choices.py`), so that equal layers are priced once.
"""

import dataclasses
import math
from collections.abc import Sequence, Set

from autoshard.compiler.kernel_traffic import Traffic
from autoshard.cost.compute import Work, attention_work, work_of
from autoshard.graph.graph import Dims, Factor, Graph, LookUp, Operation, Value
from autoshard.graph.groups import Group, map_dims
from autoshard.graph.product_rows import Row, product_rows
from autoshard.trace.rules.indexing import COMBINERS


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """Operations of a group that compute alike.

    Attributes:
      own: Their factors. dtype: Of their first operand. work: What they compute.
      sides: Of matrix products, the factors of the rows, of the columns, and of what is summed; of convolutions, those
        of the input channels of the kernel.
      rows: Of matrix products without batches, the rows of the matrices (`graph/product_rows.py`).
      flops: All of them together, unsharded. count: How many operations they are.
    """

    own: tuple[int, ...]
    dtype: str
    work: Work
    sides: tuple[tuple[int, ...], ...]
    rows: tuple[Row, ...]
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
      row_passes: The reductions of long rows that the results of one of them wait for (`compiler/kernel_traffic.py`).
      columns: Of each reduction that keeps the last dimension, the factors that it reduces.
      fetched_bytes: For each read, what the group's kernels fetch of it from memory, unsharded; of a value that is
        never stored, what it is made of (`compiler/kernel_traffic.py`).
      moves: For each write, how often it moves between memory and the group's kernels.
      zeros: For each write, whether it is filled with zeros only where it is a partial sum.
      touched: The parts that are touched of other reads and writes: dims, whole size in bytes.
      transposed: What its operations put into another order of dimensions: dims, whole size in bytes.
      is_scalar_sum: Whether the result is a scalar: XLA combines the all-reduces of scalars (norms, losses, counts)
        into one (`overlap.py` tells what each pays of it).
      is_summed_at_once: Whether XLA sums over all axes in one all-reduce where only some of them end in a
        reduce-scatter, or on several dimensions: it partitions a scatter by itself, which cannot run by shards.
      table: What it looks up, where that may be exchanged.
      work: What each device does where the program splits it by hand, whatever the choice.
      outermost: Of the gradient of a convolution's kernel, the factors of its output channels; else empty. cuDNN has
        these outermost in memory.
      iterations: Of the loop that it begins: each is counted (`compiler/kernel_traffic.py`).
    """

    factors: tuple[Factor, ...]
    reads: tuple[tuple[Dims, float, tuple[int, ...]], ...]
    writes: tuple[tuple[Dims, float, tuple[int, ...]], ...]
    kernels: tuple[Kernel, ...]
    launches: int
    row_passes: int
    columns: tuple[tuple[int, ...], ...]
    fetched_bytes: tuple[float, ...]
    moves: tuple[int, ...]
    zeros: tuple[bool, ...]
    touched: tuple[tuple[Dims, float], ...]
    transposed: tuple[tuple[Dims, float], ...]
    is_scalar_sum: bool
    is_summed_at_once: bool
    table: "Table | None" = None
    work: "RegionWork | None" = None
    outermost: tuple[int, ...] = ()
    iterations: float = 0.0

    @property
    def is_sparse(self) -> bool:
        """Whether it is a look-up of fewer ids than its table has rows."""
        if self.table is None:
            return False
        size = math.prod(self.factors[f].size for f in self.table.look_up.ids)
        return size < self.factors[self.table.look_up.rows].size


@dataclasses.dataclass(frozen=True, slots=True)
class RegionKernels:
    """Groups of equal shape in the body of a region, where everything is whole.

    Attributes:
      name, source: The primitive and the user's line of their first operation.
      shape: Their shape.
      trips: How often they run, together, in one run of the region.
    """

    name: str
    source: str
    shape: GroupShape
    trips: float


@dataclasses.dataclass(frozen=True, slots=True)
class RegionCollective:
    """A collective in a region.

    Attributes:
      name: Its primitive. axes: The mesh axes that it runs over.
      operand_bytes, result_bytes: On one device. shape: Of its first result.
      trips: How often it runs in one run of the region.
      source: The user's line.
    """

    name: str
    axes: tuple[str, ...]
    operand_bytes: float
    result_bytes: float
    shape: tuple[int, ...]
    trips: float
    source: str


@dataclasses.dataclass(frozen=True, slots=True)
class RegionWork:
    """What each device does in one run of a region (`graph.Region`).

    Attributes:
      kernels: What it computes. collectives: What it sends.
      workspace_bytes: The most that is alive inside at once, beside operands and results.
    """

    kernels: tuple[RegionKernels, ...]
    collectives: tuple[RegionCollective, ...]
    workspace_bytes: float


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """The table that a group looks rows up in, or adds to.

    Attributes:
      look_up: Its rows and ids, in the group's factors.
      row: The factors of a row. row_bytes: Of a whole row.
      is_update: Whether rows are added to, and not taken.
    """

    look_up: LookUp
    row: tuple[int, ...]
    row_bytes: float
    is_update: bool


def _table(group: Group, operations: Sequence[Operation], values: Sequence[Value]) -> Table | None:
    """The table of a group that is one look-up, and nothing else."""
    (operation, *others), own = operations, group.factor_maps[0]
    look_up, touched = operation.rule.look_up, operation.rule.touched
    if others or look_up is None or touched is None:
        return None
    mapped = lambda factors: tuple(own[f] for f in factors)
    ids = {*look_up.ids, *look_up.tables}
    row = tuple(f for dim in touched.dims for f in dim if f not in ids)
    itemsize_bytes = values[operation.operand(2 if touched.is_update else 0)].itemsize_bytes
    row_bytes = float(itemsize_bytes * math.prod(operation.rule.factors[f].size for f in row))
    named = LookUp(own[look_up.rows], mapped(look_up.ids), mapped(look_up.tables))
    return Table(named, mapped(row), row_bytes, touched.is_update)


def shape_of(
    group: Group,
    graph: Graph,
    traffic: Traffic,
    in_memory: Set[int],
    in_place: Set[int],
    work: RegionWork | None,
) -> GroupShape:
    """The shape of `group`.

    Args:
      group, graph: The group. traffic: What kernels of the graph move.
      in_memory: The values that are stored under some name. in_place: Those made in the place of another value.
      work: That of a region.
    """
    operations = [graph.operations[o] for o in group.operations]
    describe = lambda access: (
        access.dims,
        float(graph.values[access.value].size_bytes),
        graph.values[access.value].shape,
    )
    partly_read, partly_written, zeros, touched = _partial_accesses(
        group, operations, graph.values, in_memory, in_place
    )
    moved = traffic.of_group(group, partly_read, partly_written)
    return GroupShape(
        group.factors,
        tuple(map(describe, group.reads)),
        tuple(map(describe, group.writes)),
        _kernels(group, operations, graph.values),
        moved.launches,
        moved.row_passes,
        _columns(group, operations),
        moved.fetched_bytes,
        moved.moves,
        tuple([access.value in zeros for access in group.writes]),
        touched,
        _transposed(group, operations, graph.values),
        all(not graph.values[a.value].shape for a in group.writes),
        any(o.name in COMBINERS for o in operations),
        _table(group, operations, graph.values),
        work,
        _outermost(group, operations),
        moved.iterations,
    )


def _outermost(group: Group, operations: Sequence[Operation]) -> tuple[int, ...]:
    """`GroupShape.outermost` of a group that is one convolution: what the gradient of its kernel has in common with
    the gradient of its result."""
    (operation, *others), own = operations, group.factor_maps[0]
    if others or operation.rule.convolved is None or not operation.rule.convolved.is_kernel_gradient:
        return ()
    of_result, of_kernel = (
        {f for dim in d for f in dim} for d in (operation.rule.operands[1], operation.rule.results[0])
    )
    return tuple(sorted(own[f] for f in of_result & of_kernel))


def _partial_accesses(
    group: Group, operations: Sequence[Operation], values: Sequence[Value], in_memory: Set[int], in_place: Set[int]
) -> tuple[set[tuple[int, tuple[int, ...]]], set[int], set[int], tuple[tuple[Dims, float], ...]]:
    """What the group reads in part (value, who reads it) and writes in part (value), what of that is added to zeros
    where it is a partial sum, and the parts (dims, bytes).

    An operand that is changed is changed where it is. One that is not in memory yet, such as the zeros to which the
    gradient of a look-up is added, is made there first: written whole, not read. Where the result is only added to a
    value, the compiler adds to that value at once (`compiler/aliasing.py`), unless it sums over devices between.
    """
    read, written, zeros = set(), set(), set()
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
            elif operation.results[0] in in_place:
                written.add(operation.results[0])
                zeros.add(operation.results[0])
        size_bytes = part.num_elements * values[source].itemsize_bytes
        touched.append((map_dims(part.dims, factor_map), float(times * size_bytes)))
    return read, written, zeros, tuple(touched)


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


def _columns(group: Group, operations: Sequence[Operation]) -> tuple[tuple[int, ...], ...]:
    """The group's factors that reductions sum which keep their operand's last dimension of more than one element."""
    found: set[tuple[int, ...]] = set()
    for operation, factor_map in zip(operations, group.factor_maps, strict=True):
        factors = operation.rule.factors
        if not operation.name.startswith("reduce_") or operation.rule.is_heavy or not operation.rule.operands:
            continue
        dims = [dim for dim in operation.rule.operands[0] if math.prod(factors[f].size for f in dim) > 1]
        is_reduced = [all(factors[f].reduction for f in dim) for dim in dims]
        if any(is_reduced) and not is_reduced[-1]:
            found.add(tuple(sorted(factor_map[f] for d, is_ in zip(dims, is_reduced, strict=True) if is_ for f in d)))
    return tuple(sorted(found))


def _kernels(group: Group, operations: Sequence[Operation], values: Sequence[Value]) -> tuple[Kernel, ...]:
    kernels: dict[tuple, Kernel] = {}
    for operation, factor_map in zip(operations, group.factor_maps, strict=True):
        if not operation.rule.flops:
            continue
        work, sides, rows = work_of(operation.name), (), ()
        if operation.name == "dot_general":
            sides = _sides(operation, factor_map)
            own_rows = product_rows(operation.rule)
            rows = tuple((tuple(factor_map[f] for f in row), is_summed) for row, is_summed in own_rows)
        elif (convolved := operation.rule.convolved) is not None:
            sides = (tuple(factor_map[f] for f in convolved.channels),)
            work = Work.KERNEL_GRADIENT if convolved.is_kernel_gradient else work
        elif operation.rule.attention is not None:
            work = attention_work(operation.rule.attention)
        one = Kernel(
            tuple(sorted(set(factor_map))),
            _dtype_of(operation.operands, values),
            work,
            sides,
            rows,
            operation.rule.flops,
            1,
        )
        key = one.own, one.dtype, one.work, one.sides, one.rows
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
