"""Groups: operations that are decided together.

A chain of pointwise operations (elementwise, broadcasts, transposes, most reshapes) is one decision: resharding in the
middle of a chain moves the same bytes as at one of its ends. A parameter's whole optimizer update collapses into one
group this way. Every other operation is a group of its own.

Two operations join through a value when both are pointwise, all consumers of the value are pointwise, both run equally
often, and the dimensions of the value are tied to factors in the same way on both sides. A value used several times
joins only operations whose whole iteration space it spans, so that a mask or a learning rate shared by all layers does
not weld the layers together. Where layers are welded all the same, because each first gives the shared value a
dimension of one, as to a bias of attention scores, their operations are joined anew and what is made of a shared value
alone counts as shared.

A sum whose terms are all partial sums is one group with the operations that make them: the terms are added first and
reduced once, as XLA does by reassociating all-reduces. The gradients of three projections of one input, or of an
embedding that is also the output layer, meet like that.
"""

import collections
import dataclasses
from collections.abc import Sequence, Set

import numpy as np

from autoshard.garbage import collection_paused
from autoshard.graph.graph import Dims, Factor, FactorRule, Graph, Operation, OperationKind


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


class _Union:
    """Disjoint sets of the numbers below `count`."""

    def __init__(self, count: int):
        self.parent = list(range(count))

    def find(self, x: int) -> int:
        parent = self.parent
        while parent[x] != x:
            parent[x] = x = parent[parent[x]]
        return x

    def join(self, x: int, y: int) -> None:
        """Makes one set of the sets of x and y."""
        self.parent[self.find(y)] = self.find(x)

    def roots(self) -> list[int]:
        """For every number the representative of its set."""
        roots = np.array(self.parent, dtype=np.intp)
        while not np.array_equal(roots, further := roots[roots]):
            roots = further
        return roots.tolist()


class _Factors(_Union):
    """Disjoint sets of the factors of all operations, in which two factors of one operation never meet.

    Factor f of operation o has the number `start[o] + f`.
    """

    def __init__(self, operations: Sequence[Operation]):
        self.start: list[int] = []
        self.owner: list[int] = []
        for operation in operations:
            self.start.append(len(self.owner))
            self.owner += [operation.index] * len(operation.rule.factors)
        super().__init__(len(self.owner))
        self.held: list[set[int] | None] = [None] * len(self.owner)
        """For each representative of several factors, the operations that they belong to."""

    def would_clash(self, x: int, y: int) -> bool:
        """Whether two factors of one operation would meet if the sets of the representatives x and y became one."""
        mine, theirs = self.held[x], self.held[y]
        if mine is None:
            return self.owner[x] in theirs if theirs is not None else self.owner[x] == self.owner[y]
        return self.owner[y] in mine if theirs is None else not mine.isdisjoint(theirs)

    def join(self, x: int, y: int) -> None:
        """Makes one set of the sets of x and y, unless two factors of one operation would meet."""
        x, y = self.find(x), self.find(y)
        if x == y or self.would_clash(x, y):
            return
        mine, theirs = self.held[x], self.held[y]
        if mine is None or (theirs is not None and len(mine) < len(theirs)):  # the larger set stays
            x, y, mine, theirs = y, x, theirs, mine
        if mine is None:
            mine = {self.owner[x]}
        if theirs is None:
            mine.add(self.owner[y])
        else:
            mine |= theirs
        self.parent[y], self.held[x], self.held[y] = x, mine, None

    def join_all(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """Joins the pairs if each of them could be joined alone; returns whether that is so."""
        roots = [(self.find(x), self.find(y)) for x, y in pairs]
        for x, y in roots:
            if x != y and self.would_clash(x, y):
                return False
        for x, y in roots:
            if x != y:
                self.join(x, y)
        return True


def map_dims(dims: Dims, factor_map: tuple[int, ...]) -> Dims:
    """`dims` with every factor renamed by `factor_map`."""
    return tuple(tuple(factor_map[f] for f in factors) for factors in dims)


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


Pairs = tuple[tuple[int, int], ...]
"""Factors of two operations that are the same index: (factor of the one, factor of the other)."""


def _shared_factors(
    producer: FactorRule, dims: Dims, consumer: FactorRule, operand_dims: Dims, several: bool
) -> Pairs | None:
    """The factors that meet in a value which is written in `dims` and read in `operand_dims`, if the two operations may
    be joined through it; `several` if others read it too.
    """
    if not any(dims) or len(dims) != len(operand_dims):
        return None
    if any(len(mine) != len(theirs) for mine, theirs in zip(dims, operand_dims, strict=True)):
        return None
    pairs = tuple(
        (f, g) for mine, theirs in zip(dims, operand_dims, strict=True) for f, g in zip(mine, theirs, strict=True)
    )
    if any(producer.factors[f].size != consumer.factors[g].size for f, g in pairs):
        return None
    spanned = {g for _, g in pairs}
    return pairs if not several or len(spanned) == sum(f.size > 1 for f in consumer.factors) else None


_SUMS = frozenset({"add", "add_any"})


Uses = dict[int, list[tuple[Operation, int]]]
"""For each value, who reads it: (operation, operand slot)."""


def _partial_sums(operations: Sequence[Operation], pointwise: Sequence[bool], uses: Uses) -> dict[int, list[Operation]]:
    """For each addition whose terms are all partial sums used nowhere else, the operations that make the terms.

    Terms are reducing operations with equal result dimensions and equal reduced factors, or such additions themselves.
    """
    producer = {r: o for o in operations for r in o.results if r is not None}
    sums: dict[int, list[Operation]] = {}
    for operation in operations:
        if operation.name not in _SUMS or not pointwise[operation.index] or operation.results[0] is None:
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
    sums: dict[int, list[Operation]], operations: Sequence[Operation], groups: _Union, factors: _Factors
) -> None:
    """Joins each addition with the makers of its terms; their reduced factors are paired in order."""
    start = factors.start
    for index, makers in sums.items():
        first, addition = makers[0], operations[index]
        reduced = lambda m: [
            start[m.index] + f for f, x in enumerate(m.rule.factors) if x.reduction is not None and x.size > 1
        ]
        pairs = [(a, b) for m in makers[1:] for a, b in zip(reduced(first), reduced(m), strict=True)]
        for m in (addition, *makers[1:]):
            pairs += [
                (start[first.index] + f[0], start[m.index] + g[0])
                for f, g in zip(first.rule.results[0], m.rule.results[0], strict=True)
            ]
        for m in (addition, *makers):
            groups.join(first.index, m.index)
        for a, b in pairs:
            factors.join(a, b)


