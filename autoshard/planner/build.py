"""Builds the integer program of a graph on a logical mesh.

Sets        V        decisions: every argument of the program and every group of operations   (`_Builder.nodes`)
            K_i      choices of decision i: an argument's layouts, a group's `ChoiceTable`,      (`argument_choices`,
                     less what pins, annotations and restrictions forbid                          `group_choices`)
            H        arguments of which there is each layout twice: on the devices, and in       (`state_updates`,
                     the memory of the host                                                       `host_copy_s`)
            R        residuals that may lie in the memory of the host between the passes: one     (`HostResiduals`,
                     decision each, and an edge from what defines it                              `_Builder.residual`)
            E        (i, j): i defines a value that j reads; one edge a (value, way of reading)   (`_Builder.reads`)
                     (i, a): i defines the successor of argument a                           (`_Builder.successions`)
            T        instants that matter: maximal sets of values alive together              (`instants_that_matter`)

Minimise    sum_{i in V} trips_i (compute_i(x_i) + collectives_i(x_i))                            (`_Builder.nodes`)
          + sum_{(i,j) in E} trips_ij reshard(layout_i(x_i), layout_j(x_j))                       (`_Builder.move`)
          + sum_{a in H, x_a in host memory} 2 (latency + bytes_a(x_a) / bandwidth of the link)   (`_Builder.nodes`)
          + sum_{r in R, x_r in host memory} 2 (latency + bytes_r(x) / bandwidth of the link)     (`_Builder.residual`)

Subject to  x_i in K_i                                     one choice each
            layout_i(x_i) = layout_a(x_a) after resharding for every succession edge (i, a)       (`_Builder.edges`)
            for all t in T:
              sum_{values v alive at t} bytes_v(x) + copies and partial sums at t <= budget       (`usages_of`)
              an argument in host memory counts while its update takes its turn, and not else;
              a residual in host memory counts until it has left, and from when on it comes back

All costs are seconds per call of the program on one device; all memory is bytes on one device.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autoshard.cluster import LogicalMesh
from autoshard.compiler.backends import compiler_of
from autoshard.compiler.buffer_uses import BufferUse, Choices, CopySizes, GroupChoices, HostChoices, OperandRead
from autoshard.compiler.collective_dtypes import is_narrowed
from autoshard.compiler.exchanged_sums import exchanged_on
from autoshard.compiler.host_residuals import HostResiduals, Residual
from autoshard.compiler.host_state import StateUpdate, state_updates
from autoshard.compiler.protocol import Compiler
from autoshard.compiler.scanned_inputs import given_bytes
from autoshard.compiler.schedule import Schedule
from autoshard.cost.collectives import Collective
from autoshard.cost.host_copies import Offload, round_trips_s
from autoshard.cost.in_pieces import Decompose, InPieces
from autoshard.cost.lookups import Lookups
from autoshard.garbage import collection_paused
from autoshard.graph.graph import FixedLayout, Graph, OperationKind
from autoshard.graph.layout import Layout, shard_bytes
from autoshard.graph.layout_columns import LayoutColumn, MoveKinds
from autoshard.planner.allowed import (
    ArgumentDecision,
    Decision,
    ResidualDecision,
    Restrictions,
    argument_choices,
    group_choices,
)
from autoshard.planner.choices import ChoiceTable
from autoshard.planner.mesh_prices import MeshPrices, Move, MoveKind
from autoshard.planner.overlap import Overlap, StretchWeights, Terms, counted_of_group, first_weights
from autoshard.planner.pace import pace_of
from autoshard.planner.program import Program
from autoshard.planner.usages import ResidualEdge, usages_of
from autoshard.solver.problem import Edge, Node, Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One edge of the problem: a value from its definition to one way of reading it.

    Attributes:
      value: Value index. itemsize_bytes: Of an element as it is moved. source, target: Decisions.
      is_narrowed: Whether it is made smaller before it is sent (`EquationPlan.narrows_first`).
      read: Index into the target group's reads; None for a succession edge.
      trips: How often the tensor is moved in one call.
      makings: The operations for which a gathered copy is made on each of these trips, since it is not kept between
        distant uses.
      places: The checkpointed functions (-1 for none) that it is read in; each makes its own copies of any kind.
      defined_as, read_as: Its layout under each choice of the source, and of the target.
    """

    value: int
    itemsize_bytes: int
    is_narrowed: bool
    source: int
    target: int
    read: int | None
    trips: float
    makings: tuple[int, ...]
    places: tuple[int, ...]
    defined_as: LayoutColumn
    read_as: LayoutColumn


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Formulation:
    """A problem together with what its numbers mean.

    Attributes:
      program, mesh: What it was built from.
      tables: The choice table of each group.
      argument_layouts: The layouts of each argument, by choice.
      decisions: The meaning of each node. flows: The meaning of each edge but the last ones, which are of `residuals`.
      problem: The solver's input.
      free_s: Of each edge for a move that can hide, by its number, what it costs where all of it counts.
      within_s: What decisions pay that read their own values in other dimensions, by decision and choice.
      overlap: What can hide behind kernels, and what counts of it.
      schedule: What the compiler is asked for. compiler: Whose laws its memory and collectives follow.
      buffers: What each usage stands for, then each usage of an edge. instants: Operation index at each instant.
      branch: Of decisions whose choices a search has cut, those that are left.
      updates: The updates whose state may lie in the memory of the host; empty where nothing may.
      residuals: The residuals that may lie there; None where none may.
      prices: On the mesh, as far as they are known.
    """

    program: Program
    mesh: LogicalMesh
    tables: tuple[ChoiceTable, ...]
    argument_layouts: tuple[tuple[Layout, ...], ...]
    decisions: tuple[Decision, ...]
    flows: tuple[Flow, ...]
    problem: Problem
    free_s: Mapping[int, np.ndarray]
    within_s: Mapping[int, np.ndarray]
    overlap: Overlap
    schedule: Schedule
    compiler: Compiler
    buffers: tuple[BufferUse, ...]
    instants: tuple[int, ...]
    branch: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    updates: tuple[StateUpdate, ...] = ()
    residuals: HostResiduals | None = None
    prices: MeshPrices = dataclasses.field(repr=False, compare=False)

    @property
    def all_residuals(self) -> tuple[Residual, ...]:
        """The residuals that decisions are about."""
        return () if self.residuals is None else self.residuals.all

    def argument_decision(self, argument: int) -> ArgumentDecision:
        """The decision about an argument."""
        decision = self.decisions[argument]
        assert isinstance(decision, ArgumentDecision)  # arguments come first
        return decision


