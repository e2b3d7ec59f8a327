"""Groups: operations that are decided together.

A chain of pointwise operations (elementwise, broadcasts, transposes, most reshapes) is one decision: resharding in the
middle of a chain moves the same bytes as at one of its ends. A parameter's whole optimizer update collapses into one
group this way. Every other operation is a group of its own.

Two operations join through a value when both are pointwise, all consumers of the value are pointwise, both run equally
often, and the dimensions of the value are tied to factors in the same way on both sides. A value used several times
joins only operations whose whole iteration space it spans, so that a mask or a learning rate shared by all layers does
not weld the layers together.
"""

import collections
import dataclasses

from autoshard.graph.graph import Dims, Factor, Graph, Operation, OperationKind


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """A group's use of a value: its dimensions in the group's factors.

    Attributes:
      value: Value index.
      dims: The value's dimensions over the group's factors.
      operations: The operations of the group that read (or the one that writes) the value in this way.
    """

    value: int
    dims: Dims
    operations: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Operations that share one assignment of mesh axes to factors.

    Attributes:
      index: Position in the tuple of groups; groups are ordered by their first operation.
      operations: Operation indices, in program order.
      factors: The common iteration space.
      factor_maps: For each operation, its own factors as indices into `factors`.
      reads: Values from outside. writes: All values that the group defines.
      trips: How often it runs.
    """

    index: int
    operations: tuple[int, ...]
    factors: tuple[Factor, ...]
    factor_maps: tuple[tuple[int, ...], ...]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    trips: float


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


class _Union:
    """Disjoint sets of (operation, factor) pairs and of operations."""

    def __init__(self):
        self.parent = {}

    def find(self, x):
        root = x
        while self.parent.get(root, root) != root:
            root = self.parent[root]
        while self.parent.get(x, x) != root:
            self.parent[x], x = root, self.parent[x]
        return root

    def join(self, x, y):
        x, y = self.find(x), self.find(y)
        if x != y:
            self.parent[max(x, y)] = min(x, y)


def map_dims(dims: Dims, factor_map: tuple[int, ...]) -> Dims:
    """`dims` with every factor renamed by `factor_map`."""
    return tuple(tuple(factor_map[f] for f in factors) for factors in dims)


def _joinable(producer: Operation, dims: Dims, consumer: Operation, operand_dims: Dims, several: bool) -> bool:
    if producer.trips != consumer.trips or not any(dims) or len(dims) != len(operand_dims):
        return False
    for mine, theirs in zip(dims, operand_dims, strict=True):
        if len(mine) != len(theirs):
            return False
        if any(producer.rule.factors[f].size != consumer.rule.factors[g].size for f, g in zip(mine, theirs, strict=True)):
            return False
    spanned = {f for factors in operand_dims for f in factors}
    return not several or len(spanned) == sum(f.size > 1 for f in consumer.rule.factors)


def group_operations(graph: Graph) -> tuple[Group, ...]:
    """Partitions the graph's operations into groups."""
    uses: dict[int, list[tuple[Operation, int]]] = collections.defaultdict(list)
    for operation in graph.operations:
        for slot, value in enumerate(operation.operands):
            if value is not None:
                uses[value].append((operation, slot))
    groups, factors = _Union(), _Union()
    for producer in graph.operations:
        if not is_pointwise(producer):
            continue
        for slot, value in enumerate(producer.results):
            consumers = uses.get(value, []) if value is not None else []
            if not all(is_pointwise(c) for c, _ in consumers):
                continue
            dims = producer.rule.results[slot]
            for consumer, operand in consumers:
                operand_dims = consumer.rule.operands[operand]
                if _joinable(producer, dims, consumer, operand_dims, len(consumers) > 1):
                    groups.join(producer.index, consumer.index)
                    for mine, theirs in zip(dims, operand_dims, strict=True):
                        for f, g in zip(mine, theirs, strict=True):
                            factors.join((producer.index, f), (consumer.index, g))
    members: dict[int, list[Operation]] = collections.defaultdict(list)
    for operation in graph.operations:
        members[groups.find(operation.index)].append(operation)
    return tuple(_freeze(i, ops, factors) for i, (_, ops) in enumerate(sorted(members.items())))


def _freeze(index: int, operations: list[Operation], union: _Union) -> Group:
    numbering: dict[tuple[int, int], int] = {}
    factors: list[Factor] = []
    maps: list[tuple[int, ...]] = []
    for operation in operations:
        own = []
        for f, factor in enumerate(operation.rule.factors):
            root = union.find((operation.index, f))
            if root not in numbering:
                numbering[root] = len(factors)
                factors.append(factor)
            own.append(numbering[root])
        maps.append(tuple(own))
    written = {r for o in operations for r in o.results if r is not None}
    reads: dict[tuple[int, Dims], list[int]] = {}
    writes: list[Access] = []
    for operation, own in zip(operations, maps, strict=True):
        for value, dims in zip(operation.operands, operation.rule.operands, strict=True):
            loops_back = operation.kind is OperationKind.LOOP_CARRY
            if value is not None and (value not in written or loops_back):
                reads.setdefault((value, map_dims(dims, own)), []).append(operation.index)
        for value, dims in zip(operation.results, operation.rule.results, strict=True):
            if value is not None:
                writes.append(Access(value, map_dims(dims, own), (operation.index,)))
    return Group(
        index,
        tuple(o.index for o in operations),
        tuple(factors),
        tuple(maps),
        tuple(Access(v, d, tuple(dict.fromkeys(ops))) for (v, d), ops in reads.items()),
        tuple(writes),
        operations[0].trips,
    )
