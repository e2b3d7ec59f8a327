"""What XLA's collective combiner makes of collectives: how many it joins of those of gradients, and which it leaves
alone; and which sums of activations it joins.

Independent collectives of one kind and type become one of up to `COMBINED_BYTES` (OpenXLA, the combiner passes of
xla/service/gpu/gpu_compiler.cc and xla/service/collective_combiner_utils.h).
"""

import collections
import dataclasses
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from typing import TypeVar

import numpy as np

from autoshard.compiler.def_use import DefUse
from autoshard.cost.collectives import COMBINED_BYTES, MOST_JOINED
from autoshard.graph.graph import Graph
from autoshard.graph.groups import Group

Amount = TypeVar("Amount", float, np.ndarray)


def is_reduced_alone(partial_bytes: Amount) -> Amount:
    """Whether what takes so many bytes on a device before its collective has a collective of its own.

    XLA joins by the bytes that are left behind a reduce-scatter, of partial sums that take as many times more as there
    are devices. One that takes more than `COMBINED_BYTES` itself has nothing to win but a latency that is small beside
    its time, so that execution has it reduced, or gathered, as soon as it is there.
    """
    return partial_bytes > COMBINED_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class CombinedCollectives:
    """How many collectives of weights and gradients the compiler joins, and which sums it reduces together.

    Of activations, kernels wait for each sum. Those that do not wait for each other are joined all the same, such as
    the mean and the mean square of a normalisation over examples, which take latencies and little else. Sums of
    products are taken to be reduced alone: there it is the bytes that count.

    A gradient that is all-reduced finds others to be joined with in every plan. One that is scattered, or a weight that
    is gathered, is sure only of those alike, since a plan treats them alike; the first layer's kernel by itself would
    be joined with nothing.

    An optimizer's statistics, such as Adafactor's sums over the rows of a gradient, are sums of what was summed before
    and of the shape of what it updates; each waits for a gradient, and is joined with hardly anything.

    Attributes:
      num_reductions: How many gradients are reduced.
      num_alike: For each number of elements, how many of them have it.
      statistics: The groups that sum gradients to statistics, whose collectives are combined with no other.
      scalar_shares: For each group that sums to a scalar, how much of one latency it pays: of those of gradients that
        the compiler joins first, such as all norms, its share of what is summed; see `_joined_sums` for the rest. 0
        for others, such as losses, which every plan reduces.
      awaited_shares: For each group that reduces activations and is joined with others, how much of one latency it
        pays.
    """

    num_reductions: int
    num_alike: Mapping[int, int]
    statistics: frozenset[int]
    scalar_shares: Mapping[int, float]
    awaited_shares: Mapping[int, float]


def combined_collectives(
    chains: DefUse, groups: Sequence[Group], gradients: Set[int], weights: Set[int]
) -> CombinedCollectives:
    """What XLA combines of the collectives of `groups`."""
    graph, values = chains.graph, chains.graph.values
    awaited = gradients - weights  # norms of weights can be there from the beginning of the step on
    scalar_bytes: dict[int, float] = {}
    sums: list[Group] = []
    for g in groups:
        if all(f.reduction is None for f in g.factors):
            continue
        if all(not values[a.value].shape for a in g.writes):
            scalar_bytes[g.index] = sum(values[a.value].size_bytes for a in g.reads if a.value in awaited)
        if all(a.value in gradients for a in g.writes):
            sums.append(g)
    state = {values[graph.arguments[o.successor_of].value].shape for o in graph.outputs if o.successor_of is not None}
    statistics = frozenset(
        g.index
        for g in sums
        if any(values[a.value].shape for a in g.writes) and all(values[a.value].shape in state for a in g.reads)
    )
    alike = collections.Counter(math.prod(values[g.writes[-1].value].shape) for g in sums if g.index not in statistics)
    shares = dict.fromkeys(scalar_bytes, 0.0)
    partial = [groups[g] for g, own_bytes in scalar_bytes.items() if own_bytes > 0]
    runs = _joined_sums(graph, partial, [None] * len(partial))
    for n, run in enumerate(runs):
        run_bytes = sum(scalar_bytes[g] for g in run)
        shares.update({run[0]: 1.0} if n else {g: scalar_bytes[g] / run_bytes for g in run})
    return CombinedCollectives(
        min(max(alike.total(), 1), MOST_JOINED),
        {size: min(number, MOST_JOINED) for size, number in alike.items()},
        statistics,
        shares,
        _awaited_shares(chains, groups, gradients),
    )


