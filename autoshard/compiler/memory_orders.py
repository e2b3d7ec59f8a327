"""In which order the dimensions of values lie in memory, and which values are turned before several kernels read them.

A transposition of what a product makes is not carried out: what reads it takes the elements from where they are, and
what is made of them, element by element, lies as they do (XLA's `LayoutAssignment` makes of it a change of the layout).
Where a kernel reads two values whose innermost dimensions are different ones, XLA turns one of them around. If that
kernel alone needs it, it reads the elements where they are; if several do, a kernel of its own turns and stores it.

Such are the scores of attention whose heads of queries share heads of keys. Scores are products over queries and
heads of a group, and so is the gradient of their softmax; but of one the product has these two in one order, of the
other in the other. What is turned is already in float32.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from autoshard.compiler.def_use import DefUse
from autoshard.compiler.live_range import LARGE_BYTES
from autoshard.compiler.row_maximum import row_maximum
from autoshard.graph.graph import Operation, OperationKind

Order = tuple[int, ...]
"""The dimensions of a value, the outermost in memory first."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Meeting:
    """Two operands of one kernel that lie in different orders: the one that stays, and the one that is turned."""

    stays: int
    turns: int


def memory_orders(chains: DefUse, pointwise: Sequence[bool], turned: Mapping[int, Order | None]) -> list[Order | None]:
    """The order of each value; None where none is known or any will do: of masks, reductions and what is reshaped.

    Args:
      chains: The program. pointwise: For each operation, whether it is (`pointwise_operations`).
      turned: How values lie that are turned (`turned_values`).
    """
    values = chains.graph.values
    orders: list[Order | None] = [None] * len(values)
    for argument in chains.graph.arguments:
        orders[argument.value] = _as_written(chains, argument.value)
    for operation in chains.graph.operations:
        for value in operation.results:
            if value is not None:
                made = _order(chains, operation, value, pointwise[operation.index], orders)
                orders[value] = turned.get(value, made)
    return orders


def turned_values(
    chains: DefUse, pointwise: Sequence[bool], orders: Sequence[Order | None], fused: Sequence[int]
) -> dict[int, Order | None]:
    """The values that are turned around and then stored, where several kernels need them; and how they lie then.

    Args:
      chains: The program. pointwise: For each operation, whether it is (`pointwise_operations`).
      orders: How all values lie if none is turned.
      fused: For each value, whether its readers would compute it if none were.
    """
    found: dict[int, Order | None] = {}
    for operation in chains.graph.operations:
        meeting = _meeting(chains, operation, orders) if pointwise[operation.index] else None
        if meeting is None:
            continue
        value = _shared(chains, meeting.turns, orders, fused, pointwise)
        if value is not None and fused[value]:
            found[value] = orders[meeting.stays]
    return found


def turned_stacks(chains: DefUse, orders: Sequence[Order | None]) -> frozenset[int]:
    """The operations that stack what lies in another order than it is written in, for another scan to slice: large
    ones.

    What a scan slices lies as it is written (`_meeting`). XLA would turn all that was stacked around between the two
    scans, and have it twice then; execution has each iteration store its own as it is written.

    Args:
      chains: The program. orders: How all values lie.
    """
    values, found = chains.graph.values, set[int]()
    for operation in chains.graph.operations:
        if operation.kind is OperationKind.SCAN_STACK and operation.operands[0] is not None:
            lies, whole = orders[operation.operands[0]], operation.result()
            is_sliced = any(c.kind is OperationKind.SCAN_SLICE for c, _ in chains.consumers[whole])
            is_turned = lies is not None and lies != _as_written(chains, operation.operands[0])
            if is_turned and is_sliced and values[whole].size_bytes >= LARGE_BYTES:
                found.add(operation.index)
    return frozenset(found)


def _as_written(chains: DefUse, value: int) -> Order:
    return tuple(range(len(chains.graph.values[value].shape)))


