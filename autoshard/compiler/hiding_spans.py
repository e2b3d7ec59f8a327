"""When collectives run behind products, and how long what they move is there (`Schedule.LATENCY_HIDING`).

The orders of that schedule bound it: a copy may be gathered `PREFETCH_DISTANCE` products before its reader, and XLA:GPU
begins it as late as hides it, which one product mostly does; a sum that is reduced alone is there `REDUCED_WITHIN`
products later, or more where these are too short to hide it. From Hopper on XLA:GPU expects what products and
collectives take of the hardware (`SolLatencyEstimator`); for GPUs before, any collective takes as long as
`UNTIMED_PRODUCTS` products (`GpuLatencyEstimator`).
"""

import bisect
import math

from autoshard.compiler.collective_combiner import is_reduced_alone
from autoshard.compiler.pace import Pace
from autoshard.compiler.prefetches import LEAST_HELD_BYTES, PREFETCH_DISTANCE, TPU_PREFETCH_DISTANCE
from autoshard.compiler.primitives import PRODUCTS
from autoshard.graph.graph import Graph

REDUCED_WITHIN = 4
"""How many products after one its sum must be there at the earliest, if it is reduced alone: those between hide it.
What contains products, such as a checkpointed layer, waits if it contains the last of these."""

FEW_PRODUCTS = 4
"""So many must be before a copy's reader for its gather to wait for the last of them, in programs compiled for H100s
(`benchmarks/verify_matrix.py`)."""

UNTIMED_PRODUCTS = 5
"""How many products XLA:GPU's scheduler puts beside a collective where it does not ask how long they take: latency 5000
and cost 1000 in OpenXLA, xla/service/gpu/gpu_latency_hiding_scheduler.cc."""

QUEUED_WITHIN = 24
"""How many products after one its sum is reduced, if nothing waits for it. One collective is in flight at a time, and
XLA:GPU's scheduler, built from the end, begins each as late as it may: GPT and an encoder-decoder under ZeRO-3 have
most reduced 0 to 24 products later, few up to 34 (`benchmarks/verify_matrix.py`, 8 and 16 H100). Where gathers keep the
link busy it was up to 60 (an encoder-decoder): so the product that comes so much later waits for a sum that is joined
with none, in the orders that bound memory (`read_in_turn.py`)."""

REDUCED_IN = 2.0
"""In what time after its product a sum must be there that is reduced alone, as a multiple of its own: one collective is
in flight at a time, so that one like it may be sent before. A mixture of experts on 8 H100, whose products are short,
exposes 1.2 ms where sums are due four products later, 0.7 in 1.5 of their times, 0.3 in twice, 0.8 in three times, and
0.7 in four (built from the end, each sum is begun as late as it may, and meets others that are due later)."""

EXCHANGED_WITHIN = REDUCED_WITHIN + TPU_PREFETCH_DISTANCE
"""How many products after one its sum is there, if it is exchanged: a weight that is read so much later waits for it
(`gradients_in_time.py`). Until then both are there, what a device sends and what it receives, which take as much as the
whole: of an encoder of two layers on 16 TPU v5e, 0.5 GB of 2.3."""