def _awaited_shares(chains: DefUse, groups: Sequence[Group], gradients: Set[int]) -> dict[int, float]:
    """See `CombinedCollectives.awaited_shares`. Only what is reduced in one way, of one type and in the same loops can
    be joined; and nothing of two checkpointed layers: what is computed again waits for the layer's gradient."""
    graph = chains.graph
    checkpoints = [nesting for nesting in graph.nestings if nesting.is_checkpoint]
    sums: list[Group] = []
    kinds: list[tuple] = []
    for g in groups:
        reductions = {f.reduction for f in g.factors if f.reduction is not None}
        last = graph.values[g.writes[-1].value]
        is_product = any(graph.operations[o].rule.is_heavy for o in g.operations)
        if not reductions or is_product or not last.shape or all(a.value in gradients for a in g.writes):
            continue
        first = graph.operations[g.operations[0]]
        layer = tuple(c.equation for c in checkpoints if c.equation < first.equation < c.stop)
        sums.append(g)
        kinds.append((tuple(sorted(reductions)), last.dtype, chains.loop_nest[first.index], layer))
    return {g: 1 / len(run) for run in _joined_sums(graph, sums, kinds) if len(run) > 1 for g in run}


def _joined_sums(graph: Graph, sums: Sequence[Group], kinds: Sequence[Hashable]) -> list[list[int]]:
    """Which of the groups `sums` are reduced by one collective each time: lists of their indices, in order. Only those
    of one kind are.

    XLA joins them in the order in which a walk from the program's results comes past them, until one is made of one
    that it would be joined with (`CombineInstructionsByKey` in OpenXLA, xla/service/collective_combiner_utils.h). An
    optimizer that clips each update by its own norm has such a pair for every parameter, so that each of these begins a
    collective of its own, and those beside it go along.
    """
    number = {o: n for n, group in enumerate(sums) for o in group.operations}
    made_of = [0] * len(sums)  # of each sum, the others that it depends on, as bits
    reached: dict[int | None, int] = {}
    for operation in graph.operations:
        bits = 0
        for o in operation.operands:
            bits |= reached.get(o, 0)
        own = number.get(operation.index)
        if own is not None:
            made_of[own] |= bits & ~(1 << own)
            bits |= 1 << own
        if bits:
            reached.update((r, bits) for r in operation.results if r is not None)
    runs: list[list[int]] = []
    last: dict[Hashable, tuple[list[int], int]] = {}  # of each kind, the last run, and its sums as bits
    for n in dict.fromkeys(number[o] for o in _post_order(graph) if o in number):
        run, joined_bits = last.get(kinds[n], ([], 0))
        if not run or made_of[n] & joined_bits:
            run, joined_bits = [], 0
            runs.append(run)
        run.append(sums[n].index)
        last[kinds[n]] = run, joined_bits | 1 << n
    return runs


def _post_order(graph: Graph) -> Iterator[int]:
    """The operations that the results need, each after those that it needs; operands and results in their order."""
    maker = {r: operation for operation in graph.operations for r in operation.results if r is not None}
    entered: set[int] = set()
    for output in graph.outputs:
        stack = [(maker[output.value], 0)] if output.value in maker else []
        while stack:
            operation, slot = stack.pop()
            if slot == 0:
                if operation.index in entered:
                    continue
                entered.add(operation.index)
            if slot == len(operation.operands):
                yield operation.index
                continue
            stack.append((operation, slot + 1))
            operand = operation.operands[slot]
            if operand in maker:
                stack.append((maker[operand], 0))