_BOTH = np.arange(2)
"""The classes of a residual's two choices: on the devices, and in the memory of the host."""


class _Builder:
    """Assembles the formulation step by step; `formulate` is its only user.

    Whatever depends only on the kind of a decision or edge is made once a kind and shared by its copies, as one object,
    so that the time goes with what is distinct, and the solver can see the copies.
    """

    def __init__(
        self,
        program: Program,
        prices: MeshPrices,
        layouts: Sequence[tuple[Layout, ...]],
        tables: Sequence[ChoiceTable],
        decisions: Sequence[Decision],
        overlap: Overlap,
        compiler: Compiler,
        updates: Sequence[StateUpdate] = (),
        residuals: Sequence[Residual] = (),
    ):
        self.program, self.mesh, self.graph = program, prices.mesh, program.graph
        self.layouts, self.tables, self.decisions = layouts, tables, decisions
        self.first_group = len(layouts)
        self.definition: dict[int, tuple[int, int | None]] = {
            a.value: (i, None) for i, a in enumerate(self.graph.arguments)
        }
        for group in program.groups:
            for w, access in enumerate(group.writes):
                self.definition[access.value] = (self.first_group + group.index, w)
        self.prices, self.columns = prices, prices.columns
        self.compiler = compiler
        self.free_s: dict[int, np.ndarray] = {}
        self.counted: dict[tuple[int, float], np.ndarray] = {}
        self.own_s: dict[int, np.ndarray] = {}
        self.copied_s: dict[tuple, np.ndarray] = {}
        self.added_in_place = program.added_in_place
        self.allowed: dict[tuple[int, int, int], np.ndarray] = {}
        self.overlap = overlap
        self.updates, self.residuals = updates, residuals
        self.first_residual = self.first_group + len(program.groups)

    def defined(self, value: int) -> tuple[int, LayoutColumn] | None:
        """The decision that defines a value, and the value's layout under each of its choices."""
        if value not in self.definition:
            return None  # a constant: whole everywhere
        node, write = self.definition[value]
        layouts = self.layouts[node] if write is None else self.tables[node - self.first_group].writes[write]
        return node, self.columns.of(layouts, self.decisions[node].rows)

    def node_of(self, value: int) -> int:
        """The decision that defines a value, which is no constant."""
        return self.definition[value][0]

    def choices(self) -> Choices:
        """What the choices of all decisions mean for memory."""
        known: dict[tuple, GroupChoices] = {}
        groups = []
        for table, decision in zip(self.tables, self.decisions[self.first_group : self.first_residual], strict=True):
            key = id(table), decision.rows
            if key not in known:
                reads = tuple([self.columns.of(layouts, decision.rows) for layouts in table.reads])
                known[key] = GroupChoices(
                    reads, table.partial_bytes[list(decision.rows)], table.workspace_bytes[list(decision.rows)]
                )
            groups.append(known[key])
        layouts_of = lambda value: None if (found := self.defined(value)) is None else found[1]
        return Choices(self.mesh.shape, layouts_of, groups, self.host_choices())

    def host_choices(self) -> dict[int, HostChoices]:
        """For values of arguments that may lie in the memory of the host, under which choices they do."""
        found: dict[int, HostChoices] = {}
        known: dict[tuple, np.ndarray] = {}
        for update in self.updates:
            for read in update.reads:
                decision = self.decisions[read.argument]
                if isinstance(decision, ArgumentDecision) and decision.first_in_host is not None:
                    key = decision.rows, decision.first_in_host
                    if key not in known:
                        known[key] = np.array([decision.is_in_host(row) for row in decision.rows])
                    value = self.graph.arguments[read.argument].value
                    found[value] = HostChoices(known[key], update.start, update.stop)
        return found

    def host_copy_s(self, decision: ArgumentDecision) -> np.ndarray:
        """[K] what an argument takes to the devices and its successor back, where they lie on the host."""
        value = self.graph.values[self.graph.arguments[decision.argument].value]
        there = [decision.is_in_host(row) for row in decision.rows]
        column = self.columns.of(self.layouts[decision.argument], decision.rows)
        copied_bytes = np.where(there, column.shard_bytes(float(value.size_bytes), self.mesh.shape), 0.0)
        link = self.mesh.host_link
        return np.zeros(len(there)) if link is None else round_trips_s(link, copied_bytes.tolist())

    def operand_reads(self, flows: Sequence[Flow], copies: Sequence[CopySizes | None]) -> list[OperandRead | None]:
        """For each flow, what its resharded copy takes; None where none is ever made for a group."""
        return [
            None if f.read is None or sizes is None else self.operand_read(f, f.read, sizes)
            for f, sizes in zip(flows, copies, strict=True)
        ]

    def operand_read(self, flow: Flow, read: int, sizes: CopySizes) -> OperandRead:
        """What the resharded copy of a flow to a group's read number `read` takes, which is `sizes`."""
        group, given = flow.target - self.first_group, None
        if self.graph.operations[self.program.groups[group].operations[0]].kind is OperationKind.SCAN_SLICE:
            size_bytes = float(self.graph.values[flow.value].size_bytes)
            given = given_bytes(flow.defined_as.layouts, flow.read_as.layouts, size_bytes, self.mesh.shape)
        return OperandRead(group, read, sizes, given)

    def nodes(self) -> list[Node]:
        nodes = []
        free: dict[tuple, np.ndarray] = {}
        cache: dict[tuple, np.ndarray] = {}
        counted: dict[Terms, dict[tuple[Collective, ...], float]] = {}  # most choices send what others send, too
        for i, decision in enumerate(self.decisions):
            rows = decision.rows
            if isinstance(decision, ArgumentDecision):
                value = self.graph.values[self.graph.arguments[decision.argument].value]
                kind = (len(rows),) if decision.first_in_host is None else (rows, value.shape, value.dtype)
                if kind not in free:
                    free[kind] = self.host_copy_s(decision)
                nodes.append(Node(self.graph.arguments[decision.argument].name, free[kind]))
                continue
            if isinstance(decision, ResidualDecision):
                nodes.append(Node(f"residual %{self.residuals[decision.residual].value}", np.zeros(len(rows))))
                continue
            group, table = self.program.groups[decision.group], self.tables[decision.group]
            terms = self.overlap.of_group(group, self.graph.values[group.writes[-1].value].shape)
            counting = self.overlap.of_kernels(group)
            key = id(table), rows, group.trips, terms, counting
            if key not in cache:
                known, (distinct, which) = counted.setdefault(terms, {}), table.distinct_collectives
                for steps in distinct:
                    if steps not in known:
                        known[steps] = sum(c.time_s for c in counted_of_group(terms, steps))
                comm_s = np.array([known[steps] for steps in distinct])[which]
                if table.inside is not None:
                    comm_s = comm_s + table.inside.comm_s
                kernels_s = counting * table.free_s + table.beside_s
                cache[key] = (group.trips * (kernels_s + comm_s))[list(rows)]
            cost = cache[key] + self.own_s[i] if i in self.own_s else cache[key]
            nodes.append(Node(f"{self.graph.operations[group.operations[0]].name}#{group.operations[0]}", cost))
        return nodes

    def edges(self) -> tuple[list[Flow], list[Edge], list[CopySizes | None]]:
        """Flows, their edges, and what a resharded copy takes on each."""
        flows: list[Flow] = []
        edges: list[Edge] = []
        copies: list[CopySizes | None] = []
        for flow in itertools.chain(self.reads(), self.successions()):
            if flow.source == flow.target:
                self.price_within(flow)
                continue
            move = self.move(flow)
            costs = move.costs
            if self.overlap.is_free(flow.value):
                self.free_s[len(edges)] = costs
                costs = self.counted_s(flow, costs)
            costs = self.allowed_s(flow, costs)
            flows.append(flow)
            edges.append(Edge(flow.source, flow.target, flow.defined_as.of_choice, flow.read_as.of_choice, costs))
            copies.append(move.copies)
        return flows, edges, copies

    def residual(self, number: int) -> Edge:
        """The edge from what defines a residual to whether it lies in the memory of the host; it costs the copies."""
        own, link = self.residuals[number], self.mesh.host_link
        (source, column), share = self.defined_buffer(own), own.trips * self.overlap.share_of(own.windows)
        size_bytes = self.graph.values[own.buffer].size_bytes
        key = "residual", id(column), size_bytes, share
        if key not in self.copied_s:
            sizes_bytes = [shard_bytes(float(size_bytes), layout, self.mesh.shape) for layout in column.layouts]
            copies_s = np.zeros(len(sizes_bytes)) if link is None else share * round_trips_s(link, sizes_bytes)
            self.copied_s[key] = np.stack([np.zeros(len(sizes_bytes)), copies_s], axis=1)
        return Edge(source, self.first_residual + number, column.of_choice, _BOTH, self.copied_s[key])

    def defined_buffer(self, residual: Residual) -> tuple[int, LayoutColumn]:
        """The decision that defines the buffer of a residual, and its layout under each choice."""
        defined = self.defined(residual.buffer)
        assert defined is not None  # it is made by an operation
        return defined

    def reads(self) -> Iterator[Flow]:
        """The flows of tensors to the groups that read them."""
        analysis, operations = self.program.analysis, self.graph.operations
        body_trips, checkpoint_of = _body_trips(self.graph), self.graph.checkpoint_of()
        for group in self.program.groups:
            target = self.first_group + group.index
            for r, access in enumerate(group.reads):
                defined = self.defined(access.value)
                if defined is None or not self.graph.values[access.value].shape:
                    continue
                trips = group.trips
                operation = operations[access.operations[0]]
                if operation.kind is OperationKind.LOOP_CARRY and access.value == operation.operands[1]:
                    trips = body_trips[operation.index] * group.trips
                source, own = defined
                itemsize_bytes = self.compiler.moved_itemsize(analysis, access.value, access.operations)
                if narrows := is_narrowed(self.graph, access.operations):
                    itemsize_bytes = min(itemsize_bytes, self.graph.values[operation.result()].itemsize_bytes)
                yield Flow(
                    value=access.value,
                    itemsize_bytes=itemsize_bytes,
                    is_narrowed=narrows,
                    source=source,
                    target=target,
                    read=r,
                    trips=trips,
                    makings=tuple({analysis.live.region[o]: o for o in reversed(access.operations)}.values())[::-1],
                    places=tuple(sorted({checkpoint_of[o] for o in access.operations})),
                    defined_as=own,
                    read_as=self.columns.of(self.tables[group.index].reads[r], self.decisions[target].rows),
                )

    def successions(self) -> Iterator[Flow]:
        """The flows of outputs to the arguments whose successors they are."""
        for output in self.graph.outputs:
            if output.value is None or output.successor_of is None:
                continue
            defined = self.defined(output.value)
            if defined is None or defined[0] == output.successor_of:
                continue
            source, own = defined
            rows = self.decisions[output.successor_of].rows
            yield Flow(
                value=output.value,
                itemsize_bytes=self.program.analysis.moved_itemsizes[output.value],
                is_narrowed=False,
                source=source,
                target=output.successor_of,
                read=None,
                trips=1.0,
                makings=(len(self.graph.operations),),
                places=(-1,),
                defined_as=own,
                read_as=self.columns.of(self.layouts[output.successor_of], rows),
            )

    def price_within(self, flow: Flow) -> None:
        """Adds what a group pays that reads its own value in other dimensions: a cost of each choice alone."""
        tensor, own, column = self.graph.values[flow.value], flow.defined_as, flow.read_as
        seconds = self.prices.moves.seconds(tensor.shape, float(tensor.size_bytes), own.layouts, column.layouts)
        extra = flow.trips * seconds[own.of_choice, column.of_choice]
        self.own_s[flow.target] = self.own_s.get(flow.target, 0.0) + extra

    def move(self, flow: Flow) -> Move:
        """What a flow costs where all of it counts, and what its copy takes; one object for flows alike."""
        shape = self.graph.values[flow.value].shape
        alike = self.overlap.whole_of_flow(flow.value, shape).alike
        makings, places = len(flow.makings), len(flow.places)
        kind = MoveKind(shape, flow.itemsize_bytes, flow.is_narrowed, flow.trips, makings, places, alike)
        return self.prices.move(kind, flow.defined_as, flow.read_as)

    def allowed_s(self, flow: Flow, costs: np.ndarray) -> np.ndarray:
        """`costs` of a flow, infinite where it is made in the place of another value and lies otherwise, although it
        could lie likewise: XLA scatters into what is added only what lies as that does, and makes all of it else
        (`GroupShape.zeros`). One object for flows alike."""
        if flow.value not in self.added_in_place:
            return costs
        key = id(costs), id(flow.defined_as), id(flow.read_as)
        if key not in self.allowed:
            is_other = MoveKinds.between(flow.defined_as.layouts, flow.read_as.layouts).moved
            self.allowed[key] = np.where(is_other & ~is_other.all(axis=0), math.inf, costs)
        return self.allowed[key]

    def counted_s(self, flow: Flow, whole_s: np.ndarray) -> np.ndarray:
        """What counts of a flow that can hide and costs `whole_s`; one object for flows alike."""
        share = self.overlap.share_of_flow(flow.value, flow.makings)
        if share == 1.0:
            return whole_s
        key = id(whole_s), share
        if key not in self.counted:
            self.counted[key] = share * whole_s
        return self.counted[key]