def _order(
    chains: DefUse, operation: Operation, value: int, is_pointwise: bool, orders: Sequence[Order | None]
) -> Order | None:
    """How the result of an operation lies, if what it reads lies in `orders`."""
    if not is_pointwise:
        is_reduced = operation.name.startswith("reduce_") and not operation.rule.is_heavy
        return None if is_reduced else _as_written(chains, value)
    if operation.name == "transpose" and operation.operands[0] is not None:
        return _transposed(chains, operation, operation.operands[0], orders)
    if operation.results[0] == value and (meeting := _meeting(chains, operation, orders)) is not None:
        return orders[meeting.stays]
    return next((orders[o] for o in _alike(chains, operation) if orders[o] is not None), None)


def _alike(chains: DefUse, operation: Operation) -> list[int]:
    """The operands that have the shape of what an operation makes."""
    values = chains.graph.values
    shapes = [values[r].shape for r in operation.results if r is not None]
    return [o for o in operation.operands if o is not None and values[o].shape in shapes]


def _transposed(chains: DefUse, operation: Operation, source: int, orders: Sequence[Order | None]) -> Order | None:
    """How a transposition lies. A product stores its rows or its columns together, whichever lies as it is read."""
    before, made_by = orders[source], chains.producer[source]
    if before is None:
        return None
    left, taken = list(enumerate(operation.rule.operands[0])), list[int]()
    for dim in operation.rule.results[0]:
        at = next(n for n, (_, other) in enumerate(left) if other == dim)
        taken.append(left.pop(at)[0])
    lies = lambda order: tuple(taken.index(d) for d in order)
    ways = [before, _exchanged(made_by)] if made_by is not None and made_by.name == "dot_general" else [before]
    return next((lies(way) for way in ways if lies(way) == tuple(range(len(taken)))), lies(before))


def _exchanged(product: Operation) -> Order:
    """What a product makes, with its columns outside of its rows."""
    left, right = ({f for dim in dims for f in dim} for dims in product.rule.operands[:2])
    place = lambda dim: (not right.issuperset(dim) or not left.issuperset(dim)) + (not right.issuperset(dim))
    dims = product.rule.results[0]
    return tuple(sorted(range(len(dims)), key=lambda d: place(dims[d])))


def _meeting(chains: DefUse, operation: Operation, orders: Sequence[Order | None]) -> _Meeting | None:
    """The operands of a pointwise operation that lie in different orders: of those with the same innermost dimension a
    kernel reads whole rows anyway.

    What was made first stays; in a loop what lies as it is written, as what the loop reads and writes does.
    """
    if len(operation.operands) < 2:
        return None
    known = {o: order for o in _alike(chains, operation) if (order := orders[o])}
    if len({order[-1] for order in known.values()}) < 2:
        return None
    in_loop = bool(chains.loop_nest[operation.index])
    stays = min(known, key=lambda o: (in_loop and known[o] != _as_written(chains, o), chains.defined_at(o)))
    return _Meeting(stays, next(o for o in known if known[o][-1] != known[stays][-1]))


def _shared(
    chains: DefUse, value: int, orders: Sequence[Order | None], fused: Sequence[int], pointwise: Sequence[bool]
) -> int | None:
    """What is turned for who reads `value`: the first with several readers on the way there from what lies so.

    A kernel that takes exponentials finds the maximum of their rows by itself. What another kernel stores, element by
    element, it stores in the order in which it is read.
    """
    way = [value]
    while fused[way[-1]]:
        made_by = chains.made_by(way[-1])
        before = [o for o in _alike(chains, made_by) if orders[o] == orders[value]]
        if made_by.name == "transpose" or len(before) != 1:
            break
        way.append(before[0])
    source = chains.producer[way[-1]]
    if source is not None and pointwise[source.index] and not fused[way[-1]]:
        return None
    return next((one for one in reversed(way) if _has_several_readers(chains, one)), value)


def _has_several_readers(chains: DefUse, value: int) -> bool:
    """Whether several operations read a value; a maximum and what is less of it are one."""
    readers = {c.index: c for c, _ in chains.consumers[value]}
    maxima = [c for c in readers.values() if c.name == "reduce_max"]
    less = [c for c in readers.values() if c.name == "sub" and row_maximum(chains.producer, c.operands[1]) in maxima]
    return len(readers) > 1 and not (len(maxima) == len(less) == 1 and len(readers) == 2)
