"""From when on each gathered copy may be made, where collectives run behind kernels (`Schedule.LATENCY_HIDING`).

A weight is there when a step begins. Left alone, the compiler might gather it long before it is read, make one copy for
the forward and the backward pass and keep it in between, or gather a whole layer's weights together. So each copy is
held back until an earlier product is made, its anchor: between that and its reader there are other products, behind
which it can be gathered. Prefetching FSDP does the same. No anchor is before another reader of the same: both would
read one copy, kept in between.
"""

import bisect
import collections
from collections.abc import Sequence

from autoshard.compiler.early_products import has_product
from autoshard.compiler.planned_graph import PlannedGraph
from autoshard.graph.computations import Computation, Instruction
from autoshard.graph.layout import SpecEntries

PREFETCH_DISTANCE = 4
"""How many products before its reader a copy's anchor is. Attention's products are short: in simulated schedules of GPT
(8 layers, 16 H100) with the plan's own costs, 13 ms stay exposed at two, 7.6 at three, 1.6 at four. XLA begins a copy
as late as hides it, whatever the anchor."""

_LEAST_BYTES = 2**20
"""Copies of no more than 1 MiB, such as of biases and norms' scales, are left to the compiler, which joins them: one
collective is in flight at a time, and each such copy at its own time would cut off a large one's."""

_MOST_MADE = 4
"""How many equations make a weight's shard ready at most: it is cast, transposed, given another shape."""


class Prefetches:
    """The anchors of the gathered copies of one computation.

    Attributes:
      held: For anchors, by equation, (equation, operand slot) of the copies.
      moved: For the equations that make a shard ready, such as its cast, the anchor that they are evaluated before:
        what is tied must be what is gathered.
    """

    def __init__(self, planned: PlannedGraph, order: Computation):
        """`order`: The instructions of the computation as they are evaluated."""
        self.planned, self.order = planned, order
        self.held: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
        self.moved: dict[int, int] = {}
        self._made_at = {r: at for at, i in enumerate(order) for r in i.results if r is not None}
        products: list[int] = []
        read_at: dict[tuple[int | None, SpecEntries], int] = {}  # a value and a layout -> where it was last read so
        for at, instruction in enumerate(order):
            copies = [(slot, steps[-1]) for slot, steps in planned.plan_of(instruction).operands]
            for slot, read_as in copies:
                if len(products) >= PREFETCH_DISTANCE and _is_gathered(planned, instruction, slot, read_as):
                    before = read_at.get((instruction.operands[slot], read_as), 0)
                    anchor = max(len(products) - PREFETCH_DISTANCE, bisect.bisect_left(products, before))
                    if anchor < len(products):
                        self._hold(instruction, slot, products[anchor])
            read_at.update(((instruction.operands[slot], read_as), at) for slot, read_as in copies)
            if has_product(instruction):
                products.append(at)

    def _hold(self, reader: Instruction, slot: int, anchor: int) -> None:
        """Holds a copy back until the instruction at `anchor` is done, if its shard can be there by then."""
        making = self._making(reader.operand(slot), anchor)
        if making is None:
            return
        number = self.order[anchor].equation
        for at in making:
            self.moved[self.order[at].equation] = number
            self._made_at.update((r, anchor - 1) for r in self.order[at].results if r is not None)
        self.held[number].append((reader.equation, slot))

    def _making(self, value: int, anchor: int) -> Sequence[int] | None:
        """What makes `value` and must be evaluated before `anchor`; None if it cannot be."""
        found: list[int] = []
        while (at := self._made_at.get(value, -1)) >= anchor:
            instruction = self.order[at]
            operands = [o for o in instruction.operands if o is not None]
            if at == anchor or instruction.operation is None or instruction.leaf.rule.is_heavy or len(operands) != 1:
                return None
            if len(instruction.results) != 1 or self.planned.plan_of(instruction).operands or len(found) == _MOST_MADE:
                return None
            found.append(at)
            value = operands[0]
        return found


def _is_gathered(planned: PlannedGraph, instruction: Instruction, slot: int, read_as: SpecEntries) -> bool:
    """Whether an operand is read in larger pieces than it lies in, and those are large."""
    lies, value = planned.layout_of(instruction, slot), instruction.operands[slot]
    if lies is None or value is None:
        return False
    return planned.shard_bytes(value, read_as) > max(planned.shard_bytes(value, lies), _LEAST_BYTES)
