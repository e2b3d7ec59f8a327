"""Partial sums in memory: how long each waits for its reduce-scatter."""

import bisect
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autoshard.cluster import LogicalMesh
from autoshard.cost.collectives import COMBINED_BYTES
from autoshard.graph.graph import Operation
from autoshard.graph.groups import Group
from autoshard.graph.layout import shard_bytes
from autoshard.planner.allowed import Decision
from autoshard.planner.choices import ChoiceTable
from autoshard.planner.joined_sums import joined_until
from autoshard.planner.program import Program


@dataclasses.dataclass(frozen=True, slots=True)
class _Amounts:
    """Bytes of a partial sum under each choice.

    Attributes:
      whole: The partial sum.
      at_once: What of it is there while the product runs; nothing if the product is put off.
      waiting: What waits from then on: the partial sum, or the operands of a product that is put off; nothing if it is
        reduced alone.
    """

    whole: np.ndarray
    at_once: np.ndarray
    waiting: np.ndarray


def partial_sums(
    program: Program,
    mesh: LogicalMesh,
    tables: Sequence[ChoiceTable],
    decisions: Sequence[Decision],
    first_group: int,
) -> Iterator[tuple[int, int, int, np.ndarray, None]]:
    """(node, start, stop, bytes of each choice, None) of every partial sum that waits for its reduce-scatter.

    XLA's schedule for least memory looks one step ahead: it puts off a product whose result and workspace take more
    than the operands that end with it, though the reduce-scatter would then free most of it. Then these operands wait
    instead. But if the product right after it needs a weight that is gathered, it is that or the gather; and where a
    gradient is scattered, so is its weight, whose copy takes as much as the partial sum. One that takes more than
    `COMBINED_BYTES` itself, and that others wait for, is made and reduced at once. Gradients of convolution
    kernels are made where the program does, unless nothing waits for them (`kernels_first.py`).

    Args:
      program, mesh: What is planned. tables: The choice table of each group. decisions: The nodes of the problem.
      first_group: The node of the first group.
    """
    cache: dict[tuple, _Amounts | None] = {}
    behind = dict(program.live.behind)
    joined, not_alone = joined_until(program, mesh), joined_until(program, mesh, program.alone)
    early, region = program.live.early_terms, program.live.region
    starts = {life.value: life.start for life in program.live.ranges if life.value in early}
    stops = {life.value: life.stop for life in program.live.ranges}
    ends = {(life.value, life.stop) for life in program.live.ranges}
    reading_weights = [
        o.index for o in program.graph.operations if o.rule.is_heavy and not program.weights.isdisjoint(o.operands)
    ]
    for group in program.groups:
        table, rows = tables[group.index], decisions[first_group + group.index].rows
        at, is_sum = group.operations[0], len(group.operations) > 1
        soon = bisect.bisect_right(region, region[at] + 2)  # the gradient of the other operand comes right after
        stays = is_sum or at in program.kernels_first
        freed = tuple([not stays and at < stops.get(a.value, 0) <= soon for a in group.reads])
        is_gather_next = bisect.bisect_right(reading_weights, at) < bisect.bisect_left(reading_weights, soon)
        at_once = tuple([is_gather_next and (a.value, at + 1) in ends for a in group.reads])
        is_alone = at in program.alone and not is_sum
        until = (joined if is_alone else not_alone).get(group.index, 0)
        key = id(table), rows, freed, at_once, is_alone
        if key not in cache:
            cache[key] = _amounts(program, mesh, group, table, rows, freed, at_once, is_alone)
        amounts = cache[key]
        if amounts is None:
            continue
        node = first_group + group.index
        operation = program.graph.operations[at]
        if operation.name == "conv_general_dilated" and operation.results[0] in program.gradients:
            yield node, at, at + 1, amounts.whole, None  # cuDNN's layout is not the program's: it is transposed
        for start, stop in _waiting(program.graph.operations, starts, group, until):
            if is_sum or start < at:
                yield node, start, stop, amounts.whole, None
                continue
            start = behind.get(at, start)
            yield node, start, start + 1, amounts.at_once, None
            if stop > start + 1:
                yield node, start + 1, stop, amounts.waiting, None


def _amounts(
    program: Program,
    mesh: LogicalMesh,
    group: Group,
    table: ChoiceTable,
    rows: Sequence[int],
    is_freed: Sequence[bool],
    is_freed_at_once: Sequence[bool],
    is_alone: bool,
) -> _Amounts | None:
    """What `group` has waiting; None if it never has.

    `is_freed`: for each read, whether it ends with the group; `is_freed_at_once`: whether it does even before the next
    product, if that one needs a gathered weight. `is_alone`: Whether it is reduced alone if it is large.
    """
    partial = table.partial_bytes[list(rows)]
    if not partial.any():
        return None

    def bytes_of(is_counted: Sequence[bool]) -> np.ndarray:
        total = np.zeros(len(rows))
        for access, column, counts in zip(group.reads, table.reads, is_counted, strict=True):
            if counts:
                size_bytes = float(program.graph.values[access.value].size_bytes)
                total += [shard_bytes(size_bytes, column[row], mesh.shape) for row in rows]
        return total

    freed, workspace_bytes = bytes_of(is_freed), mesh.device_type.product_workspace_bytes
    is_late = (freed > 0) & (partial > 0) & (partial + workspace_bytes >= freed)
    is_late &= bytes_of(is_freed_at_once) <= workspace_bytes  # else the product takes less than the gather
    waiting = np.where(is_late, np.minimum(partial, freed), partial)
    if is_alone:
        is_late &= partial <= COMBINED_BYTES
        waiting = np.where(partial > COMBINED_BYTES, 0.0, waiting)
    return _Amounts(partial, np.where(is_late, 0.0, partial), waiting)


def _waiting(operations: Sequence[Operation], starts: Mapping[int, int], group: Group, until: int):
    """(start, stop) of each partial result of a group that is reduced at `until` or when the last one is there.

    The terms of a sum wait for each other and are reduced as one.
    """
    waiting: dict[int | None, int] = {}
    for index in group.operations:
        terms = [waiting.pop(o) for o in operations[index].operands if o in waiting]
        yield from ((start, index + 1) for start in terms)
        result = operations[index].results[0]
        if not terms:
            waiting[result] = min(index, starts.get(result, index))
        elif index + 1 < until or index != group.operations[-1]:
            waiting[result] = index + 1  # the sum is made in the place of a term
    yield from ((start, max(until, group.operations[-1] + 1)) for start in waiting.values())
