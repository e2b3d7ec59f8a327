"""From when on each gathered copy may be made, where collectives run behind kernels (`Schedule.LATENCY_HIDING`).

A weight is there when a step begins. Left alone, the compiler might gather it long before it is read, make one copy for
the forward and the backward pass and keep it in between, or gather a whole layer's weights together. So each copy is
held back until an earlier product is made, its anchor: between that and its reader there are other products, behind
which it can be gathered. Prefetching FSDP does the same. No anchor is before another reader of the same: both would
read one copy, kept in between.
"""

import bisect
import collections
import itertools
from collections.abc import Mapping, Sequence, Set

from autoshard.compiler.early_products import has_product
from autoshard.compiler.planned_graph import PlannedGraph
from autoshard.compiler.transfer_times import TransferTimes
from autoshard.graph.computations import Computation, Instruction, first_operation, last_operation
from autoshard.graph.layout import SpecEntries

PREFETCH_DISTANCE, TPU_PREFETCH_DISTANCE = 16, 4
"""How many products before its reader a copy's anchor is, for XLA:GPU and for XLA:TPU. Attention's products are short:
of a GPT of 8 layers on 16 H100 planned for 8 GB 2.5 ms stayed exposed at four, and 1.6 at sixteen; of an
encoder-decoder 2.3 and 1.2 (`benchmarks/exposed.py`). XLA:GPU begins a copy as late as hides it, whatever the anchor,
so that it took no more memory."""

LEAST_HELD_BYTES = 2**20
"""Copies of no more than 1 MiB, such as of biases and norms' scales, are left to the compiler, which joins them: one
collective is in flight at a time, and each such copy at its own time would cut off a large one's."""

_MOST_MADE = 4
"""How many equations make a weight's shard ready at most: it is cast, transposed, given another shape."""


