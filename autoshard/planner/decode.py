"""From the solver's choices back to shardings and figures."""

import bisect
import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence

from autoshard.compiler.buffer_assignment import LiveBuffers, live_buffers
from autoshard.compiler.buffer_uses import spans_of
from autoshard.compiler.candidates import has_room
from autoshard.compiler.collective_dtypes import is_narrowed
from autoshard.compiler.emitted_collectives import EmittedCollectives, requested
from autoshard.compiler.host_residuals import CopyTimes
from autoshard.compiler.host_state import ordered_updates
from autoshard.compiler.ordering import orderings
from autoshard.compiler.orders import Order, orders
from autoshard.compiler.schedule import Schedule
from autoshard.compiler.solved import SolvedProgram
from autoshard.compiler.tied_copies import tied_copies
from autoshard.garbage import collection_paused
from autoshard.graph.equation_plan import SCATTERING, EquationPlan, IndexExchange, ProductPieces
from autoshard.graph.graph import Operation, OperationKind
from autoshard.graph.groups import Group, map_dims
from autoshard.graph.layout import WHOLE, Layout, SpecEntries, is_gather, is_sent
from autoshard.planner.build import Formulation
from autoshard.planner.choices import Choice, scatter_order
from autoshard.planner.compiled_timeline import compiled_timeline
from autoshard.planner.estimate import Estimate, MemoryItem
from autoshard.planner.peak import counted_bytes, peak
from autoshard.planner.solution_reader import SolutionReader
from autoshard.planner.timeline import Timeline, asked_for_by, timeline
from autoshard.planner.transfer_times import copy_times, transfer_times


@dataclasses.dataclass(frozen=True, slots=True)
class Decoded:
    """A solution in the terms of its program.

    Attributes:
      argument_layouts: Layout of each argument. in_host: Those that lie in the memory of the host, by index.
      output_layouts: Layout of each output (None for literals and free values).
      output_steps: For each output, the layouts that it passes through on the way to its own, the last one included;
        empty where it is made in its own layout.
      choices: The choice of each group.
      shardings: What each equation must enforce, by equation number.
      orders: What of that is ordered or kept, one by one.
      timed: What equations enforce instead where orders follow the times of the plan's own schedule.
    """

    argument_layouts: tuple[Layout, ...]
    output_layouts: tuple[Layout | None, ...]
    output_steps: tuple[tuple[SpecEntries, ...], ...]
    choices: tuple[Choice, ...]
    shardings: tuple[tuple[int, EquationPlan], ...]
    orders: tuple[Order, ...]
    timed: tuple[tuple[int, EquationPlan], ...]
    in_host: frozenset[int] = frozenset()


@collection_paused()
def decode(f: Formulation, picks: Sequence[int]) -> Decoded:
    """Translates `picks`, one choice per node of `f.problem`."""
    reader = SolutionReader(f, picks)
    graph = f.program.graph
    replicated = (WHOLE,) * len(f.mesh.axis_names)
    outputs = []
    for output in graph.outputs:
        if output.successor_of is not None:
            outputs.append(reader.layout[graph.arguments[output.successor_of].value])
        else:
            outputs.append(reader.layout.get(output.value, replicated) if output.value is not None else None)
    steps = (
        reader.steps(o.value, l) if o.value in reader.layout and l is not None else ()
        for o, l in zip(graph.outputs, outputs, strict=True)
    )
    arguments = tuple([reader.layout[a.value] for a in graph.arguments])
    entries = [reader.entries(a.value, l) for a, l in zip(graph.arguments, arguments, strict=True)]
    axis_sizes = {axis.name: axis.size for axis in f.mesh.axes}
    shardings, rules, entry = _shardings(reader), f.compiler.ordering, f.program.analysis.entry
    order = orderings(graph, shardings, entries, axis_sizes, rules, entry)
    planned = order(None)
    equations = ordered_updates(planned.equations, f.updates, reader.in_host)
    own, is_hiding = equations, rules.schedule is Schedule.LATENCY_HIDING
    in_host: Mapping[int, CopyTimes | None] = dict.fromkeys(reader.away)
    if is_hiding:
        times = asked_for_by(reader)
        own = ordered_updates(order(transfer_times(f, times)).equations, f.updates, reader.in_host)
        in_host = copy_times(f, times, reader.away)
    if f.residuals is not None:
        equations, own = f.residuals.ordered(equations, in_host), f.residuals.ordered(own, in_host)
    timed: tuple[tuple[int, EquationPlan], ...] = ()
    if is_hiding:
        timed = tuple((n, plan) for n, plan in own.items() if plan != equations.get(n))
    return Decoded(
        arguments,
        tuple(outputs),
        tuple(steps),
        tuple([reader.choice(g.index) for g in f.program.groups]),
        tuple(equations.items()),
        orders(dataclasses.replace(planned, equations=equations)),
        timed,
        reader.in_host,
    )