def _body_trips(graph: Graph) -> dict[int, float]:
    """For each operation inside a loop, the trip count of the innermost loop around it."""
    trips: dict[int, float] = {}
    for loop in sorted(graph.loops, key=lambda l: l.start - l.stop):  # larger loops first, inner ones overwrite
        for t in range(loop.start, loop.stop):
            trips[t] = loop.trips
    return trips


@collection_paused()
def formulate(
    program: Program,
    mesh: LogicalMesh,
    budget_bytes: float | None,
    pins: Sequence[FixedLayout | None],
    restrictions: Restrictions = Restrictions(),  # noqa: B008 - frozen
    schedule: Schedule = Schedule.LEAST_MEMORY,
    overlap: float = 1.0,
    weights: StretchWeights | None = None,
    lookups: Lookups = Lookups(),  # noqa: B008 - frozen
    offload: Offload = "never",
    decompose: Decompose = "never",
    prices: MeshPrices | None = None,
) -> Formulation:
    """Builds the problem of `program` on `mesh`.

    Args:
      program: The prepared program.
      mesh: The logical mesh.
      budget_bytes: Memory per device; None for no limit.
      pins: For each argument, a layout that the user demands, or None.
      restrictions: What the plan may not do.
      schedule: What the compiler is asked for.
      overlap: Share of a kernel's time that collectives beside it make use of.
      weights: Of stretches of operations, under the latency-hiding schedule (`overlap.py`); None: `first_weights`.
      lookups: What is known of look-ups in tables.
      offload: What may lie in the memory of the host, if the mesh tells of one.
      decompose: Which products may run in pieces, beside the transfers of what they gather or scatter.
      prices: What is known of prices on `mesh`; what is found is added. None if nothing is.

    Raises:
      LayoutError: If pins, annotations or restrictions leave a decision without any choice.
    """
    hiding = Overlap(program.analysis, overlap, None)
    compiler = compiler_of(mesh.device_type, schedule)
    hides = compiler.hides_collectives
    has_host = mesh.host_link is not None
    updates = state_updates(program.analysis) if offload in ("state", "all") and has_host else ()
    host_residuals = HostResiduals(program.analysis) if offload in ("activations", "all") and has_host else None
    residuals = () if host_residuals is None else host_residuals.all
    may_be_in_host = {read.argument for update in updates for read in update.reads}
    prices = prices or MeshPrices(mesh)
    layouts, arguments = argument_choices(program, prices, pins, restrictions, may_be_in_host)
    in_pieces = InPieces(decompose, overlap if hides else 0.0)
    tables, groups = group_choices(program, prices, restrictions, lookups, in_pieces)
    if hides:
        compiler = compiler.paced(pace_of(program, tables, mesh))
        hiding = dataclasses.replace(
            hiding,
            weights=weights or first_weights(len(program.graph.operations)),
            hides_sums=compiler.hides_sums,
            exchanged_on=exchanged_on(mesh.axes) if compiler.hides_exchanged_sums else frozenset(),
            least_bytes=compiler.least_hidden_bytes,
            spans=compiler.spans(program.graph),
        )
    decisions = [*arguments, *groups, *(ResidualDecision(k) for k in range(len(residuals)))]
    builder = _Builder(program, prices, layouts, tables, decisions, hiding, compiler, updates, residuals)
    flows, edges, copies = builder.edges()
    nodes = builder.nodes()
    reads = builder.operand_reads(flows, copies)
    residual_edges = {
        r.buffer: ResidualEdge(len(flows) + k, r.away, builder.defined_buffer(r)[1]) for k, r in enumerate(residuals)
    }
    edges += map(builder.residual, range(len(residuals)))
    memory = usages_of(compiler, program, builder.choices(), reads, builder.node_of, residual_edges)
    return Formulation(
        program=program,
        mesh=mesh,
        tables=tuple(builder.tables),
        argument_layouts=tuple(builder.layouts),
        decisions=tuple(builder.decisions),
        flows=tuple(flows),
        problem=Problem(tuple(nodes), tuple(edges), memory.usages, memory.edge_usages, budget_bytes),
        free_s=builder.free_s,
        within_s=builder.own_s,
        overlap=hiding,
        schedule=schedule,
        compiler=compiler,
        buffers=memory.buffers,
        instants=memory.instants,
        updates=updates,
        residuals=host_residuals,
        prices=prices,
    )