def _join_chains(
    operations: Sequence[Operation],
    joins: Sequence[bool],
    uses: Uses,
    groups: _Union,
    factors: _Factors,
    welded: Set[int],
) -> None:
    """Joins pointwise operations through the values that one makes and another reads; only those that `joins` names.

    Among the operations in `welded`, what is made of a shared value alone, such as the same with a dimension of one
    more, is as good as shared.
    """
    known: dict[tuple[int, int, int, int, bool], Pairs | None] = {}
    start = factors.start
    kept = {o for c in operations if not joins[c.index] for o in c.operands}  # read by others, too
    shared_by_origin: set[int] = set()
    for producer in operations:
        if not joins[producer.index]:
            continue
        rule, mine = producer.rule, start[producer.index]
        for slot, value in enumerate(producer.results):
            if value is None or value in kept or value not in uses:
                continue
            consumers = uses[value]
            several = len(consumers) > 1 or value in shared_by_origin
            for consumer, operand in consumers:
                if producer.trips != consumer.trips:
                    continue
                key = (id(rule), slot, id(consumer.rule), operand, several)
                if key not in known:
                    known[key] = _shared_factors(
                        rule, rule.results[slot], consumer.rule, consumer.rule.operands[operand], several
                    )
                shared = known[key]
                if shared is None:
                    continue
                theirs = start[consumer.index]
                if factors.join_all([(mine + f, theirs + g) for f, g in shared]):
                    groups.join(producer.index, consumer.index)
                    if several and consumer.index in welded:
                        shared_by_origin.update(r for r in consumer.results if r is not None)


def _join_common_reads(operations: Sequence[Operation], reread: frozenset[int], factors: _Factors) -> None:
    """A group that reads one value in several places reads it in one layout, where that is possible; `reread` are the
    values that have several readers.
    """
    first: dict[int, tuple[int, Dims]] = {}
    for operation in operations:
        start = factors.start[operation.index]
        for slot, value in enumerate(operation.operands):
            if value not in reread:
                continue
            dims = operation.rule.operands[slot]
            known = first.get(value)
            if known is None:
                first[value] = (start, dims)
                continue
            for mine, theirs in zip(known[1], dims, strict=True):
                if len(mine) == len(theirs) == 1:
                    factors.join(known[0] + mine[0], start + theirs[0])


