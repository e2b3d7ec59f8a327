"""When each value occupies memory, in program order.

Time is counted in operations of the flattened program. A loop body is passed once: what it needs of the world outside
lives through the whole loop. What is not stored at all says `fusion.py`; which values share a buffer, `aliasing.py`;
which buffers are there earlier or later than the program's order tells, `multi_output_fusion.py`, `constant_fills.py`
and `list_scheduler.py`. What can be rebuilt from nothing (iotas, broadcast scalars, masks made of them) is never
stored; the successor of a donated argument takes over its buffer.
"""

import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set

from autoshard.compiler.aliasing import aliases, scattered_into, sums_in_place
from autoshard.compiler.constant_fills import constant_fills, late_fills, late_stacks
from autoshard.compiler.def_use import DefUse
from autoshard.compiler.dimension_orders import copies_in_other_orders
from autoshard.compiler.fusion import fuse
from autoshard.compiler.list_scheduler import freeing_first
from autoshard.compiler.live_range import LiveRange
from autoshard.compiler.memory_orders import Order, turned_stacks
from autoshard.compiler.multi_output_fusion import delayed_products, made_together
from autoshard.compiler.put_off import put_off
from autoshard.graph.graph import OperationKind
from autoshard.graph.pointwise import free_values


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LiveRanges:
    """When everything stored is alive.

    Attributes:
      ranges: One for each stored value, arguments included, behind the copies in other orders of dimensions.
      hiding_ranges: The same where collectives hide, and what is computed again is put off (`put_off.py`).
      stored: The values that have a live range.
      region: For each operation, the number of heavy kernels before it: operations of one region fuse.
      root: For each value that is another name of a value's memory, or added to in its place, the latter.
      alias_stop: For each of these, when its last use ends.
      fused_stop: For each value that is computed inside its readers, when the last of these ends.
      made_of: For each value that is computed inside its readers, the stored values that these read instead.
      recomputable: The results that their readers could compute (`fusion.py`), stored or not.
      added_reductions: The reductions that are part of the kernel that adds two of them. apart_stop, hiding_apart_stop:
        When the ranges end that are longer for it, if each of them is a kernel of its own.
      late_fills: The operations whose first operand execution fills when the others are there, and whether it does so
        only if the sum is partial (`constant_fills.py`).
      late_stacks: The stacks of scans that execution fills when the scan begins.
      turned_stacks: The stacks of scans that execution keeps as they are written (`memory_orders.py`).
      parts: The parts of split values that execution stores (`split_parts.py`).
      delayed: The products that run later than where the program does them, and when (`multi_output_fusion.py`).
      together: The values that one kernel makes with others, and at which operation (`multi_output_fusion.py`).
      again: The values that are stored since one kernel would compute them several times (`read_again.py`).
      turned: The values that are stored in another order of dimensions than they are made in. orders: How each lies in
        memory (`memory_orders.py`).
    """

    ranges: tuple[LiveRange, ...]
    hiding_ranges: tuple[LiveRange, ...]
    stored: frozenset[int]
    region: tuple[int, ...]
    root: Mapping[int, int]
    alias_stop: Mapping[int, int]
    fused_stop: Mapping[int, int]
    made_of: Mapping[int, frozenset[int]]
    recomputable: frozenset[int]
    added_reductions: tuple[int, ...]
    apart_stop: Mapping[int, int]
    hiding_apart_stop: Mapping[int, int]
    late_fills: Mapping[int, bool]
    late_stacks: frozenset[int]
    turned_stacks: frozenset[int]
    parts: frozenset[int]
    delayed: Mapping[int, int]
    together: Mapping[int, int]
    again: frozenset[int]
    turned: frozenset[int]
    orders: Sequence[Order | None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Alive:
    """`ranges` and `apart_stop` of `LiveRanges`, and for each value one past the last operation that needs it."""

    ranges: tuple[LiveRange, ...]
    until: Sequence[int]
    apart_stop: Mapping[int, int]


def _last_needs(
    chains: DefUse,
    fused: Sequence[int],
    sources: Container[int],
    together: Mapping[int, int],
    late: Mapping[int, int],
) -> list[int]:
    """For each value, one past the last operation that needs it, directly or to compute a fused value again.

    Args:
      chains: The graph. fused: For each value, whether its readers compute it.
      sources: What kernels make element by element. Of that, what a loop stacks is written there when it is made.
      together: What is made with another value and not where the program does it, and where (`multi_output_fusion.py`).
      late: The operations that run later than where the program has them, and when (`put_off.py`).
    """
    graph, loops = chains.graph, chains.graph.loops
    until = [0] * len(graph.values)

    def settle(value: int) -> None:
        is_made = not fused[value] or not chains.consumers[value]
        last, scope = chains.defined_at(value) + 1 if is_made else 0, chains.scope(value)
        for operation, slot in chains.consumers[value]:
            if operation.kind is OperationKind.SCAN_STACK and value in sources and not fused[value]:
                continue
            inside = chains.loop_nest[operation.index]
            when = late.get(operation.index, operation.index) + 1
            if operation.kind is not OperationKind.LOOP_CARRY:
                needs = [
                    until[r] if fused[r] else together.get(r, late.get(operation.index, operation.index)) + 1
                    for r in operation.results
                    if r is not None
                ]
                when = max(needs, default=when)
            elif slot == 0:  # the initial value ends where the loop begins
                inside = inside[:-1]
            else:  # the value carried back lives to the body's end
                when = loops[inside[-1]].stop
            if inside != scope:
                when = next((loops[l].stop for l in inside if l not in scope), when)
            last = max(last, when)
        until[value] = last

    for operation in reversed(graph.operations):
        for r in operation.results:
            if r is not None:
                settle(r)
    for argument in graph.arguments:
        settle(argument.value)
    return until


def live_ranges(chains: DefUse, pointwise: Sequence[bool], weights: Set[int], gradients: Set[int]) -> LiveRanges:
    """Computes when each value of a graph is stored.

    Args:
      chains: The graph. pointwise: For each operation, whether it is (`pointwise_operations`).
      weights, gradients: Values that stand for them (`graph/state.py`).
    """
    graph = chains.graph
    free = free_values(graph, pointwise)
    in_place, scattered = sums_in_place(chains, free), scattered_into(chains, free)
    fusion = fuse(chains, pointwise, free, in_place, _changed(chains, scattered))
    root = _roots({**aliases(graph), **in_place, **scattered})
    together = made_together(chains, fusion, gradients, root)
    delayed = delayed_products(chains, together)
    late, stacks = late_fills(chains, scattered), late_stacks(chains)
    fills = constant_fills(chains, free, gradients, scattered, late.keys() | stacks)
    slices = _slices_made(chains, fusion.fused)
    unstored = lambda v: fusion.fused[v] or v in root or v in free

    def alive(again: Mapping[int, int]) -> _Alive:
        until = _last_needs(chains, fusion.fused, fusion.sources, together, again)
        for value, at in together.items():
            for v in (value, *fusion.sources[value]):
                until[v] = max(until[v], at + 1)
        for operation, at in delayed.items():
            for v in together.keys() & set(graph.operations[operation].operands):
                until[v] = max(until[v], at + 1)
        stops = _stops(chains, until, root)
        reordered = freeing_first(chains, stops, root, weights, gradients)
        stops.update(reordered.stops)
        moved = {r: at for o, at in again.items() for r in graph.operations[o].results if r is not None}
        moved |= {**slices, **together, **fills, **reordered.made}
        apart = stops
        if fusion.added:
            fused = _not_in(fusion.fused, fusion.added)
            apart = _stops(chains, _last_needs(chains, fused, fusion.sources, together, again), root)
        made = list(_made_ranges(chains, unstored, stops, moved))
        orders = copies_in_other_orders(chains, {life.value for life in made}, fusion.sources, moved)
        ranges = (
            *orders.copies,
            *_argument_ranges(chains, stops),
            *(LiveRange(l.value, l.start, orders.stops.get(l.value, l.stop)) for l in made),
        )
        return _Alive(ranges, until, {l.value: apart[l.value] for l in made if apart[l.value] < l.stop})

    in_order, again = alive({}), put_off(chains)
    until, ranges = in_order.until, in_order.ranges
    hiding = alive(again) if again else in_order
    is_added = lambda o: o.name == "reduce_sum" and o.results[0] in fusion.added
    return LiveRanges(
        ranges=ranges,
        hiding_ranges=hiding.ranges,
        stored=frozenset(l.value for l in ranges),
        region=tuple(chains.region),
        root=root,
        alias_stop={v: until[v] for v in root},
        fused_stop={v: until[v] for v, is_fused in enumerate(fusion.fused) if is_fused},
        made_of={v: made_of for v, made_of in fusion.sources.items() if fusion.fused[v]},
        recomputable=frozenset(fusion.sources),
        added_reductions=tuple(o.index for o in graph.operations if is_added(o)),
        apart_stop=in_order.apart_stop,
        hiding_apart_stop=hiding.apart_stop,
        late_fills=late,
        late_stacks=stacks,
        turned_stacks=turned_stacks(chains, fusion.orders),
        parts=fusion.parts,
        delayed=delayed,
        together=together,
        again=fusion.again,
        turned=fusion.turned,
        orders=fusion.orders,
    )


def _slices_made(chains: DefUse, fused: Sequence[int]) -> dict[int, int]:
    """For what a scan slices, when it is taken: right before the first operation that needs it, or a value that is
    computed of it."""
    graph, needed = chains.graph, dict[int, int]()
    slices = [r for o in graph.operations if o.kind is OperationKind.SCAN_SLICE for r in o.results if r is not None]
    if not slices:
        return {}

    def first(value: int) -> int:
        scope, found = chains.scope(value), len(graph.operations)
        for operation, _ in chains.consumers[value]:
            inner = chains.loop_nest[operation.index][len(scope) :]
            computed = [r for r in operation.results if r is not None and fused[r] and r in needed]
            if inner:
                found = min(found, graph.loops[inner[0]].start)
            elif computed and len(computed) == len(operation.results):
                found = min([found, *(needed[r] for r in computed)])
            else:
                found = min(found, operation.index)
        return found

    for operation in reversed(graph.operations):
        for r in operation.results:
            if r is not None and (fused[r] or operation.kind is OperationKind.SCAN_SLICE):
                needed[r] = first(r)
    return {r: needed[r] for r in slices if needed[r] < len(graph.operations)}


def _changed(chains: DefUse, scattered: Mapping[int, int]) -> frozenset[int]:
    """The values that others are scattered into, but where the sum is a result: it is made in its place, as that of a
    state that is updated.
    """
    sums = {value: chains.consumers[result][0][0].results[0] for result, value in scattered.items()}
    return frozenset(value for value, total in sums.items() if total not in chains.outputs)


def _not_in(fused: Sequence[int], values: Set[int]) -> list[bool]:
    return [bool(is_fused) and v not in values for v, is_fused in enumerate(fused)]


def _roots(names: dict[int, int]) -> dict[int, int]:
    """`names`, from a value to another one whose memory it has, followed to the last one."""
    roots: dict[int, int] = {}
    for value, source in names.items():
        while source in names and names[source] != value:
            source = names[source]
        roots[value] = source
    return roots


def _stops(chains: DefUse, until: Sequence[int], root: Mapping[int, int]) -> dict[int, int]:
    """For each buffer, by the value whose it is, one past the last operation that needs anything in it."""
    graph, stops = chains.graph, {}
    made = [r for o in graph.operations for r in o.results if r is not None]
    for value in (*(a.value for a in graph.arguments), *made):
        own = len(graph.operations) if value in chains.outputs else until[value]
        at = root.get(value, value)
        stops[at] = max(own, stops.get(at, 0))
    return stops


def _argument_ranges(chains: DefUse, stops: Mapping[int, int]) -> Iterator[LiveRange]:
    graph = chains.graph
    succeeded = {o.successor_of for o in graph.outputs}
    for i, argument in enumerate(graph.arguments):
        if not argument.donated or i in succeeded:
            # a caller's buffer, or one that the successor takes over, is there from first to last
            yield LiveRange(argument.value, 0, max(len(graph.operations), 1))
        else:
            yield LiveRange(argument.value, 0, stops[argument.value])


def _made_ranges(
    chains: DefUse, unstored: Callable[[int], bool], stops: Mapping[int, int], moved: Mapping[int, int]
) -> Iterator[LiveRange]:
    graph = chains.graph
    taken_over = {
        o.value for o in graph.outputs if o.successor_of is not None and graph.arguments[o.successor_of].donated
    }
    for operation in graph.operations:
        for value in operation.results:
            if value is not None and value not in taken_over and not unstored(value):
                yield LiveRange(value, moved.get(value, chains.defined_at(value)), stops[value])