class _Slots:
    """The `EquationPlan` in the making: for each equation, what is said of its slots."""

    def __init__(self):
        self.operands: dict[int, dict[int, tuple[SpecEntries, ...]]] = collections.defaultdict(dict)
        self.results: dict[int, dict[int, SpecEntries]] = collections.defaultdict(dict)
        self.body: dict[int, dict[int, SpecEntries]] = collections.defaultdict(dict)
        self.delayed: dict[int, set[int]] = collections.defaultdict(set)
        self.late_stacks: dict[int, set[int]] = collections.defaultdict(set)
        self.row_major_stacks: dict[int, set[int]] = collections.defaultdict(set)
        self.materialized: dict[int, tuple[int, ...]] = {}
        self.scatters: dict[int, tuple[tuple[str, int], ...]] = {}
        self.exchange: dict[int, IndexExchange] = {}
        self.pieces: dict[int, ProductPieces] = {}
        self.narrowing: set[int] = set()

    def freeze(self) -> dict[int, EquationPlan]:
        """By equation number; equal ones are one object."""
        listed = lambda table, n: tuple(sorted(table[n].items())) if n in table else ()
        shared: dict[tuple, EquationPlan] = {}
        rows = {}
        for n in sorted({*self.operands, *self.results, *self.body, *self.delayed}):
            delayed = tuple(sorted(self.delayed[n])) if n in self.delayed else ()
            scatters = self.scatters.get(n, ())
            exchange, pieces, narrows = self.exchange.get(n), self.pieces.get(n), n in self.narrowing
            stacks = tuple(sorted(self.late_stacks[n])) if n in self.late_stacks else ()
            by_rows = tuple(sorted(self.row_major_stacks[n])) if n in self.row_major_stacks else ()
            fields = listed(self.operands, n), listed(self.results, n), listed(self.body, n), delayed, scatters
            stored = self.materialized.get(n, ())
            key = *fields, exchange, pieces, narrows, stacks, by_rows, stored
            if key not in shared:
                shared[key] = EquationPlan(
                    *fields,
                    exchange=exchange,
                    pieces=pieces,
                    narrows_first=narrows,
                    row_major_stacks=by_rows,
                    late_stacks=stacks,
                    materialized=stored,
                )
            rows[n] = shared[key]
        return rows


def _shardings(reader: SolutionReader) -> dict[int, EquationPlan]:
    f, graph, values = reader.f, reader.graph, reader.graph.values
    slots, late, parts = _Slots(), f.program.analysis.live.late_fills, f.program.analysis.live.parts
    gathers: list[tuple[int, int, Layout]] = []  # operation, slot, layout
    for group in f.program.groups:
        operation = graph.operations[group.operations[0]]
        if operation.kind is not OperationKind.EQUATION:  # always a group of its own
            _loop_shardings(operation, reader, slots)
            continue
        for access in group.writes:
            value, index = access.value, access.operations[0]
            if values[value].shape:
                operation = graph.operations[index]
                slot = operation.results.index(value)
                slots.results[operation.equation][slot] = reader.entries(value, reader.layout[value])
        for index in group.operations:
            if index in late and (not late[index] or _is_partial(reader, group, index)):
                slots.delayed[graph.operations[index].equation].add(0)
            if stored := tuple(slot for slot, r in enumerate(graph.operations[index].results) if r in parts):
                slots.materialized[graph.operations[index].equation] = stored
        narrowed = {a.operations[0] for a in group.reads if is_narrowed(graph, a.operations)}
        terms: set[int | None] = set()  # what is scattered before it is added
        for index in _moving(reader, group):
            operation = graph.operations[index]
            factor_map = group.factor_maps[bisect.bisect_left(group.operations, index)]
            scatters = _scatters(reader, group, operation, factor_map)
            if scatters:
                slots.scatters[operation.equation] = scatters
                terms.update(operation.results)
            if exchange := _exchange(reader, group):
                slots.exchange[operation.equation] = exchange
            if pieces := _pieces(reader, group, operation, factor_map):
                slots.pieces[operation.equation] = pieces
            for slot, value in enumerate(operation.operands):
                if value is None or not values[value].shape or value not in reader.layout:
                    continue
                held = reader.layout[value]
                if value in terms and not f.compiler.adds_before_scattering:
                    continue
                wanted = reader.read_layout(group.index, map_dims(operation.rule.operands[slot], factor_map))
                if wanted == held:
                    if operation.rule.by_shards or operation.rule.is_heavy or scatters:
                        slots.operands[operation.equation][slot] = (reader.entries(value, held),)
                    continue
                slots.operands[operation.equation][slot] = reader.steps(value, wanted)
                if index in narrowed and is_sent(held, wanted):
                    slots.narrowing.add(operation.equation)
                if is_gather(held, wanted):
                    gathers.append((index, slot, wanted))
    if f.compiler.ordering.schedule is Schedule.LATENCY_HIDING:
        # weights are tied to earlier products; activations, which may be gathered a kernel early, only where that would
        # not fit: residuals leave the devices
        weights = f.program.analysis.weights
        gathers = [(o, s, l) for o, s, l in gathers if reader.away and graph.operations[o].operand(s) not in weights]
    tied = tied_copies(f.program.analysis, f.mesh.shape, reader.layout, gathers)
    for index, slot in tied:
        slots.delayed[graph.operations[index].equation].add(slot)
    return slots.freeze()


