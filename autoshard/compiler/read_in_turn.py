"""Which products and sums must be made before what comes after them, where collectives run behind kernels.

Built from the end, XLA:GPU's latency-hiding scheduler puts what only the update of the state needs last of all: the
products that make weight gradients, the sums that make those of biases and of norms' scales, and their collectives. The
activations of all layers and their gradients would wait for them. So whatever reads an operand of a product next waits
until each device has made its part of the product, and a product after such a sum until its part of that is made. So do
products behind a loss, which nothing but the program's result waits for: it would keep all that it sums. For the sums
of these parts nobody waits, they are reduced behind the next products: only one that is so large that it is reduced
alone must be there before a later product (`HidingSpans.reduced_within`), and one that is joined with none as late as
memory is predicted for (`QUEUED_WITHIN`). And what a checkpointed layer hands on waits for its last product.
"""

import bisect
import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set

from autoshard.compiler.early_products import (
    has_product,
    is_all_reduced,
    is_joined_with_none,
    is_partial,
    is_summed_alone,
    num_products,
)
from autoshard.compiler.hiding_spans import QUEUED_WITHIN, REDUCED_WITHIN, HidingSpans
from autoshard.compiler.live_range import LARGE_BYTES
from autoshard.compiler.planned_graph import PlannedGraph
from autoshard.compiler.primitives import PRODUCTS, SUMS
from autoshard.compiler.transfer_times import TransferTimes
from autoshard.graph.computations import Computation, Instruction, first_operation
from autoshard.graph.graph import Graph

ALL_REDUCED_WITHIN = 12
"""How many products after one its sum must be there at the earliest where there is memory to spare, and it is
all-reduced, or what is left of it where it is scattered over other axes: that takes two collectives, or one that sends
twice as much. Where memory is predicted, a GPT with cuDNN's attention on data=2 x tensor=8 would need 6.4 GB instead
of 5.9, and gain nothing."""

SENT_LATE = 2
"""How many products later than the plan's own schedule has it sent a sum must be there, where orders follow that
schedule, which interrupts what it sends; XLA:GPU does not. A GPT with cuDNN's attention on 64 H100, two collectives in
flight: 49.7 ms without, 47.7 with two, 48.8 with four."""

_SAME_ELEMENTS = frozenset({"reshape", "squeeze", "transpose"})

