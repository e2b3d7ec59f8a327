"""Partial sums in memory: how long each waits for its reduce-scatter."""

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


def partial_sums(analysis: ProgramAnalysis, choices: Choices, hiding: HidingSpans | None = None) -> Iterator[BufferUse]:
    """The buffers of every partial sum that waits for its reduce-scatter.

    It waits for all that it is combined with. One that is reduced alone (`collective_combiner.py`), and that others
    wait for, is made and reduced at once. Where sums run behind products, it waits for that as long as `hiding` says,
    and for no other.

    Args:
      analysis: The program. choices: What its choices mean.
      hiding: The spans of its collectives, where they run behind products.
    """
    graph, live = analysis.graph, analysis.live
    order, num_devices = analysis.reduce_scatter_order, math.prod(choices.mesh_shape)
    combined = combined_until(graph, analysis.groups, order, num_devices)
    combined_but_alone = combined_until(graph, analysis.groups, order, num_devices, analysis.awaited_sums)
    for group in analysis.groups:
        partial_bytes = choices.groups[group.index].partial_bytes
        if not partial_bytes.any():
            continue
        at, is_sum = group.operations[0], len(group.operations) > 1
        is_alone = at in analysis.awaited_sums and not is_sum
        reduced_until = hiding.reduced_until(at) if hiding is not None and is_alone else None
        until = (combined if is_alone else combined_but_alone).get(group.index, 0)
        if hiding is not None and hiding.hides_sums and until:  # joined up to 1 MiB (`options.py`)
            until = hiding.queued_until(group.operations[-1])
        waiting_bytes = np.where(is_reduced_alone(partial_bytes), 0.0, partial_bytes) if is_alone else partial_bytes
        use = functools.partial(BufferUse, BufferKind.PARTIAL_SUM, group.index)
        operation = graph.operations[at]
        if operation.name == "conv_general_dilated" and operation.results[0] in analysis.gradients:
            yield use(at, at + 1, partial_bytes)  # cuDNN's layout is not the program's: it is transposed
        if reduced_until is not None and reduced_until > at + 1:
            places = 1 if hiding is None or not hiding.exchanges_sums else 2  # of what is sent and what is received
            yield use(at + 1, reduced_until, np.where(is_reduced_alone(partial_bytes), places * partial_bytes, 0.0))
        for start, stop in _waiting(graph.operations, group, until):
            if is_sum:
                yield use(start, stop, partial_bytes)
                continue
            start = live.delayed.get(at, start)
            yield use(start, start + 1, partial_bytes)
            if stop > start + 1:
                yield use(start + 1, stop, waiting_bytes)
            if operation.results[0] in live.alias_stop:  # but a partial sum is not scattered into what it is added to
                yield use(stop - 1, stop, _scattered_bytes(analysis, choices, group))


def _scattered_bytes(analysis: ProgramAnalysis, choices: Choices, group: Group) -> np.ndarray:
    """[K] bytes of what a reduce-scatter makes of a group's partial sum."""
    value, partial_bytes = group.writes[-1].value, choices.groups[group.index].partial_bytes
    column = choices.layouts_of(value)
    if column is None:
        return np.zeros(len(partial_bytes))
    own_bytes = column.shard_bytes(float(analysis.graph.values[value].size_bytes), choices.mesh_shape)
    return np.where(partial_bytes > 0, own_bytes, 0.0)


def _waiting(operations: Sequence[Operation], group: Group, until: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of each partial result of a group that is reduced at `until` or when the last one is there.

    The terms of a sum wait for each other and are reduced as one.
    """
    waiting: dict[int | None, int] = {}
    for index in group.operations:
        terms = [waiting.pop(o) for o in operations[index].operands if o in waiting]
        yield from ((start, index + 1) for start in terms)
        result = operations[index].results[0]
        if not terms:
            waiting[result] = index
        elif index + 1 < until or index != group.operations[-1]:
            waiting[result] = index + 1  # the sum is made in the place of a term
    yield from ((start, max(until, group.operations[-1] + 1)) for start in waiting.values())


def until_added(uses: Sequence[BufferUse], spans: np.ndarray, added: Mapping[int, int]) -> np.ndarray:
    """The spans of all buffers, where partial sums that are added before they are reduced together are there until
    then.

    Args:
      uses: The buffers. spans: int64 [n, 2], when they are there.
      added: For groups whose sums are added first, the last operation that does, as of `EmittedCollectives`.
    """
    if not added:  # as in most programs
        return spans
    last: dict[int, int] = {}  # of each group, the buffer that is there last
    for k, use in enumerate(uses):
        if use.kind is BufferKind.PARTIAL_SUM and use.owner in added:
            before = last.setdefault(use.owner, k)
            last[use.owner] = k if spans[k, 1] > spans[before, 1] else before
    spans = spans.copy()
    for group, k in last.items():
        spans[k, 1] = max(spans[k, 1], added[group] + 1)
    return spans