class HidingSpans:
    """The products of a graph, by which its collectives are timed.

    Attributes:
      hides_sums: Whether sums run behind products as well, each by itself but for small ones, and not only copies.
      exchanges_sums: Whether sums are made by an exchange (`exchanged_sums.py`).
      hidden_behind: How many products the compiler puts beside a gather.
      pace: What kernels and sums take; None where sums are given a number of products.
    """

    def __init__(
        self,
        graph: Graph,
        hides_sums: bool = True,
        exchanges_sums: bool = False,
        hidden_behind: int = 1,
        pace: Pace | None = None,
    ) -> None:
        self._graph = graph
        self._products = [o.index for o in graph.operations if o.name in PRODUCTS]
        self._num_operations = len(graph.operations)
        self._loops = graph.loops
        self.hides_sums, self.exchanges_sums, self.hidden_behind = hides_sums, exchanges_sums, hidden_behind
        self.pace = pace
        self._distance = PREFETCH_DISTANCE if hides_sums else TPU_PREFETCH_DISTANCE
        self._begins_s = [] if pace is None else [pace.before_s[product] for product in self._products]

    def gathered_from(self, reader: int, read_before: int = -1) -> int:
        """The operation from which a gathered copy for operation `reader` is there: the product before, or as many
        before as the compiler puts beside a gather, where there are `FEW_PRODUCTS`; else `reader`.

        `read_before`: The operation that read the same last. If it is less than that many products before, it is the
        copy's anchor, and the copy is there right behind it: few kernels are left to hide it.
        """
        before = bisect.bisect_left(self._products, reader)
        if before < FEW_PRODUCTS:
            return reader
        is_anchor = read_before > self._products[before - FEW_PRODUCTS]
        if is_anchor:
            return read_before + 1
        return max(self._products[max(before - self.hidden_behind, 0)], read_before + 1)

    def hidden_from(self, reader: int, size_bytes: float) -> int:
        """The operation from which on a gather for operation `reader` runs behind kernels: the one behind its anchor;
        0 if it has none. `size_bytes`: Of the whole value."""
        before = bisect.bisect_left(self._products, reader)
        is_held = before >= self._distance and size_bytes > LEAST_HELD_BYTES
        return self._products[before - self._distance] + 1 if is_held else 0

    def hidden_until(self, made: int, size_bytes: float) -> int:
        """The operation before which a gradient is summed and moved that is known from operation `made` on; one past
        the last where nothing but the update waits for it. `size_bytes`: Of the whole; a device has no more to sum.
        """
        within = self._reduced_within(made, size_bytes) if is_reduced_alone(size_bytes) else QUEUED_WITHIN
        after = bisect.bisect_left(self._products, made) + within - 1
        return self._products[after] if after < len(self._products) else self._num_operations

    def reduced_until(self, product: int) -> int | None:
        """The operation before which the sum of `product` is reduced, if it is reduced alone; None if nothing waits for
        it."""
        within = EXCHANGED_WITHIN if self.exchanges_sums else self.reduced_within(product)
        after = bisect.bisect_right(self._products, product) + within - 1
        return self._products[after] if after < len(self._products) else None

    def reduced_within(self, product: int) -> int:
        """How many products after `product` its sum must be there, if it is reduced alone."""
        result = self._graph.operations[product].results[0]
        size_bytes = 0.0 if result is None else self._graph.values[result].size_bytes
        return self._reduced_within(product + 1, size_bytes)

    def _reduced_within(self, made: int, size_bytes: float) -> int:
        """How many products before a sum is there that is known from operation `made` on: `REDUCED_WITHIN`, or so many
        that `REDUCED_IN` times its own time is over; no more than `QUEUED_WITHIN`, nor than are left in its loop or
        the program, since behind the last of them little is left to hide it."""
        if self.pace is None:
            return REDUCED_WITHIN
        around = [loop for loop in self._loops if loop.start < made <= loop.stop]
        own_s = math.prod(loop.trips for loop in around) * self.pace.sum_s(size_bytes)
        first, due_s = bisect.bisect_left(self._products, made), self.pace.before_s[made] + REDUCED_IN * own_s
        in_time = bisect.bisect_left(self._begins_s, due_s) - first + 1
        end = min([self._num_operations, *(loop.stop for loop in around)])
        left = bisect.bisect_left(self._products, end) - first
        return max(min(in_time, QUEUED_WITHIN, left), REDUCED_WITHIN)

    def queued_until(self, product: int) -> int:
        """The operation before which the sum of `product` is reduced, if nothing waits for it: in its loop, if it is in
        one. At once where there are no products, as in a stage that only looks rows up."""
        if not self._products:
            return product + 1
        after = bisect.bisect_right(self._products, product) + QUEUED_WITHIN - 1
        until = self._products[min(after, len(self._products) - 1)]
        ends = [loop.stop for loop in self._loops if loop.start <= product < loop.stop]
        return max(min([until, *ends]), product + 1)
