"""Builds the integer program of a graph on a logical mesh.

Sets        V        decisions: every argument of the program and every group of operations   (`_nodes`)
            K_i      choices of decision i: an argument's layouts, a group's `ChoiceTable`       (`_argument_choices`,
                     less what pins, annotations and restrictions forbid                          `_group_choices`)
            E        (i, j): i defines a value that j reads; one edge a (value, way of reading)   (`_edges`)
                     (i, a): i defines the successor of argument a                                (`_succession_edges`)
            T        instants that matter: maximal sets of values alive together                  (`_usages`)

Minimise    sum_{i in V} trips_i (compute_i(x_i) + collectives_i(x_i))                            (`_nodes`)
          + sum_{(i,j) in E} trips_ij reshard(layout_i(x_i), layout_j(x_j))                       (`_edges`)

Subject to  x_i in K_i                                     one choice each
            layout_i(x_i) = layout_a(x_a) after resharding for every succession edge (i, a)       (`_succession_edges`)
            for all t in T:
              sum_{values v alive at t} bytes_v(x) + copies and partial sums at t <= budget       (`_usages`)

All costs are seconds per call of the program on one device; all memory is bytes on one device.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from autoshard.cluster import LogicalMesh
from autoshard.cost.reshard import reshard, total_s
from autoshard.errors import LayoutError
from autoshard.graph.graph import FixedLayout, Graph, OperationKind
from autoshard.graph.groups import Group, group_operations, map_dims
from autoshard.graph.layout import Layout, all_layouts, shard_bytes
from autoshard.planner.choices import ChoiceTable, GroupShape, choice_table, satisfies, shape_of
from autoshard.planner.liveness import Liveness, compress, is_alias, liveness
from autoshard.planner.overlap import Exposure, exposure_of
from autoshard.solver.problem import Edge, EdgeUsage, Node, Problem, Usage


@dataclasses.dataclass(frozen=True, slots=True)
class Restrictions:
    """What a plan may not do, beyond what is legal. Baselines are plans under restrictions.

    Attributes:
      argument: (argument index, layout) -> allowed.
      group: (group index, assignment, scatter) -> allowed.
    """

    argument: Callable[[int, Layout], bool] = lambda index, layout: True
    group: Callable[[int, Layout, Layout], bool] = lambda index, assignment, scatter: True


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A graph prepared for planning: its groups and lifetimes, which no mesh changes.

    Attributes:
      graph: The graph. groups: Its groups. live: Its lifetimes.
      shapes: The shape of each group; groups of equal shape share one object.
    """

    graph: Graph
    groups: tuple[Group, ...]
    live: Liveness
    shapes: tuple[GroupShape, ...]


