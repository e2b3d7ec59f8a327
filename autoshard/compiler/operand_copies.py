"""Resharded copies of operands: how long each is there."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from autoshard.compiler.aliasing import is_alias
from autoshard.compiler.analysis import ProgramAnalysis
from autoshard.compiler.buffer_uses import BufferKind, BufferUse, OperandRead
from autoshard.compiler.collective_combiner import is_reduced_alone
from autoshard.compiler.hiding_spans import HidingSpans
from autoshard.graph.graph import Graph, Operation, OperationKind


def operand_copies(
    analysis: ProgramAnalysis, reads: Iterable[tuple[int, OperandRead]], hiding: HidingSpans | None = None
) -> Iterator[BufferUse]:
    """The buffers of every resharded copy.

    XLA:GPU begins a collective as soon as it can, and execution lets a weight be gathered as soon as the reader's other
    operand is there, which may wait for a sum that is reduced alone (`collective_combiner.py`). Its partial sum takes
    as much as the copy. Indices that come with the arguments are there from the start: all tables that they are looked
    up in are gathered before the first is read. A copy that came by a collective stays for as long as anything needs
    it: where its reader is computed inside other kernels, for the last of these; and a sum made in a product's buffer
    is made in the copy of the product. Slices are computed there like their reader, and copies of gradients wait for
    others to be combined with, unless they are too large for that. Activations are moved as soon as they are there,
    too, if a product of the same checkpointed function reads them. The weight of a convolution waits for the gradient
    of a kernel that is made before (`early_products.py`). Where collectives run behind products, a weight is gathered
    behind the one before its reader.

    Args:
      analysis: The program. reads: What reads in another layout, each with the owner of the copy.
      hiding: The spans of its collectives, where they run behind products.
    """
    graph, live = analysis.graph, analysis.live
    alias_stop, fused_stop = live.alias_stop, live.fused_stop
    starts = {life.value: life.start for life in live.ranges}
    weights = _Weights(analysis, starts, hiding)
    place = graph.checkpoint_of()
    for owner, read in reads:
        access, sizes = analysis.groups[read.group].reads[read.read], read.sizes
        use = lambda start, stop, size_bytes, owner=owner: BufferUse(
            BufferKind.OPERAND_COPY, owner, start, stop, size_bytes
        )
        is_weight = access.value in analysis.weights
        is_kept = access.value not in analysis.gradients and sizes.sent_bytes.any()
        kept_from = 0
        for o in access.operations:
            operation = graph.operations[o]
            if operation.kind in (OperationKind.LOOP_CARRY, OperationKind.SCAN_STACK):
                continue  # the loop's own buffer, counted as a value
            start, stop = o, o + 1
            results = [r for r in operation.results if r is not None]
            if is_alias(operation):
                stop = max([stop, *(alias_stop.get(r, 0) for r in results)])
            if is_weight and operation.rule.is_heavy:
                start, summed = weights.gathered_at(operation, access.value)
                if summed is not None:
                    yield use(start, summed, np.where(is_reduced_alone(sizes.size_bytes), 0.0, sizes.size_bytes))
                    start = summed
            elif operation.rule.is_heavy and is_kept and o == access.operations[0]:
                there = starts.get(access.value, o)
                if there + 1 < o and place[there] == place[o] != -1:
                    yield use(there + 1, o, sizes.sent_bytes)
            kept_until = max([max(fused_stop.get(r, 0), alias_stop.get(r, 0)) for r in results], default=0)
            yield use(start, stop, sizes.size_bytes)
            kept_from = max(kept_from, stop)
            if kept_until > kept_from:
                kept_bytes = sizes.sent_bytes
                if not is_kept:  # a gradient is combined with others, unless it is gathered as soon as it is there
                    kept_bytes = np.where(is_reduced_alone(kept_bytes), kept_bytes, 0.0)
                if kept_bytes.any():
                    yield use(kept_from, kept_until, kept_bytes)
                kept_from = kept_until


class _Weights:
    """When weights are gathered for heavy kernels."""

    def __init__(self, analysis: ProgramAnalysis, starts: Mapping[int, int], hiding: HidingSpans | None):
        self.graph, self.starts, self.hiding = analysis.graph, starts, hiding
        self.at_once, self.place = _made_at_once(analysis.graph), analysis.graph.checkpoint_of()
        self.kernels = _by_value(analysis.awaited_kernels)  # the gradients of kernels that its later readers wait for
        self.sums = _by_value(analysis.awaited_sums)  # the products whose sums its later readers wait for

    def gathered_at(self, operation: Operation, weight: int) -> tuple[int, int | None]:
        """(when a weight is gathered for `operation`, when it is if a sum before is reduced alone, None if none is)."""
        o = operation.index
        others = [v for v in operation.operands if v is not None and v != weight]
        if self.hiding is not None:
            start = self.hiding.gathered_from(o)
        else:
            start = min(o, self.starts.get(others[0], o) + 1) if others else o
            start = max([start, *(k + 1 for v in others[:1] for k in self.kernels.get(v, ()) if k < o)])
        if self.place[o] != -1:  # what enters a checkpointed function is there once all of it is
            start = max(start, self.graph.checkpoints[self.place[o]][0])
        if operation.name == "gather" and all([v in self.at_once for v in others]):
            start = 0
        if self.hiding is not None:
            return start, None
        sums = [k for v in others[:1] for k in self.sums.get(v, ()) if start <= k < o]
        return start, max(sums) + 1 if sums else None


def _by_value(values: Mapping[int, int]) -> dict[int, list[int]]:
    """The keys of each value of a mapping."""
    found: dict[int, list[int]] = {}
    for key, value in values.items():
        found.setdefault(value, []).append(key)
    return found


def _made_at_once(graph: Graph) -> frozenset[int]:
    """Values that nothing heavy is needed for but the program's arguments: they are there as soon as it begins."""
    found = {argument.value for argument in graph.arguments}
    for operation in graph.operations:
        if operation.kind is OperationKind.EQUATION and not operation.rule.is_heavy:
            if all([o is None or o in found for o in operation.operands]):
                found.update(r for r in operation.results if r is not None)
    return frozenset(found)
