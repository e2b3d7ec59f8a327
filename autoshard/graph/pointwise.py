"""Which operations only map elements, and which values are rebuilt wherever they are read."""

from collections.abc import Sequence

from autoshard.graph.graph import Graph, Operation, OperationKind


def is_pointwise(operation: Operation) -> bool:
    """Whether the operation only maps elements, so that a compiler fuses it and any split of it needs no traffic."""
    return (
        operation.kind is OperationKind.EQUATION
        and not operation.rule.is_heavy
        and operation.rule.origin != "replicated"
        and operation.fixed_results is None
        and operation.fixed_operands is None
        and all(f.reduction is None for f in operation.rule.factors)
    )


def pointwise_operations(graph: Graph) -> list[bool]:
    """For each operation, whether it is pointwise. Operations of one rule are looked at once."""
    known: dict[tuple[int, OperationKind, bool], bool] = {}
    flags = []
    for o in graph.operations:
        key = (id(o.rule), o.kind, o.fixed_results is None and o.fixed_operands is None)
        flag = known.get(key)
        if flag is None:
            flag = known[key] = is_pointwise(o)
        flags.append(flag)
    return flags


def is_key_or_random(operation: Operation) -> bool:
    """Whether the operation makes or handles random numbers, which no compiler recomputes for free."""
    return operation.name.startswith(("random", "threefry", "rng"))


def free_values(graph: Graph, pointwise: Sequence[bool] | None = None) -> frozenset[int]:
    """Values made from scalars alone (iotas, masks, broadcast constants): rebuilt wherever they are read, in any
    layout. `pointwise` saves the making of `pointwise_operations(graph)`.
    """
    free: set[int] = set()
    for operation, is_light in zip(graph.operations, pointwise or pointwise_operations(graph), strict=True):
        if not is_light:
            continue
        for o in operation.operands:
            if o is not None and o not in free and graph.values[o].shape:
                break
        else:
            if not is_key_or_random(operation):
                free.update(r for r in operation.results if r is not None)
    return frozenset(free)


def random_values(graph: Graph, pointwise: Sequence[bool]) -> frozenset[int]:
    """Values made of random numbers, and of scalars and masks beside them, alone: which entry is which depends on its
    index, and on nothing that a model computes. `pointwise` is `pointwise_operations(graph)`.
    """
    free = free_values(graph, pointwise)
    found: set[int] = set()
    for operation, is_light in zip(graph.operations, pointwise, strict=True):
        if not is_light:
            continue
        read = [o for o in operation.operands if o is not None and graph.values[o].shape]
        is_drawn = is_key_or_random(operation) or not found.isdisjoint(read)
        if is_drawn and all(o in found or o in free for o in read):
            found.update(r for r in operation.results if r is not None)
    return frozenset(found)
