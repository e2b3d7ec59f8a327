"""Reductions of rows that the kernels which read the result do by themselves.

XLA:GPU makes one kernel, one of Triton's, of a reduction of rows and of what reads both the rows and the result
(`SoftmaxRewriterTriton`): of a softmax, or of a normalization. Where something behind the next product needs the
result too, such as the backward pass, the reduction is a kernel of its own; and where rows are read that were turned
around (`memory_orders.py`).
"""

import math
from collections.abc import Mapping

from autoshard.compiler.def_use import DefUse
from autoshard.compiler.live_ranges import LiveRanges
from autoshard.graph.graph import Operation

_MOST_ELEMENTS = 2**14
"""Elements of the longest row: of programs compiled for H100s, softmaxes over 2,048 elements are one kernel, and the
losses over vocabularies of 32,768 and of 128,256 are not.
"""


def reduced_rows(chains: DefUse, live: LiveRanges) -> Mapping[int, frozenset[int]]:
    """For each result of such a reduction, the stored values that its readers fetch instead."""
    values, found, not_kept = chains.graph.values, dict[int, frozenset[int]](), set[int]()
    for life in sorted(live.ranges, key=lambda life: life.start):
        operation = chains.producer[life.value]
        if operation is None or live.region[life.stop - 1] != live.region[operation.index]:
            continue
        row = reduced_row(operation)
        if not row or _is_kept(life.value, chains, live, not_kept):
            continue
        read = [o for o in operation.operands if o is not None]
        sources = frozenset(s for o in read for s in fetched_for(o, live, found))
        elements = math.prod(values[read[0]].shape)
        whole = [values[v].shape for v in (*read, *sources) if math.prod(values[v].shape) == elements]
        if sources.isdisjoint(live.turned) and all(shape[-len(row) :] == row for shape in whole):  # rows in memory, too
            found[life.value] = sources
    return found


def fetched_for(value: int, live: LiveRanges, rows: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """The stored values that a kernel fetches if it reads `value`; `rows`: what is known of `reduced_rows`."""
    made_of = live.made_of.get(value)
    if made_of is None:
        return rows.get(value) or frozenset((value,))
    if rows.keys().isdisjoint(made_of):
        return made_of
    return frozenset(s for m in made_of for s in rows.get(m, (m,)))


def _is_kept(value: int, chains: DefUse, live: LiveRanges, not_kept: set[int]) -> bool:
    """Whether a result, or anything else with an element for each row, is stored and not only read on the way.

    `not_kept`: Values that are known not to be; what is found out is added.
    """
    values, front, seen = chains.graph.values, [value], {value}
    size = math.prod(values[value].shape)
    while front:
        one = front.pop()
        if one in chains.outputs:
            return True
        for reader, _ in chains.consumers[one]:
            new = [r for r in reader.results if r is not None and r not in seen and r not in not_kept]
            alike = [r for r in new if math.prod(values[r].shape) == size]
            if not reader.name.startswith("reduce_") and not live.stored.isdisjoint(alike):
                return True
            front += alike
            seen.update(alike)
    not_kept |= seen
    return False


def reduced_row(operation: Operation) -> tuple[int, ...]:
    """The extents of the last dimensions of an operand, if an operation reduces these, and no others; else none."""
    rule = operation.rule
    if not operation.name.startswith("reduce_") or rule.is_heavy:
        return ()
    is_reduced = [bool(dim) and all(rule.factors[f].reduction for f in dim) for dim in rule.operands[0]]
    count = sum(is_reduced)
    row = tuple(math.prod(rule.factors[f].size for f in dim) for dim in rule.operands[0][len(is_reduced) - count :])
    return row if count and all(is_reduced[-count:]) and 1 < math.prod(row) <= _MOST_ELEMENTS else ()
