"""Resharded copies of operands: how long each is there."""

import bisect
from collections.abc import Iterable, Iterator

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

    A copy that came by a collective stays for as long as anything needs it: where its reader is computed inside other
    kernels, for the last of these; and a sum made in a product's buffer is made in the copy of the product. Slices are
    computed there like their reader, and copies of gradients wait for others to be combined with, unless they are too
    large for that. XLA:GPU begins a collective as soon as it can: activations are moved as soon as they are there, if a
    product of the same checkpointed function reads them. Where collectives run behind products, others are moved beside
    the kernel before their reader, and a weight is gathered behind the product before it, neither before all that
    enters the reader's checkpointed function is there; and all tables are gathered when the step begins that are looked
    up by indices among its arguments. Of what a scan slices each slice is moved by itself, and what the scan is given
    is there until it ends (`scanned_inputs.py`).

    Args:
      analysis: The program. reads: What reads in another layout, each with the owner of the copy.
      hiding: The spans of its collectives, where they run behind products.
    """
    graph, live, chains = analysis.graph, analysis.live, analysis.chains
    alias_stop, fused_stop = live.alias_stop, live.fused_stop
    starts = {life.value: life.start for life in live.ranges}
    kernels = sorted({*starts.values()})
    place, there_at_once = graph.checkpoint_of(), frozenset() if hiding is None else _there_at_once(graph)
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
            if operation.kind is OperationKind.SCAN_SLICE:
                loop = graph.loops[chains.loop_nest[o][-1]]
                yield use(start, stop, sizes.size_bytes / loop.trips)
                if read.given_bytes is not None:
                    yield use(loop.start, loop.stop, read.given_bytes)
                continue
            results = [r for r in operation.results if r is not None]
            if is_alias(operation):
                stop = max([stop, *(alias_stop.get(r, 0) for r in results)])
            if is_weight and operation.rule.is_heavy and hiding is not None:
                readers = (c.index for c, _ in chains.consumers[access.value] if c.rule.is_heavy and c.index < o)
                start = hiding.gathered_from(o, max(readers, default=-1))
                start = max(start, graph.checkpoints[place[o]][0] if place[o] != -1 else 0)
                if operation.name == "gather" and there_at_once.issuperset(_others(operation, access.value)):
                    start = 0
            elif not is_weight and operation.rule.is_heavy and is_kept and o == access.operations[0]:
                there = starts.get(access.value, o)
                if there + 1 < o and place[there] == place[o] != -1:
                    yield use(there + 1, o, sizes.sent_bytes)
                elif hiding is not None and hiding.hides_sums:
                    behind = kernels[bisect.bisect_left(kernels, o) - 1]
                    opened = graph.checkpoints[place[o]][0] if place[o] != -1 else 0
                    if max(there, opened) < behind < o and chains.loop_nest[behind] == chains.loop_nest[o]:
                        yield use(behind, o, sizes.sent_bytes)
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


def _others(operation: Operation, value: int) -> set[int]:
    """The operands of an operation but for one."""
    return {v for v in operation.operands if v is not None and v != value}


def _there_at_once(graph: Graph) -> frozenset[int]:
    """Values that nothing heavy is needed for but the program's arguments: they are there as soon as it begins."""
    found = {argument.value for argument in graph.arguments}
    for operation in graph.operations:
        if operation.kind is OperationKind.EQUATION and not operation.rule.is_heavy:
            if all([o is None or o in found for o in operation.operands]):
                found.update(r for r in operation.results if r is not None)
    return frozenset(found)