class Prefetches:
    """The anchors of the gathered copies of one computation.

    Attributes:
      held: For anchors, by equation, (equation, operand slot) of the copies.
      opened: Of checkpointed functions, by equation, the operand slots that do not wait with the others.
      following: For XLA:TPU, by equation, (own operand slot, equation, operand slot) of the copy that is gathered next.
      moved: For the equations that make a shard ready, such as its cast, the anchor that they are evaluated before:
        what is tied must be what is gathered.
    """

    def __init__(
        self,
        planned: PlannedGraph,
        order: Computation,
        times: TransferTimes | None = None,
        awaited: Set[int | None] | None = None,
    ):
        """
        Args:
          order: The instructions of the computation as they are evaluated.
          times: When copies begin to be gathered; None for `PREFETCH_DISTANCE` products before their readers.
          awaited: For XLA:TPU, the values that products are made of. Of other products none is counted, since that
            compiler makes them when it likes. And no product is an anchor whose result is larger than what it is made
            of but weights, as the compiler could compute nothing inside its kernel that reads that. The one before it
            is instead.
        """
        self.planned, self.order, self.times = planned, order, times
        self._awaited = awaited
        self._distance = PREFETCH_DISTANCE if awaited is None else TPU_PREFETCH_DISTANCE
        self.opened: dict[int, tuple[int, ...]] = {}
        self.held: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
        self.following: dict[int, tuple[tuple[int, int, int], ...]] = {}
        self.moved: dict[int, int] = {}
        self._made_at = {r: at for at, i in enumerate(order) for r in i.results if r is not None}
        self._products: list[int] = []  # positions of those before the current instruction
        self._done: list[int] = []  # for each, one past its last operation
        self._is_anchor: list[bool] = []  # for each, whether copies may wait for it
        copied: list[tuple[int, int]] = []  # where copies are read, and in which slot
        read_at: dict[tuple[int | None, SpecEntries], int] = {}  # a value and a layout -> where it was last read so
        read_of: dict[int | None, int] = {}  # what a value is made of -> where it was last read in another layout
        for at, instruction in enumerate(order):
            copies = [(slot, steps[-1]) for slot, steps in planned.plan_of(instruction).operands]
            for slot, read_as in copies:
                if _is_gathered(planned, instruction, slot, read_as):
                    before = read_at.get((instruction.operands[slot], read_as), -1)
                    is_held = self._hold_behind(instruction, slot, self._wanted(instruction, slot), before)
                    if is_held or before < 0:
                        copied.append((at, slot))
            read_at.update(((instruction.operands[slot], read_as), at) for slot, read_as in copies)
            if times is not None:
                if instruction.is_checkpoint:
                    self._open(instruction, times, read_of)
                read_of.update((self._root(instruction.operands[slot]), at) for slot, _ in copies)
            is_counted = awaited is None or not awaited.isdisjoint(instruction.results)
            if is_counted and has_product(instruction):
                self._products.append(at)
                self._done.append(last_operation(instruction) + 1)
                self._is_anchor.append(awaited is None or self._is_small(instruction))
        if awaited is not None:
            self._follow(copied)

    def _wanted(self, reader: Instruction, slot: int) -> int:
        """The number of the product behind which a copy may be gathered; -1 for none: what matters then is only what
        read the same before."""
        if self.times is None:
            return max(len(self._products) - self._distance, -1)
        begin = self.times.begins.get((reader.equation, slot))
        return -1 if begin is None else self._done_by(begin)

    def _done_by(self, begin: int) -> int:
        """The number of the product that is so many before the last one done by the operation `begin`: a collective
        that is sent in between is not interrupted. -1 if there is none."""
        return max(bisect.bisect_left(self._done, begin) - 1 - self._distance, -1)

    def _follow(self, copied: Sequence[tuple[int, int]]) -> None:
        """Has each copy of those `copied` gathered when the one that is read before it is there."""
        for (first, own), (second, slot) in itertools.pairwise(copied):
            reader, later = self.order[first], self.order[second]
            making = self._making(later.operand(slot), first) if first < second else None
            if making is not None and not reader.nested:
                self._move(making, first)
                self.following[reader.equation] = ((own, later.equation, slot),)

    def _hold_behind(self, reader: Instruction, slot: int, wanted: int, before: int) -> bool:
        """Holds a copy back until the product number `wanted` is done, or the first one from position `before` on,
        where the same was read last; whether there is one."""
        least = bisect.bisect_left(self._products, before) if before >= 0 else -1
        number = max(wanted, least)
        if not 0 <= number < len(self._products):
            return False
        if self._awaited is not None and number == least == len(self._products) - 1:  # then XLA:TPU keeps the copy
            return False
        small = (n for n in range(number, max(least, 0) - 1, -1) if self._is_anchor[n])
        found = next(small, number if before >= 0 else None)  # but nothing is read twice from one copy
        return found is not None and self._hold(reader, slot, self._products[found])

    def _is_small(self, product: Instruction) -> bool:
        """Whether a result is no larger, on a device, than what it is made of, weights left out."""
        plan = self.planned.plan_of(product)
        if product.nested:
            return True
        read_as = {slot: steps[-1] for slot, steps in plan.operands}
        made_of = [
            self.planned.shard_bytes(o, read_as.get(slot) or self.planned.layout_of(product, slot) or ())
            for slot, o in enumerate(product.operands)
            if o is not None and not self._is_weight(o)
        ]
        entries = dict(plan.results)
        results = [
            self.planned.shard_bytes(r, entries.get(k, ())) for k, r in enumerate(product.results) if r is not None
        ]
        return max(results, default=0.0) <= max(made_of, default=0.0)

    def _is_weight(self, value: int) -> bool:
        """Whether a value is an argument in another form."""
        root = self._root(value)
        return root is not None and root not in self._made_at

    def _open(self, nest: Instruction, times: TransferTimes, read_of: Mapping[int | None, int]) -> None:
        """Lets what is gathered inside a checkpointed function begin before all that enters it is there."""
        opened = {s: begin for s, begin in _begins_inside(nest, times).items() if begin < first_operation(nest)}
        for slot, begin in opened.items():
            self._hold_behind(nest, slot, self._done_by(begin), read_of.get(self._root(nest.operands[slot]), -1))
        if opened:
            self.opened[nest.equation] = tuple(sorted(opened))

    def _root(self, value: int | None) -> int | None:
        """What a value is made of by equations that only give it another form."""
        while value is not None and (at := self._made_at.get(value)) is not None:
            source = given_form(self.order[at])
            if source is None:
                break
            value = source
        return value

    def _hold(self, reader: Instruction, slot: int, anchor: int) -> bool:
        """Holds a copy back until the instruction at `anchor` is done, if its shard can be there by then."""
        making = self._making(reader.operand(slot), anchor)
        if making is None:
            return False
        self._move(making, anchor)
        self.held[self.order[anchor].equation].append((reader.equation, slot))
        return True

    def _move(self, making: Sequence[int], before: int) -> None:
        """Has the instructions `making` evaluated before the one at `before`."""
        for at in making:
            self.moved[self.order[at].equation] = self.order[before].equation
            self._made_at.update((r, before - 1) for r in self.order[at].results if r is not None)

    def _making(self, value: int, anchor: int) -> Sequence[int] | None:
        """What makes `value` and must be evaluated before `anchor`; None if it cannot be."""
        found: list[int] = []
        while (at := self._made_at.get(value, -1)) >= anchor:
            instruction = self.order[at]
            source = given_form(instruction)
            if at == anchor or source is None:
                return None
            if len(instruction.results) != 1 or self.planned.plan_of(instruction).operands or len(found) == _MOST_MADE:
                return None
            found.append(at)
            value = source
        return found


def given_form(instruction: Instruction) -> int | None:
    """The only operand of a light equation, such as a cast, which gives it another form; None of any other equation."""
    operands = [o for o in instruction.operands if o is not None]
    if instruction.operation is None or instruction.leaf.rule.is_heavy or len(operands) != 1:
        return None
    return operands[0]


def _begins_inside(nest: Instruction, times: TransferTimes) -> dict[int, int]:
    """For operands of an equation that nests a computation, by slot, when the first copy of them is gathered inside."""
    made_of = {o: slot for slot, o in enumerate(nest.operands) if o is not None}
    found: dict[int, int] = {}
    for instruction in nest.nested[0]:
        for slot, o in enumerate(instruction.operands):
            begin = times.begins.get((instruction.equation, slot))
            if begin is not None and o in made_of:
                found[made_of[o]] = min(found.get(made_of[o], begin), begin)
        source = given_form(instruction)
        if source in made_of:
            made_of.update((r, made_of[source]) for r in instruction.results if r is not None)
    return found


def _is_gathered(planned: PlannedGraph, instruction: Instruction, slot: int, read_as: SpecEntries) -> bool:
    """Whether an operand is read in larger pieces than it lies in, and those are large."""
    lies, value = planned.layout_of(instruction, slot), instruction.operands[slot]
    if lies is None or value is None:
        return False
    return planned.shard_bytes(value, read_as) > max(planned.shard_bytes(value, lies), LEAST_HELD_BYTES)