@collection_paused()
def group_operations(graph: Graph) -> tuple[Group, ...]:
    """Partitions the graph's operations into groups; operations whose results are all free belong to none."""
    pointwise = pointwise_operations(graph)
    free = free_values(graph, pointwise)
    decided = [o for o in graph.operations if not (o.results and all([r is None or r in free for r in o.results]))]
    uses: Uses = collections.defaultdict(list)
    for operation in decided:
        for slot, value in enumerate(operation.operands):
            if value is not None:
                uses[value].append((operation, slot))
    sums = _partial_sums(decided, pointwise, uses)
    joins = [is_light and index not in sums for index, is_light in enumerate(pointwise)]
    reread = frozenset([value for value, users in uses.items() if len(users) > 1])

    def joined(welded: Set[int]) -> list[Group]:
        groups, factors = _Union(len(graph.operations)), _Factors(graph.operations)
        _join_sums(sums, graph.operations, groups, factors)
        _join_chains(decided, joins, uses, groups, factors, welded)
        members: dict[int, list[Operation]] = collections.defaultdict(list)
        root = groups.roots()
        for operation in decided:
            members[root[operation.index]].append(operation)
        for operations in members.values():
            _join_common_reads(operations, reread, factors)
        freezer = _Freezer(factors, free)
        return [freezer.freeze(i, operations) for i, operations in enumerate(members.values())]

    groups = joined(frozenset())
    welded = frozenset([o for g in groups if _is_welded(g) for o in g.operations])
    return tuple(joined(welded) if welded else groups)


def _is_welded(group: Group) -> bool:
    """Whether no operation of the group spans its iteration space: a shared value has joined what has no more in
    common, such as the attention of several layers, of which a mesh axis could then split only one by the batch.
    """
    return len(group.factors) > max(map(len, map(set, group.factor_maps)))


class _Freezer:
    """Makes groups of sets of operations. What equal layers have in common is made once and shared."""

    def __init__(self, factors: _Factors, free: frozenset[int]):
        self.start, self.root, self.free = factors.start, factors.roots(), free
        self.mapped: dict[tuple[int, tuple[int, ...]], tuple[tuple[Dims, ...], tuple[Dims, ...]]] = {}
        self.dims: dict[Dims, Dims] = {}

    def map_rule(self, rule: FactorRule, own: tuple[int, ...]) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
        """The dims of the rule's operands and results with its factors renamed by `own`; equal dims are one object."""
        key = (id(rule), own)
        if key not in self.mapped:
            rename = lambda dims: self.dims.setdefault(renamed := map_dims(dims, own), renamed)
            self.mapped[key] = tuple(map(rename, rule.operands)), tuple(map(rename, rule.results))
        return self.mapped[key]

    def number_factors(self, operations: Sequence[Operation]) -> tuple[list[Factor], list[tuple[int, ...]]]:
        """The common iteration space of a group, and the place in it of each operation's factors."""
        numbering: dict[int, int] = {}
        factors: list[Factor] = []
        maps: list[tuple[int, ...]] = []
        for operation in operations:
            start, own = self.start[operation.index], []
            for f, factor in enumerate(operation.rule.factors, start):
                number = numbering.get(self.root[f])
                if number is None:
                    number = numbering[self.root[f]] = len(factors)
                    factors.append(factor)
                own.append(number)
            maps.append(tuple(own))
        return factors, maps

    def freeze(self, index: int, operations: Sequence[Operation]) -> Group:
        factors, maps = self.number_factors(operations)
        mapped = [self.map_rule(o.rule, own) for o, own in zip(operations, maps, strict=True)]
        written: dict[int, Dims] = {}
        writes: list[Access] = []
        for operation, (_, results) in zip(operations, mapped, strict=True):
            for slot, value in enumerate(operation.results):
                if value is not None:
                    dims = written[value] = results[slot]
                    writes.append(Access(value, dims, (operation.index,)))
        reads: dict[tuple[int, Dims], list[int]] = {}
        for operation, (operands, _) in zip(operations, mapped, strict=True):
            for slot, value in enumerate(operation.operands):
                if value is None or value in self.free:
                    continue
                dims = operands[slot]
                if written.get(value) is not dims or operation.kind is OperationKind.LOOP_CARRY:
                    reads.setdefault((value, dims), []).append(operation.index)
        return Group(
            index,
            tuple([o.index for o in operations]),
            tuple(factors),
            tuple(maps),
            tuple([Access(v, d, tuple(dict.fromkeys(ops))) for (v, d), ops in reads.items()]),
            tuple(writes),
            operations[0].trips,
        )
