"""Copies of values with their dimensions in the order in which a product needs them."""

import dataclasses
from collections.abc import Iterator, Mapping, Set

from autoshard.compiler.aliasing import is_alias
from autoshard.compiler.def_use import DefUse
from autoshard.compiler.live_range import LiveRange
from autoshard.compiler.memory_orders import Order
from autoshard.graph.graph import Operation

ReadOrder = tuple[tuple[int, ...], frozenset[tuple[int, ...]]]
"""The batch dimensions, and the two blocks of the other ones: a matrix may be read row by row or column by column."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Blocks:
    """The dimensions of a product's operand, those of one element aside.

    Attributes:
      batch: Those it batches over. first, second: The two blocks of the others, in the order in which XLA puts them:
        of the left operand the free ones and those summed, of the right one the other way round.
    """

    batch: tuple[int, ...]
    first: tuple[int, ...]
    second: tuple[int, ...]


def _transposed_blocks(operation: Operation, slot: int) -> _Blocks | None:
    """What XLA transposes an operand of a product to; None if it takes the operand as it is."""
    if operation.name != "dot_general" or slot > 1:
        return None
    rule = operation.rule
    left, right = (
        [(d, f) for d, dim in enumerate(dims) for f in dim if rule.factors[f].size > 1] for dims in rule.operands[:2]
    )
    shared = {f for _, f in left} & {f for _, f in right}
    made = [f for dim in rule.results[0] for f in dim if f in shared]
    if not made:
        return None
    own = (left, right)[slot]
    place = {f: d for d, f in own}
    batch = tuple(place[f] for f in made)
    summed = tuple(place[f] for _, f in left if f in shared and f not in made)
    free = tuple(d for d, f in own if f not in shared)
    if tuple(d for d, _ in own)[: len(batch)] == batch and len(summed) <= 1 and len(free) <= 1:
        return None
    blocks = _Blocks(batch, *((free, summed) if slot == 0 else (summed, free)))
    return None if (*batch, *blocks.first, *blocks.second) == tuple(d for d, _ in own) else blocks


def read_order(operation: Operation, slot: int) -> ReadOrder | None:
    """The order of dimensions in which a product must find an operand; None if it takes the operand as it is.

    XLA brings a product over batches whose operands are more than matrices into the form batch, rows, columns: the left
    operand with the summed dimensions last, the right one with these first (`DotDecomposer`). Without batch dimensions
    the transposition is part of the product.
    """
    blocks = _transposed_blocks(operation, slot)
    return None if blocks is None else (blocks.batch, frozenset({blocks.first, blocks.second}))


def lies_in(wanted: ReadOrder | None, order: Order | None) -> bool:
    """Whether a value that lies in `order` need not be copied for a product that must find it as `read_order` says."""
    if order is None:
        return True
    if wanted is None:
        return order == tuple(range(len(order)))
    batch, blocks = wanted
    return any(order == (*batch, *first, *(d for other in blocks - {first} for d in other)) for first in blocks)


def read_orders(chains: DefUse, value: int) -> dict[ReadOrder | None, list[int]]:
    """The orders in which the readers of a value want it, each with the operations that do."""
    uses: dict[ReadOrder | None, list[int]] = {}
    if len(chains.graph.values[value].shape) > 2:
        for operation, slot in chains.consumers[value]:
            if chains.loop_nest[operation.index] == chains.scope(value):
                uses.setdefault(read_order(operation, slot), []).append(operation.index)
    return uses


@dataclasses.dataclass(frozen=True, slots=True)
class OrderCopies:
    """The copies of values that their readers want in several orders.

    Attributes:
      stops: Values whose own order is not needed any more when the value is: when it no longer is.
      copies: Each copy beside the value itself.
    """

    stops: Mapping[int, int]
    copies: tuple[LiveRange, ...]


def copies_in_other_orders(
    chains: DefUse, stored: Set[int], sources: Mapping[int, Set[int]], moved: Mapping[int, int]
) -> OrderCopies:
    """The copies of stored values in other orders.

    A value is there as often as its readers want it in different orders. A pointwise kernel makes all of them at once;
    of any other value, and for products that narrow what they read, the copy is made for the first that reads it.

    Args:
      stored: The values with memory of their own. sources: Of pointwise results, as in `Fusion`.
      moved: When values are made that are not made where the program does.
    """
    copies, stops = [], {}
    for value in sorted(stored):
        uses = read_orders(chains, value)
        if len(uses) < 2 or chains.producer[value] is None:
            continue
        last = {order: max(indices) + 1 for order, indices in uses.items()}
        own = None if None in uses else max(uses, key=lambda order: last[order])
        for order, indices in uses.items():
            if order != own:
                is_made_at_once = value in sources and not any(_is_narrowed(chains, value, index) for index in indices)
                start = moved.get(value, chains.defined_at(value)) if is_made_at_once else min(indices)
                copies.append(LiveRange(value, start, last[order]))
        if own is None and value not in chains.outputs and all(c.rule.is_heavy for c, _ in chains.consumers[value]):
            copied = [min(indices) + 1 for indices in uses.values()] if value not in sources else []
            stops[value] = max([last[None], *copied])
    copies += _copies_of_names(chains, stored)
    return OrderCopies(stops, tuple(copies))


def _copies_of_names(chains: DefUse, stored: Set[int]) -> Iterator[LiveRange]:
    """The copies of what is stored under another name, such as heads that lie side by side in a row, beside the first.

    XLA transposes such a value itself, and so makes a copy for rows and one for columns. One kernel makes all of them
    when the first is needed, since they read the same.
    """
    for operation in chains.graph.operations:
        (result, *others) = operation.results
        if others or result is None or result in stored or not is_alias(operation):
            continue
        uses: dict[_Blocks, list[int]] = {}
        for reader, slot in chains.consumers[result]:
            blocks = _transposed_blocks(reader, slot)
            if blocks is not None and chains.loop_nest[reader.index] == chains.scope(result):
                uses.setdefault(blocks, []).append(reader.index)
        if len(uses) > 1:
            first, *following = sorted(uses.values(), key=min)
            yield from (LiveRange(result, min(first), max(indices) + 1) for indices in following)


def _is_narrowed(chains: DefUse, value: int, reader: int) -> bool:
    """Whether a product makes narrower elements of those of a value before it multiplies them."""
    narrowed_bytes = chains.graph.operations[reader].rule.narrowed_bytes
    return narrowed_bytes is not None and narrowed_bytes < chains.graph.values[value].itemsize_bytes
