"""The rows of the matrices of a product, if they lie in memory as they are written."""

import itertools
from collections.abc import Set

from autoshard.graph.graph import Dims, FactorRule

Row = tuple[tuple[int, ...], bool]
"""The factors whose elements lie together, and whether the product sums along them."""


def product_rows(rule: FactorRule) -> tuple[Row, ...]:
    """Of both matrices of a `dot_general` and of its result, a row; none of batched products.

    Dimensions of one side that follow each other are one: of a product (heads, size) x (examples, positions) a row has
    as many elements as there are positions of all examples.
    """
    left, right, result = (*rule.operands[:2], rule.results[0])
    whole = lambda dims: {f for dim in dims for f in dim if rule.factors[f].size > 1}
    if whole(left) & whole(right) & whole(result):
        return ()
    summed = (whole(left) & whole(right)) - whole(result)
    rows = (
        _row(left, summed, whole(left)),
        _row(right, summed, whole(right)),
        (_row(result, whole(left), whole(result))[0], False),
    )
    return tuple(row for row in rows if row[0])


def _row(dims: Dims, side: Set[int], sizable: Set[int]) -> Row:
    """The last dimensions that are all of `side`, or none of them, and whether they are."""
    kept = [own for dim in reversed(dims) if (own := [f for f in dim if f in sizable])]
    if not kept:
        return (), False
    is_of_side = kept[0][0] in side
    same = itertools.takewhile(lambda dim: all((f in side) == is_of_side for f in dim), kept)
    return tuple(f for dim in same for f in dim), is_of_side
