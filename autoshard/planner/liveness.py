"""When each value occupies memory, in program order.

Time is counted in operations of the flattened program. A loop body is passed once: what it needs of the world outside
lives through the whole loop. What is not stored at all says `fusion.py`; which values share a buffer, and which buffers
are there earlier or later than the program's order tells, say `buffers.py` and `freeing_first.py`. What can be rebuilt
from nothing (iotas, broadcast scalars, masks made of them) is never stored; the successor of a donated argument takes
over its buffer.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

from autoshard.garbage import collection_paused
from autoshard.graph.graph import Graph, OperationKind
from autoshard.graph.groups import free_values, pointwise_operations
from autoshard.planner import buffers
from autoshard.planner.freeing_first import freeing_first
from autoshard.planner.fusion import fuse
from autoshard.planner.overlap import gradient_values, weight_values
from autoshard.planner.reading import Reading, read
from autoshard.planner.transposed import transposed


@dataclasses.dataclass(frozen=True, slots=True)
class Lifetime:
    """A stored value occupies memory during `start <= t < stop` (operation indices)."""

    value: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class Liveness:
    """Lifetimes of everything stored.

    Attributes:
      lifetimes: One per stored value, arguments included, behind the copies in other orders of dimensions.
      stored: The values that have a lifetime.
      stretch: For each operation, the number of heavy kernels before it: operations of one stretch fuse.
      alias_stop: For each value that is another name of its operand, when its last use ends.
      fused_stop: For each value that is computed inside its readers, when the last of these ends.
      early_terms: The values whose buffer is filled with a constant long before they are made, even where they are only
        partial sums (`buffers.early_terms`).
      remade: The results that their readers could compute (`fusion.py`), stored or not.
      added: The reductions that are part of the kernel that adds two of them. apart_stops: When the lifetimes end that
        are longer for it, if each of them is a kernel of its own.
      filled_late: The operations whose first operand execution fills when the others are there, and whether it does so
        only if the sum is partial (`buffers.filled_late`).
      behind: The products that run later than where the program does them, and when (`buffers.behind`).
    """

    lifetimes: tuple[Lifetime, ...]
    stored: frozenset[int]
    stretch: tuple[int, ...]
    alias_stop: tuple[tuple[int, int], ...]
    fused_stop: tuple[tuple[int, int], ...]
    early_terms: frozenset[int]
    remade: frozenset[int]
    added: tuple[int, ...]
    apart_stops: tuple[tuple[int, int], ...]
    filled_late: tuple[tuple[int, bool], ...]
    behind: tuple[tuple[int, int], ...]


def _last_needs(reading: Reading, fused: Sequence[int], together: Mapping[int, int]) -> list[int]:
    """For each value, one past the last operation that needs it, directly or to compute a fused value again.

    `together`: What is made with another value and not where the program does it, and where (`buffers.siblings`).
    """
    graph, around, loops = reading.graph, reading.around, reading.graph.loops
    until = [0] * len(graph.values)

    def settle(value: int) -> None:
        is_made = not fused[value] or not reading.consumers[value]
        last, home = reading.born(value) + 1 if is_made else 0, reading.home(value)
        for operation, slot in reading.consumers[value]:
            inside = around[operation.index]
            when = operation.index + 1
            if operation.kind is not OperationKind.LOOP_CARRY:
                needs = [
                    until[r] if fused[r] else together.get(r, operation.index) + 1
                    for r in operation.results
                    if r is not None
                ]
                when = max(needs, default=when)
            elif slot == 0:  # the initial value ends where the loop begins
                inside = inside[:-1]
            else:  # the value carried back lives to the body's end
                when = loops[inside[-1]].stop
            if inside != home:
                when = next((loops[l].stop for l in inside if l not in home), when)
            last = max(last, when)
        until[value] = last

    for operation in reversed(graph.operations):
        for r in operation.results:
            if r is not None:
                settle(r)
    for argument in graph.arguments:
        settle(argument.value)
    return until


@collection_paused()
def liveness(graph: Graph) -> Liveness:
    """Computes when each value of `graph` is stored."""
    reading, pointwise = read(graph), pointwise_operations(graph)
    free, gradients = free_values(graph, pointwise), gradient_values(graph, pointwise)
    in_place = buffers.sums_in_place(reading, free)
    scattered = buffers.scattered_into(reading, free)
    fusion = fuse(reading, pointwise, free, in_place)
    root = _roots({**buffers.aliases(graph), **in_place, **scattered})
    together = buffers.siblings(reading, fusion.fused, fusion.sources, gradients)
    until = _last_needs(reading, fusion.fused, together)
    for value, at in together.items():
        for v in (value, *fusion.sources[value]):
            until[v] = max(until[v], at + 1)
    behind = buffers.behind(reading, together)
    for operation, at in behind:
        for v in together.keys() & set(graph.operations[operation].operands):
            until[v] = max(until[v], at + 1)
    filled_late = buffers.filled_late(reading, scattered)
    zeros = buffers.zeros(reading, free, gradients, scattered, dict(filled_late))
    stops = _stops(reading, until, root)
    sooner = freeing_first(reading, stops, root, gradients | weight_values(graph, pointwise))
    stops.update(sooner.stops)
    moved = {**together, **zeros, **sooner.made}
    alone = _not_in(fusion.fused, fusion.added)
    apart = _stops(reading, _last_needs(reading, alone, together), root) if fusion.added else stops
    unstored = lambda v: fusion.fused[v] or v in root or v in free or buffers.is_reversed_kernel(reading, v)
    made = list(_made_lifetimes(reading, unstored, stops, moved))
    orders = transposed(reading, {life.value for life in made}, fusion.sources, moved)
    lifetimes = [
        *(Lifetime(*copy) for copy in orders.copies),
        *_argument_lifetimes(reading, stops),
        *(Lifetime(l.value, l.start, orders.stops.get(l.value, l.stop)) for l in made),
        *(Lifetime(*copy) for copy in buffers.kernel_copies(reading)),
    ]
    return Liveness(
        tuple(lifetimes),
        frozenset(l.value for l in lifetimes),
        tuple(reading.stretch),
        tuple((v, until[v]) for v in root),
        tuple((v, until[v]) for v, is_fused in enumerate(fusion.fused) if is_fused),
        buffers.early_terms(reading, zeros, gradients),
        frozenset(fusion.sources),
        tuple(sorted(o.index for o in graph.operations if o.name == "reduce_sum" and o.results[0] in fusion.added)),
        tuple((l.value, apart[l.value]) for l in made if apart[l.value] < l.stop),
        filled_late,
        behind,
    )


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


def _stops(reading: Reading, until: Sequence[int], root: Mapping[int, int]) -> dict[int, int]:
    """For each buffer, by the value whose it is, one past the last operation that needs anything in it."""
    graph, stops = reading.graph, {}
    made = [r for o in graph.operations for r in o.results if r is not None]
    for value in (*(a.value for a in graph.arguments), *made):
        own = len(graph.operations) if value in reading.outputs else until[value]
        at = root.get(value, value)
        stops[at] = max(own, stops.get(at, 0))
    return stops


def _argument_lifetimes(reading: Reading, stops: Mapping[int, int]) -> Iterator[Lifetime]:
    graph = reading.graph
    succeeded = {o.successor_of for o in graph.outputs}
    for i, argument in enumerate(graph.arguments):
        if not argument.donated or i in succeeded:
            # a caller's buffer, or one that the successor takes over, is there from first to last
            yield Lifetime(argument.value, 0, max(len(graph.operations), 1))
        else:
            yield Lifetime(argument.value, 0, stops[argument.value])


def _made_lifetimes(
    reading: Reading, unstored: Callable[[int], bool], stops: Mapping[int, int], moved: Mapping[int, int]
) -> Iterator[Lifetime]:
    graph = reading.graph
    taken_over = {
        o.value for o in graph.outputs if o.successor_of is not None and graph.arguments[o.successor_of].donated
    }
    for operation in graph.operations:
        for value in operation.results:
            if value is not None and value not in taken_over and not unstored(value):
                yield Lifetime(value, moved.get(value, reading.born(value)), stops[value])