_FEW = 64
"""A sum whose operand takes at least so many times more than its result sets that much memory free."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """A tie between two equations of a computation.

    Attributes:
      before: The equation that must be made first.
      after: The one that waits for it; None if what waits is a result of the computation.
      slot: The operand of `after`, or the result, that is held back.
      along: Equations between them that only give the results of `before` another form.
    """

    before: int
    after: int | None
    slot: int
    along: tuple[int, ...] = ()


class Turns:
    """Who waits for whom in one computation."""

    def __init__(
        self, planned: PlannedGraph, order: Computation, results: Sequence[int | None], awaited: Set[int | None]
    ):
        """
        Args:
          planned: The graph and the plan. order: The instructions of the computation as they are evaluated.
          results: The values that the computation hands on, of those that heavy operations are made of; None for
            others. awaited: What products are made of.
        """
        self.planned, self.order, self.made_of = planned, order, _dependence(order)
        self.products = [at for at, instruction in enumerate(order) if has_product(instruction)]
        self.results, self.awaited = results, awaited
        self._maker = {r: instruction for instruction in order for r in instruction.results}

    def operands(self) -> dict[int, tuple[int, ...]]:
        """For products, by equation, the operand slots whose later readers wait for each device's part of the product:
        those that a later product reads which does not depend on it anyhow."""
        next_reader: dict[int, int] = {}  # of each value, the next product that reads it, by position
        found: dict[int, tuple[int, ...]] = {}
        for at in reversed(self.products):
            instruction = self.order[at]
            operands = {o: slot for slot, o in enumerate(instruction.operands) if o is not None}
            if instruction.name in PRODUCTS:
                later = {s: next_reader[o] for o, s in operands.items() if o in next_reader}
                free = [s for s, reader in later.items() if not self.made_of[reader] >> at & 1]
                if free:
                    found[instruction.equation] = tuple(sorted(free))
            next_reader.update(dict.fromkeys(operands, at))
        return found

    def sums(self) -> list[Turn]:
        """The sums that no product needs, and that take little: the next product waits for a device's part of each; if
        there is none, a result of the computation that others wait for."""
        found: list[Turn] = []
        for at, instruction in enumerate(self.order):
            if instruction.name == "reduce_sum" and self._sets_free(instruction):
                following = bisect.bisect(self.products, at)
                is_last = following == len(self.products)
                until = len(self.order) if is_last else self.products[following]
                along = self._along(at, until, self._size_bytes(instruction))
                if along is not None:
                    ties = self._hand_over(instruction, along) if is_last else self._tie(instruction, self.order[until])
                    found += [dataclasses.replace(tie, along=along) for tie in ties]
        return found

    def handed_over(self) -> list[Turn]:
        """The results that the computation hands on to products only when its own last one is made: those that are not
        made of it, such as the gradient of what all layers of a decoder attend to. What reads them, such as all that a
        layer of an encoder recomputes, would begin else before the activations of this computation are gone. But sums
        over devices: XLA adds those of several layers before it reduces them, unless anything is tied to one."""
        if not self.products:
            return []
        last = self.products[-1]
        before = {r for at in range(last) if not self.made_of[at] >> last & 1 for r in self.order[at].results}
        held = [k for k, r in enumerate(self.results) if r is not None and r in before and r in self.awaited]
        slots = [k for k in held if not self._is_summed(self.results[k])]
        return [Turn(self.order[last].equation, None, slot) for slot in slots]

    def _is_summed(self, value: int | None) -> bool:
        """Whether a value is a sum of parts that devices make, or made by adding such."""
        maker = self._maker.get(value)
        if maker is None or maker.operation is None:
            return False
        if maker.name == "dot_general":
            return is_partial(self.planned, maker)
        return maker.name in SUMS | _SAME_ELEMENTS and any(map(self._is_summed, maker.operands))

    def reduced(
        self,
        spans: HidingSpans,
        times: TransferTimes | None = None,
        opened: Mapping[int, tuple[int, ...]] | None = None,
        has_room: bool = False,
    ) -> list[Turn]:
        """The products whose sums are reduced alone, and who waits for them; what widens such a sum comes after.

        Args:
          spans: How long sums may be in flight.
          times: When the sums are sent; None for as many products as `spans` leaves them.
          opened: For equations, the operand slots that do not wait with the others.
          has_room: Whether there is memory to spare.
        """
        found: list[Turn] = []
        for at, until in zip(self.products, self._followers(spans, times, has_room), strict=True):
            product = self.order[at]
            if until is None:
                continue
            if product.nested:
                found += self._tie(product, self.order[until], opened)
                continue
            along = self._along(at, until)
            if along is None or until + 1 == len(self.order):
                continue
            made = {i.equation: i for i in self.order[at:until]}
            late = [k for k, number in enumerate(along) if made[number].name not in _SAME_ELEMENTS]
            first = late[0] if late else len(along)
            before = made[along[first - 1]] if first else product
            ties = self._tie(before, self.order[until], opened)
            found += [dataclasses.replace(tie, along=along[first:]) for tie in ties]
        return found

    def _followers(self, spans: HidingSpans, times: TransferTimes | None, has_room: bool) -> list[int | None]:
        """For each product, the position of the one that waits for its sum, reduced alone; None if none does. What
        contains products has sums of its own only in time: those that are not through before its end.
        """
        if times is None:
            passed = list(itertools.accumulate(num_products(self.order[at]) for at in self.products))
            found: list[int | None] = []
            for own, product in zip(passed, map(self.order.__getitem__, self.products), strict=True):
                if not self._is_reduced_alone(product, in_own_time=True):
                    found.append(None)
                    continue
                left = max(passed[-1] - own, REDUCED_WITHIN)  # behind its computation nobody waits for it
                is_late = not has_room and not is_summed_alone(self.planned, product)
                within = min(QUEUED_WITHIN if is_late else spans.reduced_within(product.leaf.index), left)
                if has_room and is_all_reduced(self.planned, product):
                    within = max(within, ALL_REDUCED_WITHIN)
                found.append(self._product(bisect.bisect_left(passed, own + within)))
            return found
        firsts = [first_operation(self.order[at]) for at in self.products]
        found = []
        for n, at in enumerate(self.products):
            ends = [times.ends[i.equation] for i in self._reduced_alone(self.order[at]) if i.equation in times.ends]
            following = bisect.bisect_left(firsts, max(ends)) if ends else len(firsts)
            is_through = bool(self.order[at].nested) and following <= n + 1
            found.append(None if is_through else self._product(following + SENT_LATE))
        return found

    def _product(self, number: int) -> int | None:
        """The position of a product; None behind the last one."""
        return self.products[number] if number < len(self.products) else None

    def _is_reduced_alone(self, product: Instruction, in_own_time: bool) -> bool:
        """Whether a product makes a gradient whose sum is reduced alone. `in_own_time`: Also a smaller one than others
        wait for where memory is predicted."""
        if product.name != "dot_general" or not self.awaited.isdisjoint(product.results):
            return False
        is_alone = is_summed_alone(self.planned, product)
        if in_own_time and not is_alone:
            is_alone = is_joined_with_none(self.planned, product)
        return is_alone and is_partial(self.planned, product)

    def _reduced_alone(self, instruction: Instruction) -> Iterator[Instruction]:
        """The products whose sums are reduced alone that an equation is or contains."""
        if self._is_reduced_alone(instruction, in_own_time=True):
            yield instruction
        for nested in instruction.nested:
            for inner in nested:
                yield from self._reduced_alone(inner)

    def behind(self, number: int) -> int:
        """The equation that is evaluated after the one with a number."""
        return next(b.equation for a, b in itertools.pairwise(self.order) if a.equation == number)

    def _size_bytes(self, instruction: Instruction) -> int:
        """Of the results of an instruction."""
        values = self.planned.graph.values
        return sum(values[r].size_bytes for r in instruction.results if r is not None)

    def _along(self, at: int, until: int, small_bytes: int = 0) -> tuple[int, ...] | None:
        """The equations between two positions that are made of the first one; None if any is made of more, and makes
        more than `small_bytes`."""
        made, found = {*self.order[at].results}, []
        for instruction in self.order[at + 1 : until]:
            if not made.isdisjoint(instruction.operands):
                is_of_more = sum(o is not None for o in instruction.operands) > 1
                if instruction.operation is None or is_of_more and self._size_bytes(instruction) > small_bytes:
                    return None
                made.update(instruction.results)
                found.append(instruction.equation)
        return tuple(found)

    def _sets_free(self, instruction: Instruction) -> bool:
        """Whether the operand of a sum that no product needs takes much more than its result. One of all elements only
        if products need what it is made of, as of a loss, and not of the norm of a gradient that is there last."""
        values, made = self.planned.graph.values, instruction.result()
        is_small = _FEW * values[made].size_bytes <= values[instruction.operand(0)].size_bytes
        if not is_small or made in self.awaited:
            return False
        if values[made].shape:
            return True
        is_large = values[instruction.operand(0)].size_bytes >= LARGE_BYTES
        return is_large and self._is_made_of_awaited(instruction.operand(0))

    def _is_made_of_awaited(self, value: int) -> bool:
        """Whether products need what a value is made of, element by element."""
        values = self.planned.graph.values
        num_elements, ahead, seen = math.prod(values[value].shape), [value], set[int]()
        while ahead:
            value = ahead.pop()
            maker = self._maker.get(value)
            if maker is not None and value in self.awaited:
                return True
            if value in seen or maker is None or maker.operation is None or maker.operation.rule.is_heavy:
                continue
            seen.add(value)
            ahead += [o for o in maker.operands if o is not None and math.prod(values[o].shape) == num_elements]
        return False

    def _tie(
        self, before: Instruction, after: Instruction, opened: Mapping[int, tuple[int, ...]] | None = None
    ) -> list[Turn]:
        """A tie by the largest operand of the later instruction, if it has any."""
        free = (opened or {}).get(after.equation, ())
        slot = self._largest({slot: o for slot, o in enumerate(after.operands) if o is not None and slot not in free})
        return [] if slot is None else [Turn(before.equation, after.equation, slot)]

    def _hand_over(self, before: Instruction, along: Sequence[int]) -> list[Turn]:
        """A tie by the largest result of the computation that it makes, and not of `before`, if any."""
        made = {r for i in self.order if i.equation not in (before.equation, *along) for r in i.results}
        slot = self._largest({k: r for k, r in enumerate(self.results) if r is not None and r in made})
        return [] if slot is None else [Turn(before.equation, None, slot)]

    def _largest(self, slots: Mapping[int, int]) -> int | None:
        """Of values by slot, the slot of the largest one; None if there is none."""
        values = self.planned.graph.values
        return max(slots, key=lambda slot: values[slots[slot]].size_bytes, default=None)


def summed_in_turn(graph: Graph, entry: Computation) -> frozenset[int]:
    """The operations that `Turns.sums` has made in turn, in all computations of a graph: no layout matters for that."""
    planned = PlannedGraph(graph, entry, {}, {}, {})
    awaited, handed_on = (awaited_values(graph, by_products) for by_products in (True, False))
    found: set[int] = set()

    def visit(computation: Computation, results: Sequence[int | None]) -> None:
        named = {i.equation: i for i in computation}
        found.update(named[t.before].leaf.index for t in Turns(planned, computation, results, awaited).sums())
        for instruction in computation:
            for nested in instruction.nested:
                visit(nested, [r if r in handed_on else None for r in instruction.results])

    visit(entry, ())
    return frozenset(found)


def awaited_values(graph: Graph, by_products: bool) -> frozenset[int | None]:
    """The values that heavy operations are made of, or products alone: a sum over rows for a table is made of gradients
    too, but then only the update needs it."""
    found: set[int | None] = set()
    for operation in reversed(graph.operations):
        is_heavy = operation.name in PRODUCTS if by_products else operation.rule.is_heavy
        if is_heavy or not found.isdisjoint(operation.results):
            found.update(operation.operands)
    return frozenset(found - {None})


def _dependence(order: Computation) -> list[int]:
    """For each instruction, the products that it depends on: bit n stands for the one at position n."""
    made_of: collections.defaultdict[int | None, int] = collections.defaultdict(int)
    found = []
    for at, instruction in enumerate(order):
        bits = 0
        for o in instruction.operands:
            bits |= made_of[o] if o is not None else 0
        found.append(bits)
        own = bits | 1 << at if instruction.name in PRODUCTS else bits
        if own:
            made_of.update((r, own) for r in instruction.results if r is not None)
    return found
