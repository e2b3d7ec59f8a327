"""From when on each gathered copy may be made, where collectives run behind kernels (`Schedule.LATENCY_HIDING`).

A weight is there when a step begins. Left alone, the compiler might gather it long before it is read, make one copy for
the forward and the backward pass and keep it in between, or gather a whole layer's weights together. So each copy is
held back until an earlier product is made, its anchor: between that and its reader there are other products, behind
which it can be gathered. Prefetching FSDP does the same. No anchor is before another reader of the same: both would
read one copy, kept in between.
"""

import bisect
import collections
from collections.abc import Mapping, Sequence

from autoshard.compiler.early_products import has_product
from autoshard.compiler.planned_graph import PlannedGraph
from autoshard.compiler.transfer_times import TransferTimes
from autoshard.graph.computations import Computation, Instruction, first_operation, is_checkpoint, last_operation
from autoshard.graph.layout import SpecEntries

PREFETCH_DISTANCE = 4
"""How many products before its reader a copy's anchor is. Attention's products are short: in simulated schedules of GPT
(8 layers, 16 H100) with the plan's own costs, 13 ms stay exposed at two, 7.6 at three, 1.6 at four. XLA begins a copy
as late as hides it, whatever the anchor."""

_LEAST_BYTES = 2**20
"""Copies of no more than 1 MiB, such as of biases and norms' scales, are left to the compiler, which joins them: one
collective is in flight at a time, and each such copy at its own time would cut off a large one's."""

_SLACK = PREFETCH_DISTANCE
"""How many products earlier than the plan's schedule tells a copy may begin: a collective that is sent in between is
not interrupted."""

_MOST_MADE = 4
"""How many equations make a weight's shard ready at most: it is cast, transposed, given another shape."""


class Prefetches:
    """The anchors of the gathered copies of one computation.

    Attributes:
      held: For anchors, by equation, (equation, operand slot) of the copies.
      opened: Of checkpointed functions, by equation, the operand slots that do not wait with the others.
      moved: For the equations that make a shard ready, such as its cast, the anchor that they are evaluated before:
        what is tied must be what is gathered.
    """

    def __init__(self, planned: PlannedGraph, order: Computation, times: TransferTimes | None = None):
        """
        Args:
          order: The instructions of the computation as they are evaluated.
          times: When copies begin to be gathered; None for `PREFETCH_DISTANCE` products before their readers.
        """
        self.planned, self.order, self.times = planned, order, times
        self.opened: dict[int, tuple[int, ...]] = {}
        self.held: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
        self.moved: dict[int, int] = {}
        self._made_at = {r: at for at, i in enumerate(order) for r in i.results if r is not None}
        products: list[int] = []
        read_of: dict[int | None, int] = {}  # what a value is made of -> where it was last read in another layout
        read_at: dict[tuple[int | None, SpecEntries], int] = {}  # a value and a layout -> where it was last read so
        for at, instruction in enumerate(order):
            copies = [(slot, steps[-1]) for slot, steps in planned.plan_of(instruction).operands]
            for slot, read_as in copies:
                if _is_gathered(planned, instruction, slot, read_as):
                    before = read_at.get((instruction.operands[slot], read_as), -1)
                    self._hold_from(instruction, slot, products, self._distance(instruction, slot, products), before)
            if times is not None and is_checkpoint(instruction):
                self._open(instruction, products, read_of)
            read_at.update(((instruction.operands[slot], read_as), at) for slot, read_as in copies)
            read_of.update((self._root(instruction.operands[slot]), at) for slot, _ in copies)
            if has_product(instruction):
                products.append(at)

    def _distance(self, reader: Instruction, slot: int, products: Sequence[int]) -> int | None:
        """How many of the `products` before its reader a copy may be gathered behind; None if behind none."""
        if self.times is None:
            return PREFETCH_DISTANCE if len(products) >= PREFETCH_DISTANCE else None
        begin = self.times.begins.get((reader.equation, slot))
        return None if begin is None else self._behind(products, begin)

    def _behind(self, products: Sequence[int], begin: int) -> int | None:
        """How many of the last `products` are not done before the operation `begin`, and `_SLACK` more; None if that is
        all of them."""
        done = bisect.bisect_left(products, begin, key=lambda at: last_operation(self.order[at]) + 1) - _SLACK
        return len(products) - done + 1 if done > 0 else None

    def _hold_from(
        self, reader: Instruction, slot: int, products: Sequence[int], distance: int | None, before: int
    ) -> None:
        """Holds a copy back until `distance` products before its reader, or the first from `before` on, where the same
        was read last."""
        first = bisect.bisect_left(products, before) if before >= 0 else -1
        anchor = max(first, -1 if distance is None else len(products) - distance)
        if 0 <= anchor < len(products) and (distance is not None or self.times is not None):
            self._hold(reader, slot, products[anchor])

    def _open(self, nest: Instruction, products: Sequence[int], read_of: Mapping[int | None, int]) -> None:
        """Lets what is gathered inside a checkpointed function begin before all that enters it is there."""
        assert self.times is not None
        begins = _begins_inside(nest, self.times)
        opened = {slot: begin for slot, begin in begins.items() if begin < first_operation(nest)}
        for slot, begin in opened.items():
            distance, before = self._behind(products, begin), read_of.get(self._root(nest.operands[slot]), -1)
            self._hold_from(nest, slot, products, distance, before)
        if opened:
            self.opened[nest.equation] = tuple(sorted(opened))

    def _root(self, value: int | None) -> int | None:
        """What a value is made of by equations that only give it another form."""
        while value is not None and (at := self._made_at.get(value)) is not None:
            instruction = self.order[at]
            operands = [o for o in instruction.operands if o is not None]
            if instruction.operation is None or instruction.leaf.rule.is_heavy or len(operands) != 1:
                break
            value = operands[0]
        return value

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


def _begins_inside(nest: Instruction, times: TransferTimes) -> dict[int, int]:
    """For operands of an equation that nests a computation, by slot, when the first copy of them is gathered inside."""
    made_of = {o: slot for slot, o in enumerate(nest.operands) if o is not None}
    found: dict[int, int] = {}
    for instruction in nest.nested[0]:
        for slot, o in enumerate(instruction.operands):
            begin = times.begins.get((instruction.equation, slot))
            if begin is not None and o in made_of:
                found[made_of[o]] = min(found.get(made_of[o], begin), begin)
        operands = [o for o in instruction.operands if o is not None]
        if len(operands) == 1 and operands[0] in made_of and instruction.operation is not None:
            if not instruction.leaf.rule.is_heavy:
                made_of.update((r, made_of[operands[0]]) for r in instruction.results if r is not None)
    return found


def _is_gathered(planned: PlannedGraph, instruction: Instruction, slot: int, read_as: SpecEntries) -> bool:
    """Whether an operand is read in larger pieces than it lies in, and those are large."""
    lies, value = planned.layout_of(instruction, slot), instruction.operands[slot]
    if lies is None or value is None:
        return False
    return planned.shard_bytes(value, read_as) > max(planned.shard_bytes(value, lies), _LEAST_BYTES)