@collection_paused()
def repriced(f: Formulation, weights: StretchWeights) -> Formulation:
    """The same problem with other weights of stretches: the costs of its nodes and edges change."""
    overlap = dataclasses.replace(f.overlap, weights=weights)
    builder = _Builder(
        f.program,
        f.prices,
        f.argument_layouts,
        f.tables,
        f.decisions,
        overlap,
        f.compiler,
        residuals=f.all_residuals,
    )
    builder.own_s.update(f.within_s)
    edges = list(f.problem.edges[: len(f.flows)])
    for number, whole_s in f.free_s.items():
        own = edges[number]
        costs = builder.allowed_s(f.flows[number], builder.counted_s(f.flows[number], whole_s))
        edges[number] = Edge(own.source, own.target, own.source_class, own.target_class, costs)
    edges += map(builder.residual, range(len(f.all_residuals)))
    nodes = left_to_branch(builder.nodes(), f.branch)
    problem = dataclasses.replace(f.problem, nodes=nodes, edges=tuple(edges))
    return dataclasses.replace(f, overlap=overlap, problem=problem)


def branched(f: Formulation, decision: int, choices: Sequence[int]) -> Formulation:
    """The same problem, in which a decision has only these of its choices; their numbers stay."""
    branch = {**f.branch, decision: tuple(choices)}
    problem = dataclasses.replace(f.problem, nodes=left_to_branch(f.problem.nodes, branch))
    return dataclasses.replace(f, problem=problem, branch=branch)


def whole(f: Formulation) -> Formulation:
    """The problem of which `f` is a branch, at the same prices."""
    if not f.branch:
        return f
    assert f.overlap.weights is not None, "branches are of what can hide"
    return repriced(dataclasses.replace(f, branch={}), f.overlap.weights)


def left_to_branch(nodes: Sequence[Node], branch: Mapping[int, tuple[int, ...]]) -> tuple[Node, ...]:
    """`nodes`, with an infinite cost for all choices that the branch has cut."""
    left = list(nodes)
    for decision, choices in branch.items():
        costs = np.full(len(left[decision].costs), math.inf)
        costs[list(choices)] = left[decision].costs[list(choices)]
        left[decision] = dataclasses.replace(left[decision], costs=costs)
    return tuple(left)
