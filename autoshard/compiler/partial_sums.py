"""Partial sums in memory: how long each waits for its reduce-scatter."""

import bisect
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autoshard.compiler.analysis import ProgramAnalysis
from autoshard.compiler.buffer_uses import BufferKind, BufferUse, Choices
from autoshard.compiler.collective_combiner import is_reduced_alone
from autoshard.compiler.hiding_spans import HidingSpans
from autoshard.compiler.reduce_scatter_combiner import combined_until
from autoshard.graph.graph import Operation
from autoshard.graph.groups import Group
from autoshard.graph.layout import shard_bytes


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
    analysis: ProgramAnalysis, choices: Choices, workspace_bytes: int, hiding: HidingSpans | None = None
) -> Iterator[BufferUse]:
    """The buffers of every partial sum that waits for its reduce-scatter.

    XLA's schedule for least memory looks one step ahead: it puts off a product whose result and workspace take more
    than the operands that end with it, though the reduce-scatter would then free most of it. Then these operands wait
    instead. But if the product right after it needs a weight that is gathered, it is that or the gather; and where a
    gradient is scattered, so is its weight, whose copy takes as much as the partial sum. One that is reduced alone
    (`collective_combiner.py`), and that others wait for, is made and reduced at once. Gradients of convolution kernels
    are made where the program does, unless nothing waits for them (`early_products.py`).

    Where collectives run behind products, products are made in turn (`read_in_turn.py`): none is put off, and one that
    is reduced alone waits for that as long as `hiding` says.

    Args:
      analysis: The program. choices: What its choices mean. workspace_bytes: Of one product.
      hiding: The spans of its collectives, where they run behind products.
    """
    graph, groups, live = analysis.graph, analysis.groups, analysis.live
    cache: dict[tuple, _Amounts] = {}
    order, num_devices = analysis.reduce_scatter_order, math.prod(choices.mesh_shape)
    combined = combined_until(graph, groups, order, num_devices)
    combined_but_alone = combined_until(graph, groups, order, num_devices, analysis.awaited_sums)
    starts: dict[int | None, int] = {l.value: l.start for l in live.ranges if l.value in live.early_fills}
    stops = {life.value: life.stop for life in live.ranges}
    ends = {(life.value, life.stop) for life in live.ranges}
    reading_weights = [
        o.index for o in graph.operations if o.rule.is_heavy and not analysis.weights.isdisjoint(o.operands)
    ]
    for group in groups:
        own = choices.groups[group.index]
        if not own.partial_bytes.any():
            continue
        at, is_sum = group.operations[0], len(group.operations) > 1
        soon = bisect.bisect_right(live.region, live.region[at] + 2)  # the gradient of the other operand is right after
        stays = is_sum or at in analysis.awaited_kernels or hiding is not None
        freed = tuple([not stays and at < stops.get(a.value, 0) <= soon for a in group.reads])
        is_gather_next = bisect.bisect_right(reading_weights, at) < bisect.bisect_left(reading_weights, soon)
        freed_at_once = tuple([is_gather_next and (a.value, at + 1) in ends for a in group.reads])
        is_alone = at in analysis.awaited_sums and not is_sum
        reduced_until = hiding.reduced_until(at) if hiding is not None and is_alone else None
        until = (combined if is_alone else combined_but_alone).get(group.index, 0)
        key = id(own), freed, freed_at_once, is_alone
        if key not in cache:
            freed_bytes, at_once_bytes = (
                _read_bytes(analysis, choices, group, which) for which in (freed, freed_at_once)
            )
            cache[key] = _amounts(own.partial_bytes, freed_bytes, at_once_bytes, workspace_bytes, is_alone)
        amounts = cache[key]
        use = functools.partial(BufferUse, BufferKind.PARTIAL_SUM, group.index)
        operation = graph.operations[at]
        if operation.name == "conv_general_dilated" and operation.results[0] in analysis.gradients:
            yield use(at, at + 1, amounts.whole)  # cuDNN's layout is not the program's: it is transposed
        if reduced_until is not None and reduced_until > at + 1:
            yield use(at + 1, reduced_until, np.where(is_reduced_alone(own.partial_bytes), own.partial_bytes, 0.0))
        for start, stop in _waiting(graph.operations, starts, group, until):
            if is_sum or start < at:
                yield use(start, stop, amounts.whole)
                continue
            start = live.delayed.get(at, start)
            yield use(start, start + 1, amounts.at_once)
            if stop > start + 1:
                yield use(start + 1, stop, amounts.waiting)


def _read_bytes(analysis: ProgramAnalysis, choices: Choices, group: Group, is_counted: Sequence[bool]) -> np.ndarray:
    """[K] bytes of those reads of `group` that count."""
    own = choices.groups[group.index]
    total = np.zeros(len(own.partial_bytes))
    for access, column, counts in zip(group.reads, own.reads, is_counted, strict=True):
        if counts:
            size_bytes = float(analysis.graph.values[access.value].size_bytes)
            total += np.array([shard_bytes(size_bytes, l, choices.mesh_shape) for l in column.layouts])[
                column.of_choice
            ]
    return total


def _amounts(
    partial_bytes: np.ndarray,
    freed_bytes: np.ndarray,
    freed_at_once_bytes: np.ndarray,
    workspace_bytes: int,
    may_be_alone: bool,
) -> _Amounts:
    """What a group has waiting.

    Args:
      partial_bytes: [K] its partial sum. freed_bytes: [K] what ends with the group.
      freed_at_once_bytes: [K] what ends even before the next product, if that one needs a gathered weight.
      workspace_bytes: Of one product. may_be_alone: Whether others wait for the sum if it is reduced alone.
    """
    is_late = (freed_bytes > 0) & (partial_bytes > 0) & (partial_bytes + workspace_bytes >= freed_bytes)
    is_late &= freed_at_once_bytes <= workspace_bytes  # else the product takes less than the gather
    waiting_bytes = np.where(is_late, np.minimum(partial_bytes, freed_bytes), partial_bytes)
    if may_be_alone:
        is_alone = is_reduced_alone(partial_bytes)
        is_late &= ~is_alone
        waiting_bytes = np.where(is_alone, 0.0, waiting_bytes)
    return _Amounts(partial_bytes, np.where(is_late, 0.0, partial_bytes), waiting_bytes)


def _waiting(operations: Sequence[Operation], starts: Mapping[int | None, int], group: Group, until: int):
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
