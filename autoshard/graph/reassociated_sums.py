"""Sums whose terms are all partial sums: the terms are added first and reduced once."""

from collections.abc import Sequence

from autoshard.graph.factor_sets import FactorSets
from autoshard.graph.graph import Operation, OperationKind

_SUMS = frozenset({"add", "add_any"})


Uses = dict[int, list[tuple[Operation, int]]]
"""For each value, who reads it: (operation, operand slot)."""


def reassociated_sums(
    operations: Sequence[Operation], pointwise: Sequence[bool], uses: Uses
) -> dict[int, list[Operation]]:
    """For each addition whose terms are all partial sums used nowhere else, the operations that make the terms.

    Terms are reducing operations with equal result dimensions and equal reduced factors, or such additions themselves.
    """
    producer = {r: o for o in operations for r in o.results if r is not None}
    sums: dict[int, list[Operation]] = {}
    for operation in operations:
        if operation.name not in _SUMS or not pointwise[operation.index] or operation.results[0] is None:
            continue
        read = [o for o in operation.operands if o in producer]
        terms = [producer[o] for o in read]
        if len(terms) == len(operation.operands) and all(
            len(uses[o]) == 1 and t.trips == operation.trips and (t.index in sums or _is_partial_sum(t))
            for t, o in zip(terms, read, strict=True)
        ):
            makers = [m for t in terms for m in sums.get(t.index, [t])]
            if len({_reduced_sizes(m) for m in makers}) == 1:
                sums[operation.index] = makers
    return sums


def _is_partial_sum(operation: Operation) -> bool:
    reductions = [f.reduction for f in operation.rule.factors if f.reduction is not None and f.size > 1]
    return (
        operation.kind is OperationKind.EQUATION
        and len(operation.results) == 1
        and bool(reductions)
        and set(reductions) == {"add"}
        and all(len(f) == 1 for f in operation.rule.results[0])
    )


def _reduced_sizes(operation: Operation) -> tuple[int, ...]:
    return tuple(f.size for f in operation.rule.factors if f.reduction is not None and f.size > 1)


def join_sums(
    sums: dict[int, list[Operation]],
    operations: Sequence[Operation],
    joined: list[tuple[int, int]],
    factors: FactorSets,
) -> None:
    """Joins each addition with the makers of its terms, and adds the pairs of operations to `joined`; their reduced
    factors are paired in order.
    """
    start = factors.start
    for index, makers in sums.items():
        first, addition = makers[0], operations[index]
        reduced = lambda m: [
            start[m.index] + f for f, x in enumerate(m.rule.factors) if x.reduction is not None and x.size > 1
        ]
        pairs = [(a, b) for m in makers[1:] for a, b in zip(reduced(first), reduced(m), strict=True)]
        for m in (addition, *makers[1:]):
            pairs += [
                (start[first.index] + f[0], start[m.index] + g[0])
                for f, g in zip(first.rule.results[0], m.rule.results[0], strict=True)
            ]
        joined += [(first.index, m.index) for m in (addition, *makers)]
        for a, b in pairs:
            factors.join(a, b)
