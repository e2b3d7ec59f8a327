"""How long what collectives move is there where they run behind products (`Schedule.LATENCY_HIDING`).

The orders of that schedule bound it: a copy may be gathered `PREFETCH_DISTANCE` products before its reader, and XLA:GPU
begins it as late as one product hides it; a sum that is reduced alone is there `REDUCED_WITHIN` products later.
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
        """The operation from which a gathered copy for operation `reader` is there: the product before, where there are
        `PREFETCH_DISTANCE` of them; else `reader`."""
        before = bisect.bisect_left(self._products, reader)
        return self._products[before - 1] if before >= PREFETCH_DISTANCE else reader

    def reduced_until(self, product: int) -> int | None:
        """The operation before which the sum of `product` is reduced, if it is reduced alone; None if nothing waits for
        it."""
        after = bisect.bisect_right(self._products, product) + REDUCED_WITHIN - 1
        return self._products[after] if after < len(self._products) else None
