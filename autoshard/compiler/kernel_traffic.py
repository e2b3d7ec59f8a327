"""What kernels move between them and memory.

A kernel fetches what is stored and stores what others need. A value that the compiler computes inside its readers
(`fusion.py`, `reduced_rows.py`) is neither: each of its readers fetches the stored values that it is made of, such as
the bfloat16 of which a softmax takes exponentials in float32. The operations of a group between the same two heavy
operations are one kernel, which fetches a value once; where they store nothing, there is none.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence, Set

from autoshard.compiler.aliasing import is_alias
from autoshard.compiler.def_use import DefUse
from autoshard.compiler.dimension_orders import lies_in, read_order
from autoshard.compiler.grouped_rows import copies_for_groups
from autoshard.compiler.live_ranges import LiveRanges
from autoshard.compiler.primitives import PRODUCTS, SUMS
from autoshard.compiler.reduced_rows import fetched_for, reduced_row, reduced_rows
from autoshard.cost.compute import LONG_ROW
from autoshard.graph.graph import Operation, OperationKind
from autoshard.graph.groups import Access, Group

_EXPONENTIALS = frozenset({"exp", "exp2"})


@dataclasses.dataclass(frozen=True, slots=True)
class KernelTraffic:
    """What the kernels of a group fetch and store.

    Attributes:
      fetched_bytes: For each read of the group, what is fetched of it, unsharded.
      moves: For each write, how often it is stored or fetched whole: 0 where the group does not store it.
      launches: How many kernels they are; each part of what is split is made by one of its own.
      row_passes: Of the kernel that waits longest, the reductions of long rows that its results wait for one after
        another, where it takes exponentials of these rows: 2 for a softmax. 0 where there are none.
      iterations: Those of the loop that the group begins, each of which a GPU counts in a kernel of its own; 0 if none.
    """

    fetched_bytes: tuple[float, ...]
    moves: tuple[int, ...]
    launches: int
    row_passes: int = 0
    iterations: float = 0.0


_Kernel = tuple[int, int]
"""A region, and how many values it waits for there that end a kernel, negative; or an operation and the number of a
kernel that makes its result alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class _OtherOrders:
    """The orders of dimensions, beside the first, in which products need what pointwise kernels store.

    Attributes:
      count: How many they are. kernels: How many of them a kernel of its own makes, which reads everything again: none
        where one order is that of what is read, whose kernel stores it in all of them.
    """

    count: int = 0
    kernels: int = 0


