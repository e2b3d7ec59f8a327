"""Builder of a `FactorRule`: hands out factors and closes the rule.

Every function of the table works in the same way: open a space, ask it for the factors, say which dimension of which
tensor carries them, close it.
"""

from autoshard.graph.graph import Attention, Convolved, Dims, Factor, FactorRule, LookUp, Touched

TABLE = "table"
SHARDY = "shardy"
REPLICATED = "replicated"

WHOLE: tuple[int, ...] = ()
"""The factors of a dimension that must not be split."""


class IterationSpace:
    """The factors of one operation, under construction."""

    def __init__(self) -> None:
        self._factors: list[Factor] = []

    def factor(self, size: int, reduction: str | None = None) -> tuple[int, ...]:
        """Adds an index.

        Args:
          size: Extent of the index.
          reduction: How partial results over this index combine, or None if a result carries it.

        Returns:
          The factors of a dimension made of this index alone: a 1-tuple, or `WHOLE` where the extent leaves nothing
          to split.
        """
        if size <= 1:
            return WHOLE
        self._factors.append(Factor(size, reduction))
        return (len(self._factors) - 1,)

    def parallel(self, shape: tuple[int, ...]) -> Dims:
        """Adds one index for each dimension of a shape and returns the dimensions made of them."""
        return tuple(self.factor(size) for size in shape)

    def close(
        self,
        operands: tuple[Dims, ...],
        results: tuple[Dims, ...],
        *,
        flops: float = 0.0,
        is_heavy: bool = False,
        origin: str = TABLE,
        touched: Touched | None = None,
        by_shards: bool = False,
        is_rounded: bool = False,
        narrowed_bytes: int | None = None,
        look_up: LookUp | None = None,
        counted: int | None = None,
        convolved: Convolved | None = None,
        attention: Attention | None = None,
    ) -> FactorRule:
        """Ends the construction; the arguments are those of `FactorRule`."""
        return FactorRule(
            tuple(self._factors),
            operands,
            results,
            float(flops),
            is_heavy,
            origin,
            touched,
            by_shards,
            is_rounded,
            narrowed_bytes,
            look_up,
            counted,
            convolved,
            attention,
        )


def whole(shape: tuple[int, ...]) -> Dims:
    """The dimensions of a tensor that must not be split at all."""
    return (WHOLE,) * len(shape)
