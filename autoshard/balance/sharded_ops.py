"""What each operation does among the shards that a plan gives it."""

import dataclasses
from collections.abc import Mapping, Sequence

from autoshard.graph.equation_plan import EquationPlan
from autoshard.graph.graph import Dims, Graph, Operation, OperationKind
from autoshard.graph.layout import SpecEntries

AxesOf = Mapping[int, tuple[str, ...]]
"""The mesh axes that split each factor of an operation, major to minor."""


@dataclasses.dataclass(frozen=True, slots=True)
class ShardedOp:
    """An operation on shards: every device computes its part alone, and sums over mesh axes follow.

    Attributes:
      operation: Which.
      axes: The mesh axes of each factor that is split.
      reads: The layout in which each operand is read; None for a literal.
      made: The layout of each result before sums over `summed`.
      summed: Mesh axes over which results are sums of the devices' parts.
      scatters: Of these, (axis, dimension) of those that are reduce-scattered.
      stored: The layout in which each result is kept; None where the plan says nothing.
    """

    operation: Operation
    axes: AxesOf
    reads: tuple[SpecEntries | None, ...]
    made: tuple[SpecEntries, ...]
    summed: tuple[str, ...]
    scatters: tuple[tuple[str, int], ...]
    stored: tuple[SpecEntries | None, ...]

    def factor_on(self, axis: str) -> int | None:
        """The factor that a mesh axis splits; None if it splits none."""
        return next((f for f, axes in self.axes.items() if axis in axes), None)


def stored_layouts(
    graph: Graph, plans: Mapping[int, EquationPlan], arguments: Sequence[SpecEntries]
) -> dict[int, SpecEntries]:
    """The layout in which each value is kept, where the plan says it."""
    stored = {a.value: entries for a, entries in zip(graph.arguments, arguments, strict=True)}
    for operation in graph.operations:
        if operation.kind is OperationKind.EQUATION and operation.equation in plans:
            for slot, entries in plans[operation.equation].results:
                value = operation.results[slot]
                if value is not None:
                    stored[value] = entries
    return stored


def sharded_op(
    operation: Operation, plan: EquationPlan, stored: Mapping[int, SpecEntries], sizes: Mapping[str, int]
) -> ShardedOp | None:
    """What an operation does among its shards; None if its operands do not fit together as the plan lays them out.

    Args:
      operation: An equation of the program. plan: What the plan says of it.
      stored: The layouts of values. sizes: Devices along each mesh axis.
    """
    rule, named = operation.rule, dict(plan.operands)
    reads: list[SpecEntries | None] = []
    for slot, value in enumerate(operation.operands):
        reads.append(None if value is None else named[slot][-1] if slot in named else stored.get(value))
    results = dict(plan.results)
    axes: dict[int, tuple[str, ...]] = {}
    told: set[int] = set()
    scattered = dict(plan.scatters)
    outs = {s: tuple(tuple(a for a in dim if a not in scattered) for dim in e) for s, e in results.items()}
    tensors = [(rule.operands[s], e) for s, e in enumerate(reads) if e is not None]
    tensors += [(rule.results[s], e) for s, e in outs.items()]
    for dims, entries in tensors:
        found = _axes_of_tensor(operation, dims, entries, sizes)
        if found is None:
            return None
        axes.update({f: a for f, a in found.items() if f not in told})
        told.update(f for dim in dims for f in dim)
    spec = lambda dims: tuple(tuple(a for f in dim for a in axes.get(f, ())) for dim in dims)
    for slot, value in enumerate(operation.operands):
        wanted = spec(rule.operands[slot])
        if reads[slot] is not None and reads[slot] != wanted:
            return None
        reads[slot] = None if value is None else wanted
    used = [a for own in axes.values() for a in own]
    if len(used) != len(set(used)):
        return None
    reduced = [f for f in axes if rule.factors[f].reduction is not None and axes[f]]
    if any(rule.factors[f].reduction != "add" for f in reduced):
        return None
    return ShardedOp(
        operation,
        axes,
        tuple(reads),
        tuple(map(spec, rule.results)),
        tuple(a for f in reduced for a in axes[f]),
        plan.scatters,
        tuple(results.get(slot) for slot in range(len(operation.results))),
    )


def _axes_of_tensor(
    operation: Operation, dims: Dims, entries: SpecEntries, sizes: Mapping[str, int]
) -> dict[int, tuple[str, ...]] | None:
    """The axes of each factor of one tensor, of a dimension the major ones first; None if the layout names others."""
    found: dict[int, tuple[str, ...]] = {}
    for dim, axes in zip(dims, entries, strict=True):
        left = list(axes)
        for f in dim:
            ways = 1
            while left and ways < operation.rule.factors[f].size:
                ways *= sizes[left[0]]
                found[f] = (*found.get(f, ()), left.pop(0))
        if left:
            return None
    return found
