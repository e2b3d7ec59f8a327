"""The maximum of rows that exponentials are taken less of, as in every softmax."""

from collections.abc import Sequence

from autoshard.graph.graph import Operation


def row_maximum(producer: Sequence[Operation | None], value: int | None) -> Operation | None:
    """The `reduce_max` that a value is, itself or through operations of one operand; None if it is none.

    Args:
      producer: For each value, the operation that makes it. value: What is taken from the rows; None for a literal.
    """
    by = None if value is None else producer[value]
    while by is not None and by.name != "reduce_max":
        names = [o for o in by.operands if o is not None]
        if by.rule.is_heavy or len(names) != 1:
            return None
        by = producer[names[0]]
    return by
