"""Finds what can move between the devices of a mesh axis: hidden units, attention heads, experts.

A *unit dimension* is a connected class of (tensor, dimension) pairs that the plan shards over one mesh axis. Two pairs
are connected where an operation indexes both by one factor. If every operation on the class treats its factor as a
batch, or sums over it, then entry j of all these tensors together is a *unit*: it can be computed by any device, and
the sum that happens anyway brings the parts together. No names of layers are known here.
"""

import collections
import dataclasses
import math
import os
from collections.abc import Collection, Mapping, Sequence

from autoshard.balance.sharded_ops import ShardedOp, sharded_op, stored_layouts
from autoshard.graph.equation_plan import EquationPlan
from autoshard.graph.factor_sets import components
from autoshard.graph.graph import Graph, Operation, OperationKind
from autoshard.graph.layout import SpecEntries
from autoshard.graph.pointwise import random_values

_PARALLEL = frozenset(
    """broadcast_in_dim reshape transpose squeeze expand_dims copy copy_p convert_element_type stop_gradient name slice
    concatenate pad rev split cumsum cumprod cummax cummin reduce_sum reduce_max reduce_min reduce_prod reduce_and
    reduce_or argmax argmin reduce_precision optimization_barrier dot_general""".split()
)
"""Beside elementwise operations: those that execution can run on any number of units."""
_SUMS = frozenset({"dot_general", "reduce_sum"})
"""Those that may sum over units."""


@dataclasses.dataclass(frozen=True, slots=True)
class UnitTensor:
    """A dimension of a tensor that is made of units: `inner` consecutive entries for each."""

    value: int
    dim: int
    inner: int


