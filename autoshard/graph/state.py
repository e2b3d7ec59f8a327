"""Which values stand for weights, known before their layer runs, and for gradients, needed by the update alone.

Told by the flow of values between the state that a step takes and the state that it returns, not by names.
"""

from collections.abc import Sequence, Set

from autoshard.graph.graph import Graph, Operation, OperationKind


def weight_values(graph: Graph, pointwise: Sequence[bool]) -> frozenset[int]:
    """State arguments, their slices in loops, and what pointwise operations make of them alone; `pointwise` tells of
    each operation whether it is (`pointwise_operations`).
    """
    weights = {graph.arguments[o.successor_of].value for o in graph.outputs if o.successor_of is not None}
    values = graph.values
    for operation, is_light in zip(graph.operations, pointwise, strict=True):
        if not is_light and operation.kind is not OperationKind.SCAN_SLICE:
            continue
        is_weight = False
        for o in operation.operands:
            if o is not None and values[o].shape:
                is_weight = o in weights
                if not is_weight:
                    break
        if is_weight:
            weights.update(r for r in operation.results if r is not None)
    return frozenset(weights)


def gradient_values(graph: Graph, pointwise: Sequence[bool]) -> frozenset[int]:
    """Values that reach nothing but the successors of state, through pointwise operations (`pointwise`, as above),
    norms and the stacking of loops.
    """
    return _gradients(graph, pointwise, frozenset())


def accumulated_gradients(graph: Graph, pointwise: Sequence[bool]) -> frozenset[int]:
    """The gradients, and those of micro-batches: what loops only add up, to sums that nothing but successors of state
    are made of."""
    sums = [o for o in graph.operations if o.kind is OperationKind.LOOP_CARRY]  # until something tells otherwise
    while True:
        gradients = _gradients(graph, pointwise, {o.index for o in sums})
        made = lambda o: [r for r in o.results if r is not None and graph.values[r].shape]
        confirmed = [o for o in sums if gradients.issuperset(made(o))]
        if len(confirmed) == len(sums):
            return gradients
        sums = confirmed


def _gradients(graph: Graph, pointwise: Sequence[bool], sums: Set[int]) -> frozenset[int]:
    """The gradients, if the loop carries with the numbers `sums` are sums of them, and all others are not."""
    values = graph.values
    seen = {o.value for o in graph.outputs if o.successor_of is not None}  # successors, and whatever is read
    waited: set[int] = set()  # read by operations that make more than gradients and norms
    gradients: set[int] = set()

    def read(operation: Operation, passes_on: bool) -> None:
        operands = [o for o in operation.operands if o is not None]
        seen.update(operands)
        if not passes_on and any([r is not None and values[r].shape for r in operation.results]):
            waited.update(operands)

    for operation in graph.operations:
        if operation.kind is OperationKind.LOOP_CARRY:  # reads what is made after it
            read(operation, operation.index in sums)
    for operation in reversed(graph.operations):
        is_sum = operation.index in sums
        passes_on = pointwise[operation.index] or operation.kind is OperationKind.SCAN_STACK or is_sum
        for r in operation.results:
            if r is None or not values[r].shape:
                continue
            if r in seen and r not in waited:
                gradients.add(r)
            else:
                passes_on = False
        read(operation, passes_on)
    return frozenset(gradients)


def awaited_scalar(graph: Graph, gradients: Set[int]) -> int:
    """The first operation that waits for a scalar made of more than half of all gradients, such as the norm by which
    they are clipped, and makes more than scalars; the number of operations where none does. A scalar of one gradient,
    as of Adafactor, holds up that one alone.
    """
    made_of: dict[int, int] = {}  # of values made of gradients: bit n stands for the n-th that is summed of others
    waiting: list[tuple[int, int]] = []  # operation, the gradients of the scalars that it waits for
    num_gradients = 0
    for operation in graph.operations:
        of_scalars = of_all = 0
        for o in operation.operands:
            bits = 0 if o is None else made_of.get(o, 0)
            of_all |= bits
            of_scalars |= bits if o is not None and not graph.values[o].shape else 0
        for r in operation.results:
            if r is None:
                continue
            if of_all:
                made_of[r] = of_all
            elif r in gradients and any(f.reduction is not None for f in operation.rule.factors):
                made_of[r] = 1 << num_gradients
                num_gradients += 1
            if of_scalars and graph.values[r].shape:
                waiting.append((operation.index, of_scalars))
    found = (o for o, scalars in waiting if 2 * scalars.bit_count() > num_gradients > 1)
    return next(found, len(graph.operations))