def _moving(reader: SolutionReader, group: Group) -> Sequence[int]:
    """The operations of a group that may read an operand in another layout than it has, those that run by shards, and
    all heavy ones.

    Own values are read as they are defined, unless a reduce-scatter changes them in between. Execution must know every
    layout in which an operation that runs by shards reads. Heavy operations are told too, since the compiler may have
    an opinion of its own where a value enters a checkpointed function.
    """
    if any(s != WHOLE for s in reader.choice(group.index).scatter):
        return group.operations
    row, table, layout = reader.rows[reader.first + group.index], reader.f.tables[group.index], reader.layout
    rules = [(index, reader.graph.operations[index].rule) for index in group.operations]
    moving = [index for index, rule in rules if rule.by_shards or rule.is_heavy]
    for access, column in zip(group.reads, table.reads, strict=True):
        if layout.get(access.value, column[row]) != column[row]:
            moving.extend(access.operations)
    return sorted(set(moving))


def _is_partial(reader: SolutionReader, group: Group, index: int) -> bool:
    """Whether each device has only a part of the sum that operation `index` of `group` makes."""
    factor_map = group.factor_maps[bisect.bisect_left(group.operations, index)]
    summed, choice = _summed(reader.graph.operations[index], factor_map), reader.choice(group.index)
    return any(factor in summed for a, factor in enumerate(choice.assignment) if a not in choice.exchanged)


def _summed(operation: Operation, factor_map: tuple[int, ...]) -> set[int]:
    """The factors of its group that an operation reduces."""
    return {factor_map[k] for k, factor in enumerate(operation.rule.factors) if factor.reduction is not None}


def _scatters(
    reader: SolutionReader, group: Group, operation: Operation, factor_map: tuple[int, ...]
) -> tuple[tuple[str, int], ...]:
    """`EquationPlan.scatters` of an operation of `group`."""
    choice, names = reader.choice(group.index), reader.f.mesh.axis_names
    if all(s == WHOLE for s in choice.scatter):
        return ()
    if operation.name in SCATTERING and any(o not in reader.layout for o in operation.operands):
        return ()
    summed = _summed(operation, factor_map)
    own = map_dims(operation.rule.results[0], factor_map)
    written = group.writes[-1].dims
    found = []
    for axes in scatter_order(choice.scatter):
        for a in axes:
            dim = written[choice.scatter[a]]
            if choice.assignment[a] not in summed or own.count(dim) != 1:
                return ()
            found.append((names[a], own.index(dim)))
    return tuple(found)


def _exchange(reader: SolutionReader, group: Group) -> IndexExchange | None:
    """`EquationPlan.exchange` of the look-up that `group` is."""
    names = reader.f.mesh.axis_names
    found = reader.f.tables[group.index].exchanges[reader.rows[reader.first + group.index]]
    if found is None:
        return None
    return IndexExchange(
        tuple(names[a] for a in reader.choice(group.index).exchanged), found.slots, found.num_ids, found.expected
    )


def _pieces(
    reader: SolutionReader, group: Group, operation: Operation, factor_map: tuple[int, ...]
) -> ProductPieces | None:
    """`EquationPlan.pieces` of the product that `group` is."""
    choice, rule = reader.choice(group.index), operation.rule
    if (pieces := choice.pieces) is None:
        return None
    axis, result = reader.f.mesh.axis_names[pieces.axis], map_dims(rule.results[0], factor_map)
    if not pieces.is_gathered:
        return ProductPieces(axis, None, result.index((pieces.factor,)))
    operands = [map_dims(dims, factor_map) for dims in rule.operands]
    slot = next(s for s, dims in enumerate(operands) if (choice.assignment[pieces.axis],) not in dims)
    return ProductPieces(axis, slot, operands[slot].index((pieces.factor,)))


