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

from autoshard.garbage import collection_paused
from autoshard.graph.factor_sets import FactorSets, components
from autoshard.graph.graph import Dims, Factor, FactorRule, Graph, Operation, OperationKind
from autoshard.graph.pointwise import free_values, pointwise_operations
from autoshard.graph.reassociated_sums import Uses, join_sums, reassociated_sums


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


def map_dims(dims: Dims, factor_map: tuple[int, ...]) -> Dims:
    """`dims` with every factor renamed by `factor_map`."""
    return tuple(tuple(factor_map[f] for f in factors) for factors in dims)


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


def _join_chains(
    operations: Sequence[Operation],
    joins: Sequence[bool],
    uses: Uses,
    joined: list[tuple[int, int]],
    factors: FactorSets,
    welded: Set[int],
) -> None:
    """Joins pointwise operations through the values that one makes and another reads, and adds them to `joined`; only
    those that `joins` names.

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
                    joined.append((producer.index, consumer.index))
                    if several and consumer.index in welded:
                        shared_by_origin.update(r for r in consumer.results if r is not None)


def _join_common_reads(operations: Sequence[Operation], reread: frozenset[int], factors: FactorSets) -> None:
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
    sums = reassociated_sums(decided, pointwise, uses)
    joins = [is_light and index not in sums for index, is_light in enumerate(pointwise)]
    reread = frozenset([value for value, users in uses.items() if len(users) > 1])

    def joined(welded: Set[int]) -> list[Group]:
        pairs: list[tuple[int, int]] = []
        factors = FactorSets(graph.operations)
        join_sums(sums, graph.operations, pairs, factors)
        _join_chains(decided, joins, uses, pairs, factors, welded)
        members: dict[int, list[Operation]] = collections.defaultdict(list)
        group_of = components([x for x, _ in pairs], [y for _, y in pairs], len(graph.operations))
        for operation in decided:
            members[group_of[operation.index]].append(operation)
        for operations in members.values():
            _join_common_reads(operations, reread, factors)
        maker = _GroupMaker(factors, free)
        return [maker.make(i, operations) for i, operations in enumerate(members.values())]

    groups = joined(frozenset())
    welded = frozenset([o for g in groups if _is_welded(g) for o in g.operations])
    return tuple(joined(welded) if welded else groups)


def _is_welded(group: Group) -> bool:
    """Whether no operation of the group spans its iteration space: a shared value has joined what has no more in
    common, such as the attention of several layers, of which a mesh axis could then split only one by the batch.
    """
    return len(group.factors) > max(map(len, map(set, group.factor_maps)))


class _GroupMaker:
    """Makes groups of sets of operations. What equal layers have in common is made once and shared."""

    def __init__(self, factors: FactorSets, free: frozenset[int]):
        self.start, self.label, self.free = factors.start, factors.labels(), free
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
                number = numbering.get(self.label[f])
                if number is None:
                    number = numbering[self.label[f]] = len(factors)
                    factors.append(factor)
                own.append(number)
            maps.append(tuple(own))
        return factors, maps

    def make(self, index: int, operations: Sequence[Operation]) -> Group:
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
