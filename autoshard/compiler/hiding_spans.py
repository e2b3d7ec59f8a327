"""How long what collectives move is there where they run behind products (`Schedule.LATENCY_HIDING`).

The orders of that schedule bound it. A copy may be gathered once its anchor is made, `PREFETCH_DISTANCE` products
before its reader; XLA:GPU does so where less would not hide it. A sum that is reduced alone is there before the
product that is `REDUCED_WITHIN` ahead.
"""

import bisect

from autoshard.compiler.prefetches import PREFETCH_DISTANCE
from autoshard.compiler.primitives import PRODUCTS
from autoshard.compiler.read_in_turn import REDUCED_WITHIN
from autoshard.graph.graph import Graph


class HidingSpans:
    """The products of a graph, by which its collectives are timed."""

    def __init__(self, graph: Graph):
        self._products = [o.index for o in graph.operations if o.name in PRODUCTS]

    def gathered_from(self, reader: int) -> int:
        """The operation from which a gathered copy for operation `reader` is there: the one after its anchor; `reader`
        if it has none."""
        before = bisect.bisect_left(self._products, reader)
        return self._products[before - PREFETCH_DISTANCE] + 1 if before >= PREFETCH_DISTANCE else reader

    def reduced_until(self, product: int) -> int | None:
        """The operation before which the sum of `product` is reduced, if it is reduced alone; None if nothing waits for
        it."""
        after = bisect.bisect_right(self._products, product) + REDUCED_WITHIN - 1
        return self._products[after] if after < len(self._products) else None