def _loop_shardings(operation: Operation, reader: SolutionReader, slots: _Slots) -> None:
    """Layouts at the boundary of a loop or conditional; carry, slice and stack each hold one layout."""
    match operation.kind:
        case OperationKind.LOOP_CARRY:
            inside, after = operation.results
            value, table = inside if inside is not None else after, slots.body
        case OperationKind.SCAN_SLICE:
            value, table = operation.results[0], slots.body
        case _:
            value, table = operation.results[0], slots.results
    if value is not None and reader.graph.values[value].shape:
        table[operation.equation][operation.slot] = reader.entries(value, reader.layout[value])
    live = reader.f.program.analysis.live
    if operation.index in live.late_stacks:
        slots.late_stacks[operation.equation].add(operation.slot)
    if operation.index in live.turned_stacks and reader.f.compiler.ordering.turns_rows:
        slots.row_major_stacks[operation.equation].add(operation.slot)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A solution as the compiler has it: when what runs, and when what is in memory; worked out when it is asked for.

    Attributes:
      reader: The solution. picks: One choice per node. solved: Its program.
      emitted: The collectives that count. as_compiled: See `evaluate`.
    """

    reader: SolutionReader
    picks: tuple[int, ...]
    solved: SolvedProgram
    emitted: EmittedCollectives
    as_compiled: bool

    @functools.cached_property
    def times(self) -> Timeline:
        """Its timeline."""
        return timeline(self.reader, self.solved, self.emitted, self.as_compiled)

    @functools.cached_property
    def compiled_times(self) -> Timeline:
        """Its timeline with what hides in the compiler's own schedule."""
        if not self.as_compiled or not self.times.hideable:
            return self.times
        alive_bytes = self.peak[0]  # gaps between buffers take long to find, and leave no more room than there is
        is_tight = not has_room(alive_bytes, self.reader.f.problem.capacity)
        return compiled_timeline(self.reader, self.times, alive_bytes if is_tight else self.reserved_bytes)

    @functools.cached_property
    def held(self) -> LiveBuffers:
        """Its buffers, less the copies of flows whose gathers the compiler does not make."""
        f = self.reader.f
        if not self.as_compiled:
            return live_buffers(f.buffers, spans_of(f.buffers), counted_bytes(f, self.picks))
        moves = zip(self.solved.moves, self.emitted.moves, strict=True)
        spared = {n for n, (move, left) in enumerate(moves) if len(left) < len(move.collectives)}
        times = transfer_times(f, self.times) if f.compiler.hides_collectives else None
        sizes_bytes = counted_bytes(f, self.picks, spared)
        return f.compiler.live_buffers(self.solved, f.buffers, sizes_bytes, times, self.emitted.added)

    @functools.cached_property
    def reserved_bytes(self) -> float:
        """What must be there for the program to run, with the gaps that stay between buffers."""
        return self.reader.f.compiler.reserved_bytes(self.solved, self.held)

    @functools.cached_property
    def peak(self) -> tuple[float, str, tuple[MemoryItem, ...]]:
        """The most memory alive at once, where, and what it is made of."""
        return peak(self.reader.f, self.held)

    @property
    def compute_order(self) -> list[int]:
        """The positions in `times.compute`, longest first."""
        return sorted(range(len(self.times.compute)), key=lambda n: -self.times.compute[n].compute_s)

    @property
    def communication_order(self) -> list[int]:
        """The positions in `times.communication`, longest exposed first."""
        items = self.compiled_times.communication
        return sorted(range(len(items)), key=lambda n: (-items[n].exposed_s, -items[n].time_s))

    @property
    def estimate(self) -> Estimate:
        """Its figures."""
        times, (peak_bytes, peak_at, memory) = self.compiled_times, self.peak
        return Estimate(
            times.step_s,
            times.compute_s,
            times.comm_s,
            sum(c.wire_bytes for c in times.communication if c.is_collective),
            peak_bytes,
            sum(c.flops for c in times.compute),
            peak_at,
            tuple([times.compute[n] for n in self.compute_order]),
            tuple([times.communication[n] for n in self.communication_order]),
            memory,
            self.reserved_bytes,
            times.hidden_s,
        )


def evaluate(f: Formulation, picks: Sequence[int], as_compiled: bool = True) -> Evaluation:
    """Predicts time, traffic and memory of the solution `picks`.

    Args:
      f: The formulation. picks: One choice per node.
      as_compiled: Count collectives as the compiler makes them of all groups together, copies that several groups read
        once, and values no longer than they are needed. The solver, which sees each group by itself, counts all of
        them; False counts alike.
    """
    reader = SolutionReader(f, picks)
    solved = reader.solved()
    emitted = (f.compiler.emitted if as_compiled else requested)(solved)
    return Evaluation(reader, tuple(picks), solved, emitted, as_compiled)


def estimate(f: Formulation, picks: Sequence[int], as_compiled: bool = True) -> Estimate:
    """The figures of the solution `picks`; see `evaluate`."""
    return evaluate(f, picks, as_compiled).estimate
