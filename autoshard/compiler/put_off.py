"""What a checkpointed function computes again only when its gradient is due, where collectives run behind kernels.

In the backward pass a checkpointed function first computes again what was not kept, and then its gradients. Where the
products with weights are kept, no gradient but its own waits for attention's scores of all pairs. XLA:GPU's
latency-hiding scheduler, which is built from the end, puts them off until then, so that they are not there beside what
the gradients before theirs take, such as those of a perceptron. In the schedule for least memory the product that makes
the scores stays where the program has it.
"""

import itertools
from collections.abc import Sequence

from autoshard.compiler.def_use import DefUse
from autoshard.graph.graph import Graph, Operation, OperationKind


def put_off(chains: DefUse) -> dict[int, int]:
    """For operations that are computed again behind the first product of their function's gradients, the operation at
    which: the first one that needs them."""
    graph = chains.graph
    repeated, found = _repeated(graph) if graph.checkpoints else {}, dict[int, int]()
    inside = [(place, repeated.keys() & set(range(*place))) for place in graph.checkpoints]
    forward = max([repeated[o] for _, own in inside for o in own], default=-1)
    for (start, stop), own in inside:
        if not own:
            continue  # nothing is computed again
        again = _of_what_is_kept(chains, (start, stop), forward)
        first = next((o.index for o in graph.operations[start:stop] if o.rule.is_heavy and o.index not in again), stop)
        needed: dict[int, int] = {}
        for index in sorted(again, reverse=True):
            needed[index] = at = _needed_at(chains, graph.operations[index], needed, (start, stop))
            if index < first < at:
                found[index] = at
    return found


def _of_what_is_kept(chains: DefUse, place: tuple[int, int], forward: int) -> set[int]:
    """The operations of a checkpointed function in the backward pass for which no gradient is needed.

    Args:
      chains: The program. place: The function. forward: The last operation that is computed again anywhere.
    """
    found: set[int] = set()
    start, stop = place
    for operation in chains.graph.operations[start:stop]:
        made = [chains.producer[o] for o in operation.operands if o is not None]
        if all([p is None or p.index in found or p.index <= forward for p in made]):
            found.add(operation.index)
    return found


def _needed_at(chains: DefUse, operation: Operation, needed: dict[int, int], place: tuple[int, int]) -> int:
    """The first operation that needs what another makes; that itself where any of it is needed elsewhere.

    Args:
      chains: The program. operation: The operation.
      needed: When its readers are needed, of those that are computed again. place: The checkpointed function.
    """
    readers = [c for r in operation.results if r is not None for c, _ in chains.consumers[r]]
    loops = chains.loop_nest[operation.index]
    is_inside = all([place[0] <= c.index < place[1] and chains.loop_nest[c.index] == loops for c in readers])
    if not readers or not is_inside or not chains.outputs.isdisjoint(operation.results):
        return operation.index
    return min([needed.get(c.index, c.index) for c in readers])


def _repeated(graph: Graph) -> dict[int, int]:
    """The operations that compute what an earlier one has computed, of equal values and at the same line, each with
    the earlier one."""
    numbers: dict[int | None, int] = {}
    known: dict[tuple[object, ...], tuple[int, Sequence[int]]] = {}  # -> the first operation, numbers of its results
    fresh, repeated = itertools.count(), dict[int, int]()
    for operation in graph.operations:
        of = tuple([-1 if o is None else numbers.setdefault(o, next(fresh)) for o in operation.operands])
        if operation.name == "reduce_precision":  # around what a checkpoint keeps
            own: Sequence[int] = of[:1]
        elif operation.kind is not OperationKind.EQUATION:
            own = [next(fresh) for _ in operation.results]
        else:
            shapes = tuple([None if r is None else graph.values[r].shape for r in operation.results])
            key = operation.name, operation.source, operation.rule, shapes, of
            if key in known:
                repeated[operation.index] = known[key][0]
            _, own = known.setdefault(key, (operation.index, [next(fresh) for _ in operation.results]))
        numbers.update((r, n) for r, n in zip(operation.results, own, strict=True) if r is not None)
    return repeated
