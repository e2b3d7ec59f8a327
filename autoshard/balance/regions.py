"""The order in which a program with unit dimensions is evaluated, and which of its operations run together.

An *island* is a set of operations on one unit dimension without a collective between them: each device evaluates all of
it on as many units as it has, and what is summed over devices is summed where the island ends. Operations of the
optimizer are no part of any, nor are those that split units over further axes: they run on all places for units, also
empty ones, as the plan lays them out.
"""

import dataclasses
from collections.abc import Sequence, Set

from autoshard.balance.sharded_ops import ShardedOp
from autoshard.balance.units import UnitDimension, UnitDimensions
from autoshard.graph.graph import Graph, Nesting, Operation, OperationKind, dim_of
from autoshard.graph.layout import SpecEntries
from autoshard.graph.pointwise import free_values, pointwise_operations
from autoshard.graph.state import gradient_values, weight_values


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """A value in another form than the one it is stored in: its dimension `dim` by units in places, for `unit`."""

    value: int
    unit: int
    dim: int
    entries: SpecEntries


Key = int | Form
"""A value as it is stored, or in another form."""


@dataclasses.dataclass(frozen=True, slots=True)
class UnitOp:
    """An operation on units.

    Attributes:
      sharded: What it does among shards. unit: The number of the unit dimension. factor: Its factor of units.
      operands: What it reads, None for a literal. results: What it makes.
      contracts: Whether it sums over units.
    """

    sharded: ShardedOp
    unit: int
    factor: int
    operands: tuple[Key | None, ...]
    results: tuple[Key | None, ...]
    contracts: bool

    @property
    def operation(self) -> Operation:
        """The operation."""
        return self.sharded.operation


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A result of an island that others read: which operation makes it, in which slot.

    `counts_for_all`: Whether what is made of a device's units may count for those that it leaves out as well: sums over
    units and gradients. None where that cannot be told, because the result is read one by one by unit elsewhere.
    `stays`: Whether islands on the same units are all that reads it, each device what it made, outside of checkpointed
    functions: places without a unit may hold anything then, and the memory may be kept from one step to the next.
    """

    key: int
    by: UnitOp
    slot: int
    counts_for_all: bool | None = False
    stays: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Island:
    """Operations on one unit dimension that run together on each device, and what others read of their results."""

    unit: int
    ops: tuple[UnitOp, ...]
    made: tuple[Made, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """Operations on all places of a unit dimension, full or empty, one after another."""

    ops: tuple[UnitOp, ...]

    @property
    def results(self) -> tuple[int, ...]:
        """The values that they make."""
        return tuple(k for op in self.ops for k in op.results if isinstance(k, int))


@dataclasses.dataclass(frozen=True, slots=True)
class Plain:
    """An operation (or an equation that nests some) that runs as planned: the number of its equation."""

    equation: int
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]


Stage = Island | Whole | Plain


def evaluation(graph: Graph, dims: UnitDimensions) -> tuple[Stage, ...]:
    """The order of evaluation of a program with unit dimensions."""
    return _Scheduler(graph, dims).run()


def read_by_itself(stages: Sequence[Stage]) -> tuple[Made, ...]:
    """What islands make of each unit that is read by others than islands and the optimizer."""
    islands = (stage for stage in stages if isinstance(stage, Island))
    return tuple(made for island in islands for made in island.made if made.counts_for_all is None)


@dataclasses.dataclass(slots=True)
class _Open:
    """An island that still takes operations: what it makes, and in which layouts it reads what others make."""

    unit: int
    checkpoint: int
    ops: list[UnitOp]
    made: dict[Key, UnitOp]
    read: dict[Key, SpecEntries | None]


class _Scheduler:
    """Goes through the program once."""

    def __init__(self, graph: Graph, dims: UnitDimensions):
        self.graph, self.dims = graph, dims
        pointwise = pointwise_operations(graph)
        self.free = free_values(graph, pointwise)
        self.gradients, self.weights = gradient_values(graph, pointwise), weight_values(graph, pointwise)
        self.unit_of = {o: u for u in dims.found for o in u.operations}
        self.places = {(t.value, t.dim): u.index for u in dims.found for t in u.tensors}
        self.producer = {v: o for o in graph.operations for v in o.results if v is not None}
        self.checkpoint_of = graph.checkpoint_of()
        self.stages: list[Stage] = []
        self.open: dict[int, _Open] = {}
        self.waiting: list[Plain | Whole] = []
        self.taint: set[int] = set()

    def run(self) -> tuple[Stage, ...]:
        for item in self._items():
            if isinstance(item, Operation) and item.index in self.unit_of:
                self._unit_op(item, self.unit_of[item.index])
            else:
                self._defer(Plain(item.equation, item.operands, item.results))
        self._flush()
        return _with_results(self.stages, self.graph)

    def _items(self) -> list[Operation | Nesting]:
        """The operations and the loops and conditionals, in the order of the program; not what is in a loop."""
        nests = [n for n in self.graph.nestings if n.name not in _CALLS and not n.is_inlined]
        loops, stop = [], -1
        for nest in sorted(nests, key=lambda n: n.equation):
            if nest.equation >= stop:
                loops.append(nest)
                stop = nest.stop
        inside = [(n.equation, n.stop) for n in loops]
        plain = [
            o
            for o in self.graph.operations
            if o.kind is OperationKind.EQUATION and not any(a <= o.equation < b for a, b in inside)
        ]
        return sorted([*plain, *loops], key=lambda i: i.equation)

    def _defer(self, stage: Plain | Whole) -> None:
        """Evaluates a stage now, or after the open islands that it needs something of."""
        if isinstance(stage, Plain):
            read, made = stage.operands, stage.results
        else:
            read = tuple(k.value if isinstance(k, Form) else k for op in stage.ops for k in op.operands)
            made = stage.results
        made_here = {k for island in self.open.values() for k in island.made}
        if any(r in self.taint or r in made_here for r in read):
            self.waiting.append(stage)
            self.taint.update(r for r in made if r is not None)
        else:
            self.stages.append(stage)

    def _flush(self) -> None:
        """Ends all open islands."""
        for island in self.open.values():
            has_products = any(op.operation.name == "dot_general" for op in island.ops)
            ops = tuple(island.ops)
            self.stages.append(Island(island.unit, ops, ()) if has_products else Whole(ops))
        self.stages += self.waiting
        self.open, self.waiting, self.taint = {}, [], set()

    def _unit_op(self, operation: Operation, unit: UnitDimension) -> None:
        ops = self._with_copies(operation, unit)
        own = ops[-1]
        if self._is_update(operation) or own.sharded.axes[own.factor] != (unit.axis,):
            self._defer(Whole(tuple(ops)))
            return
        checkpoint = self.checkpoint_of[operation.index]
        island = self.open.get(unit.index)
        if island is None or island.checkpoint != checkpoint or not self._fit(ops, island):
            if island is not None or not self._fit(ops, None):
                self._flush()
            island = self.open[unit.index] = _Open(unit.index, checkpoint, [], {}, {})
        for op in ops:
            if op is own or op.results[0] not in island.made:
                island.ops.append(op)
                reads = zip(op.operands, op.sharded.reads, strict=True)
                island.read.update({k: e for k, e in reads if k is not None and k not in island.made})
                island.made.update({r: op for r in op.results if r is not None})

    def _fit(self, ops: Sequence[UnitOp], island: _Open | None) -> bool:
        """Whether operations can be evaluated in an island (None: a new one), given all that is evaluated before."""
        others = {k for i in self.open.values() if i is not island for k in i.made}
        made, read = ({}, {}) if island is None else (dict(island.made), island.read)
        for op in ops:
            for slot, key in enumerate(op.operands):
                if key is None:
                    continue
                value, entries = key.value if isinstance(key, Form) else key, op.sharded.reads[slot]
                maker = made.get(key)
                if maker is not None:
                    if maker.sharded.summed or maker.sharded.made[maker.results.index(key)] != entries:
                        return False
                elif value in made or value in others or value in self.taint or read.get(key, entries) != entries:
                    return False
            made.update({r: op for r in op.results if r is not None})
        return True

    def _is_update(self, operation: Operation) -> bool:
        """Whether an operation belongs to the optimizer: it makes of gradients and state what becomes of the state."""
        values = self.graph.values
        read = [v for v in operation.operands if v is not None and values[v].shape]
        made = [v for v in operation.results if v is not None]
        known = self.gradients | self.weights | self.free
        return all(v in self.gradients for v in made) and all(v in known for v in read)

    def _with_copies(self, operation: Operation, unit: UnitDimension) -> list[UnitOp]:
        """An operation on units, after those that remake what it reads of values that do not depend on the unit."""
        sharded = self.dims.sharded[operation.index]
        factor = sharded.factor_on(unit.axis)
        assert factor is not None
        return self._made_by(sharded, unit, factor, operation.results)

    def _made_by(
        self, sharded: ShardedOp, unit: UnitDimension, factor: int, results: Sequence[Key | None]
    ) -> list[UnitOp]:
        operation, before = sharded.operation, []
        operands: list[Key | None] = []
        for slot, value in enumerate(operation.operands):
            dim = dim_of(factor, operation.rule.operands[slot])
            entries = sharded.reads[slot]
            if value is None or entries is None or dim is None or self.places.get((value, dim)) == unit.index:
                operands.append(value)
                continue
            form = Form(value, unit.index, dim, entries)
            before += self._copied(form, unit)
            operands.append(form)
        contracts = operation.rule.factors[factor].reduction is not None
        return [*before, UnitOp(sharded, unit.index, factor, tuple(operands), tuple(results), contracts)]

    def _copied(self, form: Form, unit: UnitDimension) -> list[UnitOp]:
        """The operations that make a form of a value that is made of scalars alone; none if it is no such value, or if
        it differs from unit to unit."""
        operation = self.producer.get(form.value)
        if form.value not in self.free or operation is None or len(operation.results) != 1:
            return []
        if operation.kind is not OperationKind.EQUATION or operation.name in ("iota", "gather", "concatenate"):
            return []
        dims = operation.rule.results[0]
        if len(dims[form.dim]) != 1:
            return []
        axes = {f[0]: own for f, own in zip(dims, form.entries, strict=True) if len(f) == 1 and own}
        spec = lambda d: tuple(tuple(a for f in dim for a in axes.get(f, ())) for dim in d)
        reads = tuple(
            None if v is None else spec(d) for v, d in zip(operation.operands, operation.rule.operands, strict=True)
        )
        sharded = ShardedOp(operation, axes, reads, (form.entries,), (), (), (None,))
        ops = self._made_by(sharded, unit, dims[form.dim][0], (form,))
        remade = {r for op in ops for r in op.results}
        if any(isinstance(k, Form) and k not in remade for op in ops for k in op.operands):
            return []  # something in it differs from unit to unit
        return ops


_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_jvp_call"})


def _with_results(stages: Sequence[Stage], graph: Graph) -> tuple[Stage, ...]:
    """The stages, each island with what others read of it."""
    readers: dict[int, set[int]] = {}
    for n, stage in enumerate(stages):
        read: Set[int] = (
            {v for v in stage.operands if v is not None}
            if isinstance(stage, Plain)
            else {k.value if isinstance(k, Form) else k for op in stage.ops for k in op.operands if k is not None}
        )
        for value in read:
            readers.setdefault(value, set()).add(n)
    kept, checkpoint_of = {o.value for o in graph.outputs}, graph.checkpoint_of()
    done: list[Stage] = []
    for n, stage in enumerate(stages):
        if isinstance(stage, Island):
            made = []
            for op in stage.ops:
                for slot, key in enumerate(op.results):
                    others = [stages[m] for m in readers.get(key, set()) - {n}] if isinstance(key, int) else []
                    if isinstance(key, int) and (key in kept or others):
                        stays = key not in kept and checkpoint_of[op.operation.index] < 0
                        stays = stays and all(_reads_its_own(stage.unit, op, slot, key, other) for other in others)
                        made.append(Made(key, op, slot, _counts_for_all(op, others, key in kept), stays))
            stage = dataclasses.replace(stage, made=tuple(made))
        done.append(stage)
    return tuple(done)


def _reads_its_own(unit: int, maker: UnitOp, slot: int, key: int, reader: Stage) -> bool:
    """Whether a stage reads of a result no more than the units of each device, as they were made."""
    if not isinstance(reader, Island) or reader.unit != unit or maker.sharded.summed:
        return False
    dim = dim_of(maker.factor, maker.operation.rule.results[slot])
    if dim is None:
        return False
    for op in reader.ops:
        for n, read in enumerate(op.operands):
            if isinstance(read, Form) and read.value == key:
                return False
            if read == key:
                is_same = op.sharded.reads[n] == maker.sharded.made[slot]
                if not is_same or dim_of(op.factor, op.operation.rule.operands[n]) != dim:
                    return False
    return True


def _counts_for_all(op: UnitOp, readers: Sequence[Stage], is_output: bool) -> bool | None:
    """See `Made`: a sum does, and so does what the optimizer reads; what other islands read does not."""
    if op.contracts:
        return True
    kinds = {type(r) for r in readers}
    if Plain in kinds or is_output or len(kinds) > 1:
        return None
    return Whole in kinds