def prepare(graph: Graph) -> Program:
    """Groups the operations of `graph` and computes lifetimes."""
    groups, live = group_operations(graph), liveness(graph)
    interned: dict[GroupShape, GroupShape] = {}
    shapes = tuple(interned.setdefault(s, s) for s in (shape_of(g, graph, live.stored, live.stretch) for g in groups))
    return Program(graph, groups, live, shapes)


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """One node of the problem.

    Attributes:
      argument: Index into `graph.arguments`, or None for a group.
      group: Index into the groups, or None for an argument.
      rows: The choices that are allowed, as indices into the argument's layouts or the group's table.
    """

    argument: int | None
    group: int | None
    rows: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Flow:
    """One edge of the problem: a value from its definition to one way of reading it.

    Attributes:
      value: Value index. source, target: Decisions.
      read: Index into the target group's reads; None for a succession edge.
      trips: How often the tensor is moved in one call.
      source_layouts, target_layouts: The layout of each class of the edge.
    """

    value: int
    source: int
    target: int
    read: int | None
    trips: float
    source_layouts: tuple[Layout, ...]
    target_layouts: tuple[Layout, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Formulation:
    """A problem together with what its numbers mean.

    Attributes:
      program, mesh: What it was built from.
      tables: The choice table of each group.
      argument_layouts: The layouts of each argument, by choice.
      decisions: The meaning of each node. flows: The meaning of each edge.
      problem: The solver's input.
      exposure: Which share of each collective's time counts.
      usage_values: The value that each usage stands for (None: a partial result). instants: Operation index at each
        instant.
    """

    program: Program
    mesh: LogicalMesh
    tables: tuple[ChoiceTable, ...]
    argument_layouts: tuple[tuple[Layout, ...], ...]
    decisions: tuple[Decision, ...]
    flows: tuple[Flow, ...]
    problem: Problem
    exposure: Exposure
    usage_values: tuple[int | None, ...]
    instants: tuple[int, ...]


def _argument_choices(
    program: Program, mesh: LogicalMesh, pins: Sequence[FixedLayout | None], restrictions: Restrictions
) -> tuple[list[tuple[Layout, ...]], list[Decision]]:
    sizes = mesh.shape
    names = mesh.axis_names
    cache: dict[tuple[int, ...], tuple[Layout, ...]] = {}
    layouts, decisions = [], []
    for i, argument in enumerate(program.graph.arguments):
        value = program.graph.values[argument.value]
        shape = () if value.dtype.startswith("key") else value.shape
        own = cache.setdefault(shape, all_layouts(shape, sizes))
        rows = [k for k, l in enumerate(own) if restrictions.argument(i, l)]
        for fixed in (argument.fixed, pins[i]):
            if fixed is not None:
                rows = [k for k in rows if satisfies(own[k], fixed[: len(shape)], names)]
                if not rows:
                    raise LayoutError(
                        f"No legal layout of `{argument.name}` with shape {value.shape} on mesh {mesh} satisfies "
                        f"the demanded sharding {fixed}: the mesh axes on a dimension must divide it, and each axis "
                        "may appear once. Change the pin or annotation, or the mesh."
                    )
        if not rows:
            raise LayoutError(f"The restrictions leave no layout for `{argument.name}` with shape {value.shape}.")
        layouts.append(own)
        decisions.append(Decision(i, None, tuple(rows)))
    return layouts, decisions


def _group_choices(
    program: Program, mesh: LogicalMesh, restrictions: Restrictions
) -> tuple[list[ChoiceTable], list[Decision]]:
    names = mesh.axis_names
    cache: dict[int, ChoiceTable] = {}
    tables, decisions = [], []
    for group, shape in zip(program.groups, program.shapes, strict=True):
        if id(shape) not in cache:
            cache[id(shape)] = choice_table(shape, mesh)
        table = cache[id(shape)]
        rows = [k for k, c in enumerate(table.choices) if restrictions.group(group.index, c.assignment, c.scatter)]
        operation = program.graph.operations[group.operations[0]]
        for fixed, values, dims, accesses, layouts in (
            (operation.fixed_operands, operation.operands, operation.rule.operands, group.reads, table.reads),
            (operation.fixed_results, operation.results, operation.rule.results, group.writes, table.writes),
        ):
            for want, value, own in zip(fixed or (), values, dims, strict=False):
                mapped = map_dims(own, group.factor_maps[0])
                position = next((n for n, a in enumerate(accesses) if (a.value, a.dims) == (value, mapped)), None)
                if want is not None and position is not None:
                    rows = [k for k in rows if satisfies(layouts[position][k], want, names)]
        if not rows:
            raise LayoutError(
                f"No legal choice is left for `{operation.name}` at {operation.source or 'an unknown line'} on "
                f"mesh {mesh}. A sharding annotation in the function names axes that the mesh lacks or that do not "
                "divide the tensor; pass mesh= with those axes, or drop the annotation."
            )
        tables.append(table)
        decisions.append(Decision(None, group.index, tuple(rows)))
    return tables, decisions


class _Builder:
    """Assembles the formulation step by step; `formulate` is its only user."""

    def __init__(
        self,
        program: Program,
        mesh: LogicalMesh,
        pins: Sequence[FixedLayout | None],
        restrictions: Restrictions,
        overlap: float,
    ):
        self.program, self.mesh, self.graph = program, mesh, program.graph
        self.sizes = mesh.shape
        self.layouts, arguments = _argument_choices(program, mesh, pins, restrictions)
        self.tables, groups = _group_choices(program, mesh, restrictions)
        self.decisions = [*arguments, *groups]
        self.definition: dict[int, tuple[int, int | None]] = {
            a.value: (i, None) for i, a in enumerate(self.graph.arguments)
        }
        for group in program.groups:
            for w, access in enumerate(group.writes):
                self.definition[access.value] = (len(arguments) + group.index, w)
        self.class_cache: dict[tuple[Layout, ...], tuple[tuple[Layout, ...], np.ndarray]] = {}
        self.matrix_cache: dict[tuple, np.ndarray] = {}
        self.own_s: dict[int, np.ndarray] = {}
        self.exposure = exposure_of(self.graph, overlap)

    def defined_layouts(self, value: int) -> tuple[int, list[Layout]] | None:
        """The decision that defines a value, and the value's layout under each of its choices."""
        if value not in self.definition:
            return None  # a constant: whole everywhere
        node, write = self.definition[value]
        decision = self.decisions[node]
        column = self.layouts[decision.argument] if write is None else self.tables[decision.group].writes[write]
        return node, [column[k] for k in decision.rows]

    def move_s(self, value: int, source: Layout, target: Layout) -> float:
        tensor = self.graph.values[value]
        return total_s(reshard(tensor.shape, float(tensor.size_bytes), source, target, self.mesh))

    def classes(self, layouts: Sequence[Layout]) -> tuple[tuple[Layout, ...], np.ndarray]:
        """The distinct layouts and the class of each choice; equal columns share one array, so that copies are seen
        as such.
        """
        key = tuple(layouts)
        if key not in self.class_cache:
            unique = {l: i for i, l in enumerate(dict.fromkeys(layouts))}
            self.class_cache[key] = tuple(unique), np.array([unique[l] for l in layouts], dtype=np.intp)
        return self.class_cache[key]

    def matrix(self, value: int, sources: tuple[Layout, ...], targets: tuple[Layout, ...], trips: float) -> np.ndarray:
        tensor = self.graph.values[value]
        key = (tensor.shape, tensor.size_bytes, sources, targets, trips)
        if key not in self.matrix_cache:
            self.matrix_cache[key] = np.array([[trips * self.move_s(value, s, t) for t in targets] for s in sources])
        return self.matrix_cache[key]

    def nodes(self) -> list[Node]:
        nodes = []
        for i, decision in enumerate(self.decisions):
            if decision.argument is not None:
                nodes.append(Node(self.graph.arguments[decision.argument].name, np.zeros(len(decision.rows))))
            else:
                group, table = self.program.groups[decision.group], self.tables[decision.group]
                cost = group.trips * (table.compute_s + table.comm_s * self.exposure.of_group(group))
                name = self.graph.operations[group.operations[0]].name
                cost = cost[list(decision.rows)] + self.own_s.get(i, 0.0)
                nodes.append(Node(f"{name}#{group.operations[0]}", cost))
        return nodes

    def edges(self) -> tuple[list[Flow], list[Edge]]:
        flows, edges = [], []
        first = len(self.graph.arguments)
        body_trips = _body_trips(self.graph)
        for group in self.program.groups:
            target = first + group.index
            rows = self.decisions[target].rows
            for r, access in enumerate(group.reads):
                defined = self.defined_layouts(access.value)
                if defined is None or not self.graph.values[access.value].shape:
                    continue
                operation = self.graph.operations[access.operations[0]]
                trips = group.trips
                if operation.kind is OperationKind.LOOP_CARRY and access.value == operation.operands[1]:
                    trips = body_trips[operation.index] * group.trips
                column = self.tables[group.index].reads[r]
                self.connect(flows, edges, access.value, defined, target, [column[k] for k in rows], r, trips)
        for output in self.graph.outputs:
            if output.value is None or output.successor_of is None:
                continue
            defined = self.defined_layouts(output.value)
            if defined is None or defined[0] == output.successor_of:
                continue
            rows = self.decisions[output.successor_of].rows
            targets = [self.layouts[output.successor_of][k] for k in rows]
            self.connect(flows, edges, output.value, defined, output.successor_of, targets, None, 1.0)
        return flows, edges

    def connect(self, flows, edges, value, defined, target, targets, read, trips) -> None:
        source, sources = defined
        if source == target:  # the group reads its own value in other dimensions: a cost of each choice alone
            self.own_s[target] = self.own_s.get(target, 0.0) + np.array(
                [trips * self.move_s(value, s, t) for s, t in zip(sources, targets, strict=True)]
            )
            return
        source_layouts, source_class = self.classes(sources)
        target_layouts, target_class = self.classes(targets)
        costs = self.matrix(value, source_layouts, target_layouts, trips * self.exposure.of_flow(value))
        flows.append(Flow(value, source, target, read, trips, source_layouts, target_layouts))
        edges.append(Edge(source, target, source_class, target_class, costs))

    def usages(self, flows: Sequence[Flow]) -> tuple[list[Usage], list[EdgeUsage], list[int | None], tuple[int, ...]]:
        """Memory over time: stored values, partial results, and resharded copies."""
        live, graph = self.program.live, self.graph
        rows: list[tuple[int, int, tuple]] = []  # start, stop, what
        for life in live.lifetimes:
            defined = self.defined_layouts(life.value)
            if defined is None or graph.values[life.value].size_bytes == 0:
                continue
            node, layouts = defined
            size = float(graph.values[life.value].size_bytes)
            amounts = np.array([shard_bytes(size, l, self.sizes) for l in layouts])
            rows.append((life.start, life.stop, ("value", node, amounts, life.value)))
        first = len(graph.arguments)
        for group in self.program.groups:
            table, decision = self.tables[group.index], self.decisions[first + group.index]
            partial = table.partial_bytes[list(decision.rows)]
            if partial.any():
                at = group.operations[0]
                rows.append((at, at + 1, ("value", first + group.index, partial, None)))
        alias_stop = dict(live.alias_stop)
        matrix_cache: dict[tuple, np.ndarray] = {}
        for e, flow in enumerate(flows):
            if flow.read is None:
                continue
            group = self.program.groups[flow.target - first]
            size = float(graph.values[flow.value].size_bytes)
            key = (size, flow.source_layouts, flow.target_layouts)
            if key not in matrix_cache:
                matrix_cache[key] = np.array(
                    [
                        [0.0 if s == t else shard_bytes(size, t, self.sizes) for t in flow.target_layouts]
                        for s in flow.source_layouts
                    ]
                )
            if not matrix_cache[key].any():
                continue
            for o in group.reads[flow.read].operations:
                operation = graph.operations[o]
                if operation.kind in (OperationKind.LOOP_CARRY, OperationKind.SCAN_STACK):
                    continue  # the loop's own buffer, counted as a value
                stop = o + 1
                if is_alias(operation):
                    stop = max([stop, *(alias_stop.get(r, 0) for r in operation.results if r is not None)])
                rows.append((o, stop, ("copy", e, matrix_cache[key], flow.value)))
        intervals = compress([(s, e) for s, e, _ in rows])
        instants = _instants([(s, e) for s, e, _ in rows])
        usages, edge_usages, meanings = [], [], []
        for (start, stop), (_, _, what) in zip(intervals, rows, strict=True):
            if start >= stop:
                continue
            if what[0] == "value":
                usages.append(Usage(what[1], start, stop, what[2]))
                meanings.append(what[3])
            else:
                edge_usages.append(EdgeUsage(what[1], start, stop, what[2]))
        return usages, edge_usages, meanings, instants


def _instants(times: list[tuple[int, int]]) -> tuple[int, ...]:
    """The operation index of each instant that `compress` keeps."""
    if not times:
        return ()
    compressed = compress(times)
    count = max(e for _, e in compressed)
    at = [0] * count
    for (s, _), (start, stop) in zip(times, compressed, strict=True):
        for t in range(start, min(start + 1, stop)):
            at[t] = max(at[t], s)
    return tuple(at)


def _body_trips(graph: Graph) -> dict[int, float]:
    """For each operation inside a loop, the trip count of the innermost loop around it."""
    trips: dict[int, float] = {}
    for loop in sorted(graph.loops, key=lambda l: l.start - l.stop):  # larger loops first, inner ones overwrite
        for t in range(loop.start, loop.stop):
            trips[t] = loop.trips
    return trips


def formulate(
    program: Program,
    mesh: LogicalMesh,
    budget_bytes: float | None,
    pins: Sequence[FixedLayout | None],
    restrictions: Restrictions = Restrictions(),  # noqa: B008 - frozen
    overlap: float = 0.0,
) -> Formulation:
    """Builds the problem of `program` on `mesh`.

    Args:
      program: The prepared program.
      mesh: The logical mesh.
      budget_bytes: Memory per device; None for no limit.
      pins: For each argument, a layout that the user demands, or None.
      restrictions: What the plan may not do.
      overlap: Share of weight and gradient collectives that hides behind computation; see `overlap.py`.

    Raises:
      LayoutError: If pins, annotations or restrictions leave a decision without any choice.
    """
    builder = _Builder(program, mesh, pins, restrictions, overlap)
    flows, edges = builder.edges()
    nodes = builder.nodes()
    usages, edge_usages, meanings, instants = builder.usages(flows)
    problem = Problem(tuple(nodes), tuple(edges), tuple(usages), tuple(edge_usages), budget_bytes)
    return Formulation(
        program,
        mesh,
        tuple(builder.tables),
        tuple(builder.layouts),
        tuple(builder.decisions),
        tuple(flows),
        problem,
        builder.exposure,
        tuple(meanings),
        instants,
    )
