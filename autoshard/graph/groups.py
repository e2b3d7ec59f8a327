"""Groups: operations that are decided together.

A chain of pointwise operations (elementwise, broadcasts, transposes, most reshapes) is one decision: resharding in the
middle of a chain moves the same bytes as at one of its ends. A parameter's whole optimizer update collapses into one
group this way. Every other operation is a group of its own.

Two operations join through a value when both are pointwise, all consumers of the value are pointwise, both run equally
often, and the dimensions of the value are tied to factors in the same way on both sides. A value used several times
joins only operations whose whole iteration space it spans, so that a mask or a learning rate shared by all layers does
not weld the layers together.

A sum whose terms are all partial sums is one group with the operations that make them: the terms are added first and
reduced once, as XLA does by reassociating all-reduces. The gradients of three projections of one input, or of an
embedding that is also the output layer, meet like that.
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
      reads: Values from outside, and own values that some operation reads in other dimensions than it defines.
      writes: All values that the group defines.
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
    """Disjoint sets."""

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
        """Makes one set of the sets of x and y; the smaller representative stays."""
        x, y = self.find(x), self.find(y)
        if x != y:
            self.parent[max(x, y)] = min(x, y)


class _FactorUnion(_Union):
    """Disjoint sets of (operation, factor), in which two factors of one operation never meet."""

    def __init__(self):
        super().__init__()
        self.holders = {}  # representative -> operations that hold a factor of its set

    def _holders(self, x):
        return self.holders.setdefault(x, {x[0]})

    def can_join(self, x, y):
        x, y = self.find(x), self.find(y)
        return x == y or self._holders(x).isdisjoint(self._holders(y))

    def join(self, x, y):
        x, y = self.find(x), self.find(y)
        if x != y and self.can_join(x, y):
            first, second = min(x, y), max(x, y)
            self.parent[second] = first
            self._holders(first).update(self._holders(second))
            del self.holders[second]


def map_dims(dims: Dims, factor_map: tuple[int, ...]) -> Dims:
    """`dims` with every factor renamed by `factor_map`."""
    return tuple(tuple(factor_map[f] for f in factors) for factors in dims)


def is_key_or_random(operation: Operation) -> bool:
    """Whether the operation makes or handles random numbers, which no compiler recomputes for free."""
    return operation.name.startswith(("random", "threefry", "rng"))


def free_values(graph: Graph) -> frozenset[int]:
    """Values made from scalars alone (iotas, masks, broadcast constants): rebuilt wherever they are read, in any
    layout.
    """
    free: set[int] = set()
    for operation in graph.operations:
        if (
            is_pointwise(operation)
            and not is_key_or_random(operation)
            and all(o is None or o in free or not graph.values[o].shape for o in operation.operands)
        ):
            free.update(r for r in operation.results if r is not None)
    return frozenset(free)


def _joinable(producer: Operation, dims: Dims, consumer: Operation, operand_dims: Dims, several: bool) -> bool:
    if producer.trips != consumer.trips or not any(dims) or len(dims) != len(operand_dims):
        return False
    for mine, theirs in zip(dims, operand_dims, strict=True):
        if len(mine) != len(theirs):
            return False
        if any(
            producer.rule.factors[f].size != consumer.rule.factors[g].size for f, g in zip(mine, theirs, strict=True)
        ):
            return False
    spanned = {f for factors in operand_dims for f in factors}
    return not several or len(spanned) == sum(f.size > 1 for f in consumer.rule.factors)


_SUMS = frozenset({"add", "add_any"})


def _partial_sums(
    operations: list[Operation], uses: dict[int, list[tuple[Operation, int]]]
) -> dict[int, list[Operation]]:
    """For each addition whose terms are all partial sums used nowhere else, the operations that make the terms.

    Terms are reducing operations with equal result dimensions and equal reduced factors, or such additions themselves.
    """
    producer = {r: o for o in operations for r in o.results if r is not None}
    sums: dict[int, list[Operation]] = {}
    for operation in operations:
        if operation.name not in _SUMS or not is_pointwise(operation) or operation.results[0] is None:
            continue
        terms = [producer.get(o) if o is not None else None for o in operation.operands]
        if all(
            t is not None
            and len(uses[o]) == 1
            and t.trips == operation.trips
            and (t.index in sums or _is_partial_sum(t))
            for t, o in zip(terms, operation.operands, strict=True)
        ):
            makers = [m for t in terms for m in sums.get(t.index, [t])]
            if len({_reduced_sizes(m) for m in makers}) == 1:
                sums[operation.index] = makers
    return sums


def _is_partial_sum(operation: Operation) -> bool:
    reductions = [f.reduction for f in operation.rule.factors if f.reduction is not None and f.size > 1]
    return (
        operation.kind is OperationKind.EQUATION
        and len(operation.results) == 1
        and bool(reductions)
        and set(reductions) == {"add"}
        and all(len(f) == 1 for f in operation.rule.results[0])
    )


def _reduced_sizes(operation: Operation) -> tuple[int, ...]:
    return tuple(f.size for f in operation.rule.factors if f.reduction is not None and f.size > 1)


def _join_sums(
    sums: dict[int, list[Operation]], operations: list[Operation], groups: _Union, factors: _FactorUnion
) -> None:
    """Joins each addition with the makers of its terms; their reduced factors are paired in order."""
    by_index = {o.index: o for o in operations}
    for index, makers in sums.items():
        first = makers[0]
        reduced = lambda m: [
            (m.index, f) for f, x in enumerate(m.rule.factors) if x.reduction is not None and x.size > 1
        ]
        pairs = [(a, b) for m in makers[1:] for a, b in zip(reduced(first), reduced(m), strict=True)]
        addition = by_index[index]
        for m in (addition, *makers[1:]):
            pairs += [
                ((first.index, f[0]), (m.index, g[0]))
                for f, g in zip(first.rule.results[0], m.rule.results[0], strict=True)
            ]
        for m in (addition, *makers):
            groups.join(first.index, m.index)
        for a, b in pairs:
            factors.join(a, b)


def _join_common_reads(operations: list[Operation], factors: _FactorUnion) -> None:
    """A group that reads one value in several places reads it in one layout, where that is possible."""
    first: dict[int, tuple[int, Dims]] = {}
    for operation in operations:
        for value, dims in zip(operation.operands, operation.rule.operands, strict=True):
            if value is None:
                continue
            owner, known = first.setdefault(value, (operation.index, dims))
            for mine, theirs in zip(known, dims, strict=True):
                if len(mine) == len(theirs) == 1:
                    factors.join((owner, mine[0]), (operation.index, theirs[0]))


def group_operations(graph: Graph) -> tuple[Group, ...]:
    """Partitions the graph's operations into groups; operations whose results are all free belong to none."""
    free = free_values(graph)
    decided = [o for o in graph.operations if not (o.results and all(r is None or r in free for r in o.results))]
    uses: dict[int, list[tuple[Operation, int]]] = collections.defaultdict(list)
    for operation in decided:
        for slot, value in enumerate(operation.operands):
            if value is not None:
                uses[value].append((operation, slot))
    groups, factors = _Union(), _FactorUnion()
    sums = _partial_sums(decided, uses)
    _join_sums(sums, decided, groups, factors)
    joins = lambda o: is_pointwise(o) and o.index not in sums
    for producer in decided:
        if not joins(producer):
            continue
        for slot, value in enumerate(producer.results):
            consumers = uses.get(value, []) if value is not None else []
            if not all(joins(c) for c, _ in consumers):
                continue
            dims = producer.rule.results[slot]
            for consumer, operand in consumers:
                operand_dims = consumer.rule.operands[operand]
                if _joinable(producer, dims, consumer, operand_dims, len(consumers) > 1):
                    pairs = [
                        ((producer.index, f), (consumer.index, g))
                        for mine, theirs in zip(dims, operand_dims, strict=True)
                        for f, g in zip(mine, theirs, strict=True)
                    ]
                    if all(factors.can_join(f, g) for f, g in pairs):
                        groups.join(producer.index, consumer.index)
                        for f, g in pairs:
                            factors.join(f, g)
    members: dict[int, list[Operation]] = collections.defaultdict(list)
    for operation in decided:
        members[groups.find(operation.index)].append(operation)
    for operations in members.values():
        _join_common_reads(operations, factors)
    return tuple(_freeze(i, ops, factors, free) for i, (_, ops) in enumerate(sorted(members.items())))


def _freeze(index: int, operations: list[Operation], union: _Union, free: frozenset[int]) -> Group:
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
    written = {
        r: map_dims(dims, own)
        for o, own in zip(operations, maps, strict=True)
        for r, dims in zip(o.results, o.rule.results, strict=True)
        if r is not None
    }
    reads: dict[tuple[int, Dims], list[int]] = {}
    writes: list[Access] = []
    for operation, own in zip(operations, maps, strict=True):
        for value, dims in zip(operation.operands, operation.rule.operands, strict=True):
            if value is None or value in free:
                continue
            mapped = map_dims(dims, own)
            if written.get(value) != mapped or operation.kind is OperationKind.LOOP_CARRY:
                reads.setdefault((value, mapped), []).append(operation.index)
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