@dataclasses.dataclass(frozen=True, slots=True)
class UnitDimension:
    """What can move between the devices of a mesh axis.

    Attributes:
      index: Its number. name: The part of the model that has it, such as `state.params.blocks.0.mlp`.
      axis: The mesh axis. ways: Devices along it.
      size: Units.
      tensors: All dimensions made of these units.
      flops: Floating-point operations of a step on all units together.
      bytes: What one unit weighs, with its optimizer state: what a move sends.
      multiple: The places on a device are a multiple of it, so that tensors can be split over other axes as well.
      operations: The operations on it, by index.
    """

    index: int
    name: str
    axis: str
    ways: int
    size: int
    tensors: tuple[UnitTensor, ...] = dataclasses.field(repr=False)
    flops: float
    bytes: float
    multiple: int
    operations: tuple[int, ...] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why a class of dimensions with parameters stays as the plan has it."""

    name: str
    axis: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class UnitDimensions:
    """All that can move, and what cannot.

    Attributes:
      found: The unit dimensions. refused: Classes that hold parameters and are none.
      sharded: What each operation does among its shards, by operation index, where that is known.
      stored: The layout of each value, where the plan says it.
    """

    found: tuple[UnitDimension, ...]
    refused: tuple[Refusal, ...]
    sharded: Mapping[int, ShardedOp]
    stored: Mapping[int, SpecEntries]

    @property
    def flops(self) -> float:
        """Floating-point operations that can move."""
        return sum(u.flops for u in self.found)


def unit_dimensions(
    graph: Graph,
    plans: Mapping[int, EquationPlan],
    arguments: Sequence[SpecEntries],
    sizes: Mapping[str, int],
    pointwise: Sequence[bool],
    axes: Collection[str] | None = None,
) -> UnitDimensions:
    """The unit dimensions of a planned program.

    Args:
      graph: The program. plans: What the plan says of each equation. arguments: The layouts of its arguments.
      sizes: Devices along each mesh axis.
      pointwise: For each operation, whether it only maps elements.
      axes: The mesh axes over which units may move; None for all.
    """
    stored = stored_layouts(graph, plans, arguments)
    sharded: dict[int, ShardedOp] = {}
    for operation in graph.operations:
        if operation.kind is OperationKind.EQUATION and operation.rule.origin != "replicated":
            found = sharded_op(operation, plans.get(operation.equation, EquationPlan()), stored, sizes)
            if found is not None:
                sharded[operation.index] = found
    search = _Search(graph, plans, stored, sharded, sizes, pointwise, random_values(graph, pointwise))
    found, refused = [], []
    for axis in sizes if axes is None else axes:
        if sizes[axis] > 1:
            for unit in search.along(axis):
                (refused if isinstance(unit, Refusal) else found).append(unit)
    taken: set[int] = set()
    kept: list[UnitDimension] = []
    for unit in sorted(found, key=lambda u: -u.flops):
        own = {t.value for t in unit.tensors}
        if not taken.isdisjoint(own):
            refused.append(Refusal(unit.name, unit.axis, "a tensor of it has units on another mesh axis, too"))
            continue
        taken |= own
        kept.append(unit)
    kept.sort(key=lambda u: u.operations[0])
    numbered = tuple(dataclasses.replace(u, index=i) for i, u in enumerate(kept))
    return UnitDimensions(numbered, tuple(refused), sharded, stored)


@dataclasses.dataclass(frozen=True, slots=True)
class _Search:
    """Looks for unit dimensions."""

    graph: Graph
    plans: Mapping[int, EquationPlan]
    stored: Mapping[int, SpecEntries]
    sharded: Mapping[int, ShardedOp]
    sizes: Mapping[str, int]
    pointwise: Sequence[bool]
    drawn: frozenset[int]
    """Random values: unit j has those of index j, whichever device computes it, so that they are made as planned."""

    def along(self, axis: str) -> list[UnitDimension | Refusal]:
        """The unit dimensions of one mesh axis, and the classes with parameters that are none."""
        nodes: dict[tuple[int, int], int] = {}
        node = lambda value, dim: nodes.setdefault((value, dim), len(nodes))
        edges: list[tuple[int, int]] = []
        members: list[tuple[int, Operation, int]] = []  # a node of the operation, the operation, its factor
        troubles: list[tuple[int, str, bool]] = []  # a node, the trouble, whether the operation is a heavy one
        for operation in self.graph.operations:
            touched = self._touched(operation, axis)
            if not touched:
                continue
            own = [node(*pair) for pair in touched]
            factor, trouble = self._factor(operation, axis)
            if trouble:
                troubles += [(n, trouble, operation.rule.is_heavy) for n in own]
            elif factor is not None:
                edges += [(own[0], n) for n in own[1:]]
                members.append((own[0], operation, factor))
        for output in self.graph.outputs:
            if output.successor_of is not None and output.value is not None:
                before = self.graph.arguments[output.successor_of].value
                for dim, names in enumerate(self.stored.get(before, ())):
                    if axis in names and axis in self.stored.get(output.value, ((),) * (dim + 1))[dim]:
                        edges.append((node(before, dim), node(output.value, dim)))
        label = components([a for a, _ in edges], [b for _, b in edges], len(nodes)) if nodes else []
        pairs, operations, reasons = (collections.defaultdict(list) for _ in range(3))
        for pair, n in nodes.items():
            pairs[label[n]].append(pair)
        for n, operation, factor in members:
            operations[label[n]].append((operation, factor))
        for n, trouble, is_heavy in troubles:
            reasons[label[n]].append((trouble, is_heavy))
        made = (self._unit(axis, pairs[k], operations[k], reasons[k]) for k in pairs)
        return [unit for unit in made if unit is not None]

    def _touched(self, operation: Operation, axis: str) -> list[tuple[int, int]]:
        """The (value, dimension) pairs that an operation reads or makes split over `axis`, as they are stored."""
        plan = dict(self.plans.get(operation.equation, EquationPlan()).operands)
        found = []
        for slot, value in enumerate(operation.operands):
            if value is None or value not in self.stored:
                continue
            read = plan[slot][-1] if slot in plan and operation.kind is OperationKind.EQUATION else self.stored[value]
            layouts = enumerate(zip(self.stored[value], read, strict=True))
            found += [(value, d) for d, (kept, own) in layouts if axis in kept and axis in own]
        return list(dict.fromkeys(found + self._made(operation, axis)))

    def _made(self, operation: Operation, axis: str) -> list[tuple[int, int]]:
        """The (value, dimension) pairs that an operation itself makes split over `axis`, and that are stored so."""
        sharded = self.sharded.get(operation.index)
        if sharded is None:  # not known: everything that is stored so
            made = [self.stored.get(v, ()) if v is not None else () for v in operation.results]
        else:
            made = sharded.made
        return [
            (value, d)
            for value, entries in zip(operation.results, made, strict=True)
            if value is not None and value in self.stored
            for d, (own, kept) in enumerate(zip(entries, self.stored[value], strict=True))
            if axis in own and axis in kept
        ]

    def _factor(self, operation: Operation, axis: str) -> tuple[int | None, str]:
        """The factor of an operation that `axis` splits, or why it cannot be one of units."""
        at = f"`{operation.name}` at {operation.source or 'an unknown line'}"
        sharded = self.sharded.get(operation.index)
        if operation.kind is not OperationKind.EQUATION or operation.trips != 1.0:
            return None, f"{at} is in a loop or a conditional, whose shares cannot change"
        if sharded is None:
            return None, f"{at} is not computed shard by shard as the plan lays out its operands"
        factor = sharded.factor_on(axis)
        if factor is None or all(r is None or r in self.drawn for r in operation.results):
            return None, ""
        rule = operation.rule
        if operation.name == "conv_general_dilated":
            return None, f"{at} is a convolution, whose channels cannot move"
        if not self.pointwise[operation.index] and operation.name not in _PARALLEL:
            return None, f"{at} does not treat the entries alike"
        if rule.factors[factor].reduction is not None and operation.name not in _SUMS:
            return None, f"{at} combines the entries otherwise than by a sum"
        if any(factor in dim and dim[0] != factor for dims in (*rule.operands, *rule.results) for dim in dims):
            return None, f"{at} has the entries within another index, so that a unit is no block"
        if sharded.axes[factor] != (axis,) and operation.name == "dot_general":
            return None, f"{at} splits the entries over {' and '.join(sharded.axes[factor])} together"
        if operation.fixed_results is not None or operation.fixed_operands is not None:
            return None, f"{at} has a layout that the program demands"
        return factor, ""

    def _unit(
        self,
        axis: str,
        pairs: Sequence[tuple[int, int]],
        operations: Sequence[tuple[Operation, int]],
        reasons: Sequence[tuple[str, bool]],
    ) -> UnitDimension | Refusal | None:
        """The unit dimension of a connected class; None if it holds no parameters."""
        values = self.graph.values
        held = {value for value, _ in pairs}
        state = [self.graph.arguments[o.successor_of] for o in self.graph.outputs if o.successor_of is not None]
        own = [a for a in state if a.value in held]
        if not own:
            return None
        name = _common_name([(a.name, values[a.value].size_bytes) for a in own])
        refuse = lambda reason: Refusal(name, axis, reason)
        flops = sum(o.rule.flops * o.trips for o, _ in operations if o.name == "dot_general")
        if reasons:
            told = reasons if flops else [r for r in reasons if r[1]]
            return refuse(told[0][0]) if told else None
        if not flops:
            return None  # nothing would be gained by moving it
        if len(held) != len(pairs):
            return refuse("a tensor has two dimensions of it")
        whole = [o.rule.factors[f].size for o, f in operations] + [values[v].shape[d] for v, d in pairs]
        size, ways = math.gcd(*whole), self.sizes[axis]
        if size < ways:
            return refuse(f"it has {size} units for {ways} devices")
        made = {pair for o, _ in operations for pair in self._made(o, axis)}
        arguments = {a.value for a in self.graph.arguments}
        made |= {(v, d) for v, d in pairs if v in arguments}
        tensors = tuple(UnitTensor(v, d, values[v].shape[d] // size) for v, d in sorted(set(pairs) & made))
        weight = sum(values[a.value].size_bytes for a in own) / size
        multiple = math.lcm(*(self._multiple(values[v].shape[d] // size, self.stored[v][d], axis) for v, d in pairs))
        indices = tuple(sorted(o.index for o, _ in operations))
        return UnitDimension(0, name, axis, ways, size, tensors, flops, weight, multiple, indices)

    def _multiple(self, inner: int, axes: Sequence[str], axis: str) -> int:
        """What the places on a device must be a multiple of, where a dimension is split over `axes`."""
        others = math.prod(self.sizes[a] for a in axes if a != axis)
        return others // math.gcd(others, inner)


def _common_name(weighed: Sequence[tuple[str, int]]) -> str:
    """What the parameters among some leaves have in common by name; where that is little, the heaviest of them."""
    parameters = [(n, b) for n, b in weighed if "params" in n.split(".")] or list(weighed)
    common = os.path.commonprefix([n.split(".") for n, _ in parameters])
    return ".".join(common) if len(common) > 2 else min(parameters, key=lambda p: (-p[1], p[0]))[0]
