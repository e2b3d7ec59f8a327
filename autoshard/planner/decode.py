"""From the solver's choices back to shardings and figures."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from autoshard.cost.reshard import path, reshard
from autoshard.graph.graph import Operation, OperationKind
from autoshard.graph.groups import is_pointwise, map_dims
from autoshard.graph.layout import WHOLE, Layout, layout_of, spec_entries
from autoshard.planner.build import Flow, Formulation
from autoshard.planner.choices import Choice
from autoshard.planner.decisions import EquationShardings, SpecEntries
from autoshard.planner.estimate import CommunicationItem, ComputeItem, Estimate, MemoryItem


@dataclasses.dataclass(frozen=True, slots=True)
class Decoded:
    """A solution in the terms of its program.

    Attributes:
      argument_layouts: Layout of each argument.
      output_layouts: Layout of each output (None for literals and free values).
      output_steps: For each output, the layouts that it passes through on the way to its own, the last one included;
        empty where it is made in its own layout.
      choices: The choice of each group.
      shardings: What each equation must enforce, by equation number.
    """

    argument_layouts: tuple[Layout, ...]
    output_layouts: tuple[Layout | None, ...]
    output_steps: tuple[tuple[Layout, ...], ...]
    choices: tuple[Choice, ...]
    shardings: tuple[tuple[int, EquationShardings], ...]


class _Reader:
    """Looks up what a solution says of each value, flow and group."""

    def __init__(self, f: Formulation, picks: Sequence[int]):
        self.f, self.graph = f, f.program.graph
        self.rows = [d.rows[k] for d, k in zip(f.decisions, picks, strict=True)]
        self.first = len(self.graph.arguments)
        self.layout: dict[int, Layout] = {}
        for i, a in enumerate(self.graph.arguments):
            self.layout[a.value] = f.argument_layouts[i][self.rows[i]]
        for group in f.program.groups:
            row = self.rows[self.first + group.index]
            for w, access in enumerate(group.writes):
                self.layout[access.value] = f.tables[group.index].writes[w][row]

    def choice(self, group: int) -> Choice:
        return self.f.tables[group].choices[self.rows[self.first + group]]

    def read_layout(self, group: int, read: int) -> Layout:
        return self.f.tables[group].reads[read][self.rows[self.first + group]]

    def target(self, flow: Flow) -> Layout:
        if flow.read is None:
            return self.layout[self.graph.arguments[flow.target].value]
        return self.read_layout(flow.target - self.first, flow.read)


def decode(f: Formulation, picks: Sequence[int]) -> Decoded:
    """Translates `picks`, one choice per node of `f.problem`."""
    reader = _Reader(f, picks)
    graph, names = f.program.graph, f.mesh.axis_names
    replicated = (WHOLE,) * len(names)
    outputs = []
    for output in graph.outputs:
        if output.successor_of is not None:
            outputs.append(reader.layout[graph.arguments[output.successor_of].value])
        else:
            outputs.append(reader.layout.get(output.value, replicated) if output.value is not None else None)
    return Decoded(
        tuple(reader.layout[a.value] for a in graph.arguments),
        tuple(outputs),
        tuple(_output_steps(reader, o.value, l) for o, l in zip(graph.outputs, outputs, strict=True)),
        tuple(reader.choice(g.index) for g in f.program.groups),
        _shardings(reader, names),
    )


def _output_steps(reader: _Reader, value: int | None, target: Layout | None) -> tuple[Layout, ...]:
    if value is None or target is None or value not in reader.layout:
        return ()
    sizes = reader.f.mesh.shape
    return tuple(step.after for step in path(reader.graph.values[value].shape, reader.layout[value], target, sizes))


def _shardings(reader: _Reader, names: Sequence[str]) -> tuple[tuple[int, EquationShardings], ...]:
    f, graph = reader.f, reader.graph
    values = graph.values
    entries = lambda value, layout: spec_entries(layout, len(values[value].shape), names)
    seen_outside = {a.value for g in f.program.groups for a in g.reads} | {o.value for o in graph.outputs}
    operands: dict[int, dict[int, tuple[SpecEntries, ...]]] = collections.defaultdict(dict)
    results: dict[int, dict[int, SpecEntries]] = collections.defaultdict(dict)
    body: dict[int, dict[int, SpecEntries]] = collections.defaultdict(dict)
    again: dict[int, set[int]] = collections.defaultdict(set)
    gathered: dict[tuple[int, Layout], int] = {}  # copy -> stretch of its latest making
    for group in f.program.groups:
        choice = reader.choice(group.index)
        for index, factor_map in zip(group.operations, group.factor_maps, strict=True):
            operation = graph.operations[index]
            n = operation.equation
            if operation.kind is not OperationKind.EQUATION:
                _loop_shardings(operation, reader, entries, operands[n], results[n], body[n])
                continue
            for slot, value in enumerate(operation.results):
                if value is None or not values[value].shape:
                    continue
                if not is_pointwise(operation) or value in seen_outside:
                    results[n][slot] = entries(value, reader.layout[value])
            for slot, value in enumerate(operation.operands):
                if value is None or not values[value].shape or value not in reader.layout:
                    continue
                wanted = layout_of(map_dims(operation.rule.operands[slot], factor_map), choice.assignment)
                if wanted == reader.layout[value]:
                    continue
                steps = path(values[value].shape, reader.layout[value], wanted, f.mesh.shape)
                operands[n][slot] = tuple(entries(value, step.after) for step in steps)
                if any(s != WHOLE and t == WHOLE for s, t in zip(reader.layout[value], wanted, strict=True)):
                    stretch = f.program.live.stretch[index]
                    made = gathered.get((value, wanted))
                    if made is not None and made != stretch:
                        again[n].add(slot)
                    gathered[value, wanted] = stretch
    numbers = sorted({*operands, *results, *body})
    listed = lambda table, n: tuple(sorted(table[n].items())) if n in table else ()
    rows = (
        (
            n,
            EquationShardings(
                listed(operands, n), listed(results, n), listed(body, n), tuple(sorted(again[n])) if n in again else ()
            ),
        )
        for n in numbers
    )
    return tuple((n, s) for n, s in rows if s != EquationShardings())


def _loop_shardings(operation: Operation, reader: _Reader, entries, operands, results, body) -> None:
    """Layouts at the boundary of a loop or conditional; carry, slice and stack each hold one layout."""
    slot = operation.slot
    match operation.kind:
        case OperationKind.LOOP_CARRY:
            inside = operation.results[0] if operation.results[0] is not None else operation.results[1]
            if inside is not None and reader.graph.values[inside].shape:
                body[slot] = entries(inside, reader.layout[inside])
        case OperationKind.SCAN_SLICE:
            piece = operation.results[0]
            if reader.graph.values[piece].shape:
                body[slot] = entries(piece, reader.layout[piece])
        case OperationKind.SCAN_STACK | OperationKind.BRANCH_JOIN:
            whole = operation.results[0]
            if reader.graph.values[whole].shape:
                results[slot] = entries(whole, reader.layout[whole])


def estimate(f: Formulation, picks: Sequence[int]) -> Estimate:
    """Predicts time, traffic and memory of the solution `picks`."""
    reader = _Reader(f, picks)
    compute, communication = [], []
    for group in f.program.groups:
        table, row = f.tables[group.index], reader.rows[reader.first + group.index]
        operation = reader.graph.operations[group.operations[0]]
        if table.compute_s[row] or table.flops[row]:
            compute.append(
                ComputeItem(
                    operation.name,
                    operation.equation,
                    operation.source,
                    float(table.flops[row] * group.trips),
                    float(table.compute_s[row] * group.trips),
                )
            )
        for step in table.collectives[row]:
            value = group.writes[0].value
            exposed = dataclasses.replace(step, time_s=step.time_s * f.exposure.of_group(group))
            communication.append(_item(exposed, reader, value, operation, group.trips, operation.name))
    for flow in f.flows:
        source, target = reader.layout[flow.value], reader.target(flow)
        if source != target:
            value = reader.graph.values[flow.value]
            operation = (
                None
                if flow.read is None
                else reader.graph.operations[f.program.groups[flow.target - reader.first].operations[0]]
            )
            for step in reshard(value.shape, float(value.size_bytes), source, target, f.mesh):
                exposed = dataclasses.replace(step, time_s=step.time_s * f.exposure.of_flow(flow.value))
                communication.append(_item(exposed, reader, flow.value, operation, flow.trips, None))
    peak_bytes, peak_at, memory = _peak(f, picks, reader)
    comm_s = sum(c.time_s for c in communication)
    compute_s = sum(c.compute_s for c in compute)
    return Estimate(
        compute_s + comm_s,
        compute_s,
        comm_s,
        sum(c.wire_bytes for c in communication),
        peak_bytes,
        sum(c.flops for c in compute),
        peak_at,
        tuple(sorted(compute, key=lambda c: -c.compute_s)),
        tuple(sorted(communication, key=lambda c: -c.time_s)),
        memory,
    )


def _item(
    step, reader: _Reader, value: int, operation: Operation | None, trips: float, name: str | None
) -> CommunicationItem:
    tensor = reader.graph.values[value]
    label = (
        tensor.name
        if tensor.name[:1] != "%"
        else f"{name or 'input of ' + (operation.name if operation else 'output')}"
    )
    return CommunicationItem(
        step.kind.value,
        step.axes,
        label,
        tensor.shape,
        operation.source if operation else "",
        step.wire_bytes * trips,
        step.time_s * trips,
        trips,
    )


def _peak(f: Formulation, picks: Sequence[int], reader: _Reader) -> tuple[float, str, tuple[MemoryItem, ...]]:
    """The most memory alive at once, where, and what it is made of."""
    problem, graph = f.problem, reader.graph
    total = np.zeros(max(len(f.instants), 1) + 1)
    amounts = [float(u.amounts[picks[u.node]]) for u in problem.usages]
    copies = []
    for u in problem.edge_usages:
        e = problem.edges[u.edge]
        copies.append(float(u.amounts[e.source_class[picks[e.source]], e.target_class[picks[e.target]]]))
    for u, amount in [*zip(problem.usages, amounts, strict=True), *zip(problem.edge_usages, copies, strict=True)]:
        total[u.start] += amount
        total[u.stop] -= amount
    usage = np.cumsum(total)[:-1]
    at = int(np.argmax(usage))
    successors = {o.successor_of for o in graph.outputs}
    state = {a.value for i, a in enumerate(graph.arguments) if i in successors}
    arguments = {a.value for a in graph.arguments}
    producer = {r: o for o in graph.operations for r in o.results if r is not None}
    items = []
    for u, amount, value in zip(problem.usages, amounts, f.usage_values, strict=True):
        if u.start <= at < u.stop and amount:
            if value is None:
                group = f.program.groups[u.node - reader.first]
                operation = graph.operations[group.operations[0]]
                shape = graph.values[group.writes[0].value].shape
                items.append(MemoryItem(f"{operation.name} at {operation.source}", "partial sums", shape, amount))
                continue
            tensor = graph.values[value]
            kind = "state" if value in state else "inputs" if value in arguments else "intermediates"
            name = tensor.name
            if kind == "intermediates":
                operation = producer[value]
                name = f"{operation.name} at {operation.source}"
            items.append(MemoryItem(name, kind, tensor.shape, amount))
    for u, amount in zip(problem.edge_usages, copies, strict=True):
        if u.start <= at < u.stop and amount:
            tensor = graph.values[f.flows[u.edge].value]
            items.append(MemoryItem(f"copy of {tensor.name}", "resharded copies", tensor.shape, amount))
    peak_at = ""
    if f.instants and graph.operations:
        operation = graph.operations[f.instants[at]]
        peak_at = f"{operation.name} at {operation.source}" if operation.source else operation.name
    return float(usage[at]), peak_at, tuple(sorted(items, key=lambda m: -m.size_bytes))
