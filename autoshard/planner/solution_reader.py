"""What a solution says of each value, group and flow."""

import math
from collections.abc import Sequence

from autoshard.compiler.solved import Move, SolvedProgram
from autoshard.cost.collectives import Collective
from autoshard.cost.reshard import path, reshard, waypoints
from autoshard.graph.graph import Dims
from autoshard.graph.layout import Layout, SpecEntries, spec_entries
from autoshard.planner.allowed import ArgumentDecision, ResidualDecision
from autoshard.planner.build import Flow, Formulation
from autoshard.planner.choices import Choice


class SolutionReader:
    """Looks up what a solution says of each value, flow and group; what equal layers ask for is worked out once."""

    def __init__(self, f: Formulation, picks: Sequence[int]):
        self.f, self.graph = f, f.program.graph
        self.rows = [d.rows[k] for d, k in zip(f.decisions, picks, strict=True)]
        self.first = len(self.graph.arguments)
        self.layout: dict[int, Layout] = {}
        for i, a in enumerate(self.graph.arguments):
            self.layout[a.value] = f.argument_layouts[i][self.rows[i]]
        for group, table in zip(f.program.groups, f.tables, strict=True):
            row = self.rows[self.first + group.index]
            for access, column in zip(group.writes, table.writes, strict=True):
                self.layout[access.value] = column[row]
        decided = ((i, d, row) for i, (d, row) in enumerate(zip(f.decisions, self.rows, strict=True)))
        self.in_host = frozenset(i for i, d, row in decided if isinstance(d, ArgumentDecision) and d.is_in_host(row))
        self.away = frozenset(
            d.residual for d, row in zip(f.decisions, self.rows, strict=True) if isinstance(d, ResidualDecision) and row
        )
        self._entries: dict[tuple[int, Layout], SpecEntries] = {}
        self._paths: dict[tuple, tuple[SpecEntries, ...]] = {}
        self._moves: dict[tuple, tuple[Collective, ...]] = {}

    def choice(self, group: int) -> Choice:
        return self.f.tables[group].choices[self.rows[self.first + group]]

    def read_layout(self, group: int, dims: Dims) -> Layout:
        """The layout in which a group reads a tensor whose dimensions are `dims` over its factors."""
        table = self.f.program.shapes[group].table
        return self.choice(group).layout_of(dims, None if table is None else table.look_up)

    def target(self, flow: Flow) -> Layout:
        if flow.read is None:
            return self.layout[self.graph.arguments[flow.target].value]
        return self.f.tables[flow.target - self.first].reads[flow.read][self.rows[flow.target]]

    def entries(self, value: int, layout: Layout) -> SpecEntries:
        """The layout of a value as axis names for each dimension."""
        key = len(self.graph.values[value].shape), layout
        if key not in self._entries:
            self._entries[key] = spec_entries(layout, key[0], self.f.mesh.axis_names)
        return self._entries[key]

    def steps(self, value: int, target: Layout) -> tuple[SpecEntries, ...]:
        """The layouts that a value passes through on the way to `target`, the last one included."""
        key = shape, _, _ = self.graph.values[value].shape, self.layout[value], target
        if key not in self._paths:
            names, sizes = self.f.mesh.axis_names, self.f.mesh.shape
            way = [w for step in path(*key, sizes) for w in waypoints(step, len(shape), sizes)]
            named = [tuple(tuple(names[a] for a in axes) for axes in w) for w in way]
            if named:
                named[-1] = self.entries(value, target)  # as the plan writes it, axes of one device included
            self._paths[key] = tuple(named)
        return self._paths[key]

    def collectives(self, flow: Flow, target: Layout) -> tuple[Collective, ...]:
        """The collectives that turn a flow's value into `target`."""
        shape, source = self.graph.values[flow.value].shape, self.layout[flow.value]
        key = shape, flow.itemsize_bytes, source, target
        if key not in self._moves:
            size_bytes = float(math.prod(shape) * flow.itemsize_bytes)
            self._moves[key] = reshard(shape, size_bytes, source, target, self.f.mesh)
        return self._moves[key]

    def solved(self) -> SolvedProgram:
        """The program as the compiler is given it: its layouts, and the collectives of every group and flow."""
        f = self.f
        sums = [t.collectives[self.rows[self.first + g.index]] for g, t in zip(f.program.groups, f.tables, strict=True)]
        return SolvedProgram(
            analysis=f.program.analysis,
            mesh=f.mesh,
            layouts=self.layout,
            sums=tuple(sums),
            moves=tuple([self._move(flow) for flow in f.flows]),
        )

    def _move(self, flow: Flow) -> Move:
        target = self.target(flow)
        return Move(
            value=flow.value,
            group=None if flow.read is None else flow.target - self.first,
            read=flow.read,
            itemsize_bytes=flow.itemsize_bytes,
            trips=flow.trips,
            target=target,
            collectives=self.collectives(flow, target),
        )