class Traffic:
    """What the kernels of a program move.

    Args:
      chains: The program. live: What is stored. pointwise: For each operation, whether it is (`pointwise_operations`).
    """

    def __init__(self, chains: DefUse, live: LiveRanges, pointwise: Sequence[bool]) -> None:
        self._chains, self._live, self._pointwise = chains, live, pointwise
        self._stored = live.stored | chains.outputs
        self._rows = reduced_rows(chains, live)
        self._copied, self._other_orders = self._read_by_products()
        self._passes = self._row_passes()
        self._waits = self._waits_for_stored()
        self._begun = {loop.start: loop.trips for loop in chains.graph.loops if loop.trips > 1}

    def of_group(
        self, group: Group, partly_read: Set[tuple[int, tuple[int, ...]]], partly_written: Set[int]
    ) -> KernelTraffic:
        """What the kernels of `group` move.

        Args:
          partly_read: Of what is only touched in part: value, the operations that do. partly_written: Such results.
        """
        graph = self._chains.graph
        operations = [graph.operations[o] for o in group.operations]
        fetches = self._fetches(operations)
        times = collections.Counter(source for kernel in fetches.values() for source in kernel)
        fetched, launches = [0.0] * len(group.reads), max(len(fetches), sum(o.rule.is_heavy for o in operations))
        best: dict[int, tuple[float, int]] = {}  # for each source, through which read most of it is fetched
        for n, access in enumerate(group.reads):
            if (access.value, access.operations) not in partly_read:
                for source in self._sources(access.value):
                    part_bytes = self._part_bytes(source, access.value)
                    if part_bytes > best.get(source, (0.0, 0))[0]:
                        best[source] = part_bytes, n
            copies = sum((o, access.value) in self._copied for o in access.operations)
            fetched[n] += 2.0 * copies * graph.values[access.value].size_bytes
            launches += copies
            for o in access.operations:
                copied_for = copies_for_groups(graph, graph.operations[o])
                written = [size for value, size in copied_for if value == access.value]
                fetched[n] += 2.0 * sum(written)
                launches += len(written)
        for source, (part_bytes, n) in best.items():
            fetched[n] += times[source] * part_bytes
        if operations[0].kind is OperationKind.SCAN_STACK:
            is_copied = self._is_stack_copied(operations[0])
            times_moved = 3 if is_copied else 1  # zeros, and the copy's reading and writing
            for n, access in enumerate(group.reads):  # a literal is not fetched
                fetched[n] += times_moved * graph.values[access.value].size_bytes
            launches += is_copied
        iterations = 0.0
        if operations[0].kind in (OperationKind.LOOP_CARRY, OperationKind.SCAN_SLICE):
            iterations = self._begun.get(operations[0].index, 0.0)
        if operations[0].kind is OperationKind.LOOP_CARRY and self._is_carry_copied(operations[0]):
            trips = self._trips_of(operations[0])
            launches += math.ceil(trips)
            for n, access in enumerate(group.reads):
                if access.value == operations[0].operands[1]:
                    fetched[n] += 2.0 * trips * graph.values[access.value].size_bytes
        launches += sum(max(sum(r in self._stored for r in o.results) - 1, 0) for o in operations if o.name == "split")
        moves = [0 if a.value in partly_written else self._moves(a, fetches) for a in group.writes]
        passes = max((self._passes[o.index] for o in operations if self._is_stored(o)), default=0)
        return KernelTraffic(tuple(fetched), tuple(moves), launches, passes, iterations)

    def _fetches(self, operations: Sequence[Operation]) -> dict[_Kernel, set[int]]:
        """For each kernel the stored values that it fetches."""
        fetches: dict[_Kernel, set[int]] = {}
        for operation in operations:
            if self._is_stored(operation):
                read = frozenset(s for o in operation.operands if o is not None for s in self._sources(o))
                fetches.setdefault(self._kernel_of(operation), set()).update(read)
                for n in range(self._other_orders.get(operation.index, _OtherOrders()).kernels):
                    fetches[operation.index, 1 + n] = {*read}
        return fetches

    def _kernel_of(self, operation: Operation) -> _Kernel:
        """The kernel that stores what an operation makes."""
        if any(r in self._live.turned for r in operation.results):
            return operation.index, 1
        made = [self._live.together[r] for r in operation.results if r is not None and r in self._live.together]
        index = max(made, default=operation.index)
        return self._live.region[index], -self._waits[index]

    def _waits_for_stored(self) -> list[int]:
        """For each operation, how many values its kernel waits for in turn that are stored on the way to it, in its
        region, since a kernel would compute them several times: each ends a kernel."""
        waits: list[int] = []
        for operation in self._chains.graph.operations:
            longest, region = 0, self._chains.region[operation.index]
            for o in operation.operands if self._live.again else ():
                made_by = None if o is None else self._chains.producer[o]
                if made_by is not None and made_by.index < operation.index:
                    if self._chains.region[made_by.index] == region:
                        longest = max(longest, waits[made_by.index] + (o in self._live.again))
            waits.append(longest)
        return waits

    def _row_passes(self) -> list[int]:
        """For each operation, `KernelTraffic.row_passes` of a kernel that it ends.

        Exponentials are taken less the row's maximum, which every kernel that takes them finds by itself, also where
        it is stored for another (so in all softmaxes of the programs of `benchmarks/gpu_steps.py`).
        """
        passes: list[int] = []
        waits: dict[int, tuple[int, bool]] = {}  # of values computed inside: reductions, and whether of exponentials
        for operation in self._chains.graph.operations:
            inside = [o for o in operation.operands if o in waits]
            count = max((waits[o][0] for o in inside), default=0)
            of_exponentials = operation.name in _EXPONENTIALS or any(waits[o][1] for o in inside)
            results = [r for r in operation.results if r is not None]
            row = reduced_row(operation)
            is_long = math.prod(row) > LONG_ROW and self._lies_together(operation.operands[0], len(row))
            is_inside = any(r in self._rows or r in self._live.made_of for r in results)
            is_maximum = operation.name == "reduce_max"
            if is_long and (count or is_inside or is_maximum):
                count += 1
            passes.append(count if of_exponentials else 0)
            if is_inside or (is_long and is_maximum):
                waits.update((r, (count, of_exponentials)) for r in results)
        return passes

    def _sources(self, value: int) -> frozenset[int]:
        """The stored values that a kernel fetches if it reads `value`."""
        return fetched_for(value, self._live, self._rows)

    def _part_bytes(self, source: int, value: int) -> float:
        """What a kernel fetches of `source` if it reads `value`: an element for each element, but whole rows."""
        values = self._chains.graph.values
        if source != value and source not in self._live.made_of.get(value, ()):
            return float(values[source].size_bytes)
        elements = math.prod(values[value].shape)
        return float(min(values[source].size_bytes, elements * values[source].itemsize_bytes))

    def _moves(self, access: Access, fetches: Mapping[_Kernel, Set[int]]) -> int:
        """How often what a group makes is stored, or fetched by another of its kernels."""
        (maker,) = access.operations
        is_light = self._pointwise[maker] and access.value not in self._stored
        if is_light or not self._is_stored(self._chains.graph.operations[maker]):
            return 0
        operation = self._chains.graph.operations[maker]
        kernel, others = self._kernel_of(operation), self._other_orders.get(maker, _OtherOrders())
        fetched = sum(access.value in sources for other, sources in fetches.items() if other != kernel)
        return 1 + others.count + fetched

    def _is_stored(self, operation: Operation) -> bool:
        """Whether a kernel stores what an operation makes."""
        if any(r in self._rows for r in operation.results):
            return False
        if not self._pointwise[operation.index]:
            return bool(operation.rule.flops) or operation.rule.is_heavy
        if operation.name == "reduce_precision" and operation.operands[0] not in self._live.made_of:
            return False  # to the precision that it has, as around what a checkpoint keeps
        return any(r in self._stored for r in operation.results) and not self._is_done_by_product(operation)

    def _is_done_by_product(self, operation: Operation) -> bool:
        """Whether an operation transposes a matrix that a product makes, or that only products read; or turns a kernel
        round, as for the gradient of a convolution, which cuDNN does.
        """
        if operation.name == "rev":
            readers = [c for r in operation.results if r is not None for c, _ in self._chains.consumers[r]]
            return all(c.name == "conv_general_dilated" for c in readers)
        if operation.name != "transpose":
            return False
        rule, (operand,) = operation.rule, operation.operands
        before, after = (
            [f for dim in dims for f in dim if rule.factors[f].size > 1] for dims in (rule.operands[0], rule.results[0])
        )
        if after not in [before[k:] + before[:k] for k in range(len(before))]:
            return False
        made_by = None if operand is None else self._chains.producer[operand]
        readers = [c for r in operation.results if r is not None for c, _ in self._chains.consumers[r]]
        return (made_by is not None and made_by.name in PRODUCTS) or all(c.name in PRODUCTS for c in readers)

    def _lies_together(self, value: int | None, count: int) -> bool:
        """Whether the last `count` dimensions of a value are the innermost ones in memory."""
        order = None if value is None else self._live.orders[value]
        return order is None or {*order[-count:]} == {*range(len(order))[-count:]}

    def _read_by_products(self) -> tuple[frozenset[tuple[int, int]], dict[int, _OtherOrders]]:
        """What XLA:GPU does for products that need their operands in another order of dimensions.

        Returns:
          The operations and values of which the latter is copied for the former, since it is not in order, or only part
          of something larger: what the first of several products had copied serves the others. And for each pointwise
          operation, what its kernels do so that none is copied: they write in the order that is needed.
        """
        copied: set[tuple[int, int]] = set()
        orders: dict[int, set[object]] = collections.defaultdict(set)
        needed: dict[int, dict[object, bool]] = collections.defaultdict(dict)  # whether it lies so anyway
        for operation in self._chains.graph.operations:
            copied.update((operation.index, value) for value in self._copied_for_sum(operation))
            if operation.name != "dot_general":
                continue
            for slot, value in enumerate(operation.operands[:2]):
                made_by = None if value is None else self._maker(value)
                if value is None or made_by is None:
                    continue
                order, known = read_order(operation, slot), orders[value]
                is_written_so = self._is_stored(made_by) and self._pointwise[made_by.index]
                needs_copy = _is_slice(made_by) and not self._is_stored(made_by) if order is None else not is_written_so
                if order not in known and needs_copy:
                    copied.add((operation.index, value))
                known.add(order)
                if is_written_so:
                    needed[made_by.index][order] = lies_in(order, self._live.orders[value])
        others = {
            o: _OtherOrders(len(lie) - 1, 0 if any(lie.values()) else len(lie) - 1)
            for o, lie in needed.items()
            if len(lie) > 1
        }
        return frozenset(copied), others

    def _maker(self, value: int) -> Operation | None:
        """The operation that makes a value, under whatever name; None for arguments and slices of them."""
        operation = self._chains.producer[value]
        while operation is not None and (is_alias(operation) or operation.name == "reduce_precision"):
            source = operation.operands[0]
            operation = None if source is None else self._chains.producer[source]
        if operation is not None and operation.kind is OperationKind.SCAN_SLICE:
            return operation if self._chains.producer[operation.operand(0)] is not None else None
        return operation

    def _copied_for_sum(self, operation: Operation) -> list[int]:
        """What is copied for an addition in the kernel of a product, which adds to what lies in a buffer: a slice."""
        result = operation.results[0] if operation.name in SUMS else None
        if result is None or result not in self._live.root or len(operation.operands) != 2:
            return []
        product = self._live.root[result]
        others = [o for o in operation.operands if o is not None and self._live.root.get(o, o) != product]
        makers = [(o, self._within_loops(o)) for o in others]
        return [o for o, m in makers if m is not None and _is_slice(m) and not self._is_stored(m)]

    def _is_stack_copied(self, operation: Operation) -> bool:
        """Whether what a loop stacks is copied there, and not written there by the kernel that makes it.

        Either way XLA fills the stack with zeros before the loop. A literal is written, not copied. What a kernel makes
        also for a product, or for the next iteration, it stores for these: a kernel of several results writes none in
        the place of another array.
        """
        value = operation.operands[0]
        if value is None:
            return False
        made_by = self._within_loops(value)
        if made_by is None or made_by.kind is not OperationKind.EQUATION or not self._pointwise[made_by.index]:
            return True
        return self._is_stored_for_others(value)

    def _is_stored_for_others(self, value: int) -> bool:
        """Whether a product or the next iteration reads a value, under whatever name."""
        for reader, slot in self._chains.consumers[value]:
            is_next = reader.kind is OperationKind.LOOP_CARRY and slot == 1
            if is_next or (reader.kind is OperationKind.EQUATION and reader.rule.is_heavy):
                return True
            if is_alias(reader) and reader.kind is OperationKind.EQUATION:
                if any(self._is_stored_for_others(r) for r in reader.results if r is not None):
                    return True
        return False

    def _is_carry_copied(self, operation: Operation) -> bool:
        """Whether what an iteration hands to the next one is no result of a kernel of its own, but a slice, or what it
        has of the iteration before under another number: XLA copies it."""
        back = operation.operands[1]
        if back is None or not self._chains.graph.values[back].shape:
            return False
        made_by = self._within_loops(back)
        return made_by is not None and made_by != operation and made_by.kind is not OperationKind.EQUATION

    def _within_loops(self, value: int) -> Operation | None:
        """The operation that makes a value, under whatever name; a carry makes what iterations begin with."""
        operation = self._chains.producer[value]
        while operation is not None and operation.kind is OperationKind.EQUATION and is_alias(operation):
            source = operation.operands[0]
            operation = None if source is None else self._chains.producer[source]
        return operation

    def _trips_of(self, carry: Operation) -> float:
        """How often the loop around runs that a carry is of."""
        around = [loop for loop in self._chains.graph.loops if loop.start <= carry.index < loop.stop]
        return min(around, key=lambda loop: loop.stop - loop.start).trips


def _is_slice(operation: Operation) -> bool:
    return operation.kind is OperationKind.SCAN_SLICE or operation.name in ("slice", "split", "dynamic_slice")
