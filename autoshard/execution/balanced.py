"""Evaluates a planned program whose devices have unequal shares of its units.

Operations without units run as planned, in the plan's layouts, though in no particular order. Those on units run as
islands, or on all places; see `autoshard/balance/regions.py`. Which unit is where comes as arrays, so that one compiled
program serves all shares.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from autoshard.balance.places import Room
from autoshard.balance.regions import Form, Island, Key, Plain, Stage, Whole
from autoshard.balance.units import UnitDimensions, UnitTensor
from autoshard.execution.apply import Evaluator
from autoshard.execution.island_body import IslandBody
from autoshard.execution.islands import IslandRunner, Reused
from autoshard.execution.leaves import NumberedEquations
from autoshard.execution.placement import Placed, Placement
from autoshard.execution.resized import bind_resized
from autoshard.execution.units import Held, Places, by_places
from autoshard.graph.graph import Graph, dim_of
from autoshard.graph.layout import SpecEntries


@dataclasses.dataclass(frozen=True, slots=True)
class BalancedProgram:
    """A program with unit dimensions, ready to be evaluated.

    Attributes:
      graph: The program. numbered: Its equations by number. evaluator: Runs what has no units.
      dims: Its unit dimensions. rooms: The places of each. stages: The order of evaluation.
      arguments, outputs: The planned layouts of its interface. output_steps: Those that outputs pass through.
      is_slowed: Whether devices may be slowed down.
      is_unbiased: Whether what a device computes counts for the units that it leaves out, too.
    """

    graph: Graph
    numbered: NumberedEquations
    evaluator: Evaluator
    dims: UnitDimensions
    rooms: tuple[Room, ...]
    stages: tuple[Stage, ...]
    arguments: tuple[SpecEntries, ...]
    outputs: tuple[SpecEntries, ...]
    output_steps: tuple[tuple[SpecEntries, ...], ...]
    is_slowed: bool = False
    is_unbiased: bool = False

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.evaluator.mesh

    def unit_arguments(self) -> dict[int, tuple[Room, UnitTensor]]:
        """The arguments that are held by places, by position."""
        of = {t.value: (room, t) for room in self.rooms for t in room.unit.tensors}
        return {n: of[a.value] for n, a in enumerate(self.graph.arguments) if a.value in of}

    @property
    def islands(self) -> IslandRunner:
        """Evaluates its islands."""
        arguments = frozenset(a.value for a in self.graph.arguments)
        body = IslandBody(self.graph, self.numbered, self.mesh, arguments)
        return IslandRunner(body, self.is_slowed, self.is_unbiased)

    def reused(self) -> dict[int, Reused]:
        """The memory that is kept from one step to the next, by the value that is written into it."""
        islands = [stage for stage in self.stages if isinstance(stage, Island)]
        own = [self.islands.reused(island, self.rooms[island.unit]) for island in islands]
        return {key: reused for found in own for key, reused in found.items()}

    def __call__(
        self, flat: Sequence[Any], held: Sequence[Held], memory: Mapping[int, Any]
    ) -> tuple[list[Any], dict[int, Any]]:
        """The outputs for flat arguments, those of `unit_arguments` by places, and the memory for the next step.

        Args:
          flat: The arguments. held: Of each unit dimension, what is where.
          memory: Arrays as `reused` tells, which are overwritten.
        """
        run = _Run(self, held, memory)
        run.env.update(
            {a.value: Placed(x, e) for a, x, e in zip(self.graph.arguments, flat, self.arguments, strict=True)}
        )
        old = dict(enumerate(flat))
        for stage in self.stages:
            run.stage(stage)
        return [run.output(n, old) for n in range(len(self.graph.outputs))], run.memory


class _Run:
    """One evaluation: the values made so far."""

    def __init__(self, program: BalancedProgram, held: Sequence[Held], memory: Mapping[int, Any]):
        self.program, self.held, self.memory = program, held, dict(memory)
        self.places = [Places(room, program.mesh) for room in program.rooms]
        self.env: dict[Key, Placed] = {}
        self.by_units: dict[int, Placed] = {}
        self.tensor_of = {t.value: (r.unit.index, t) for r in program.rooms for t in r.unit.tensors}
        self.placement = Placement(program.mesh)
        self.islands = program.islands

    def stage(self, stage: Stage) -> None:
        match stage:
            case Plain():
                self._plain(stage)
            case Island():
                room = self.program.rooms[stage.unit]
                for made, x in self.islands.run(stage, room, self.held[stage.unit], self.read, self.memory):
                    if made.key in self.memory:
                        self.memory[made.key] = x
                    self.env[made.key] = self._stored(x, made.by.sharded.stored[made.slot])
            case Whole():
                self._whole(stage)

    def read(self, key: Key, entries: SpecEntries | None) -> Any:
        """A value in a layout: by places where `key` is by places, otherwise as it is read."""
        if isinstance(key, Form):
            if key not in self.env:
                x = self.in_units(key.value)
                self.env[key] = Placed(
                    self.places[key.unit].enter(x.value, self.held[key.unit], key.dim, key.entries), key.entries
                )
            return self.env[key].value
        if key in self.tensor_of and not self._reads_places(key, entries):
            return self.placement.constrain(self.in_units(key).value, entries)
        return self.placement.constrain(self._value(key).value, entries)

    def _reads_places(self, value: int, entries: SpecEntries | None) -> bool:
        """Whether a value that is held by places is read so: split over the same axis along the same dimension."""
        unit, tensor = self.tensor_of[value]
        return entries is not None and self.program.rooms[unit].unit.axis in entries[tensor.dim]

    def in_units(self, value: int) -> Placed:
        """A value by units."""
        if value not in self.tensor_of:
            return self._value(value)
        if value not in self.by_units:
            unit, tensor = self.tensor_of[value]
            x = self._value(value)
            entries = x.entries or self.program.dims.stored[value]
            whole = tuple(() if d == tensor.dim else own for d, own in enumerate(entries))
            self.by_units[value] = Placed(self.places[unit].leave(x.value, self.held[unit], tensor.dim, entries), whole)
        return self.by_units[value]

    def _value(self, value: int) -> Placed:
        return self.env[value]

    def _known(self, equation: int, slot: int) -> Any:
        return self.program.numbered.known[equation, slot]

    def _stored(self, x: Any, entries: SpecEntries | None) -> Placed:
        return self.placement.place(x, entries)

    def _plain(self, stage: Plain) -> None:
        """An equation without units, as planned."""
        equation = self.program.numbered.equations[stage.equation]
        operands = []
        for slot, value in enumerate(stage.operands):
            if value is None or (stage.equation, slot) in self.program.numbered.known:
                operands.append(Placed(self._known(stage.equation, slot), None))
            else:
                operands.append(self.in_units(value))
        results = self.program.evaluator.alone(equation, stage.equation, operands)
        for value, placed in zip(stage.results, results, strict=True):
            if value is not None:
                self.env[value] = placed

    def _whole(self, stage: Whole) -> None:
        """Operations on all places."""
        for op in stage.ops:
            operation, room, places = op.operation, self.program.rooms[op.unit], self.places[op.unit]
            equation = self.program.numbered.equations[operation.equation]
            operands = []
            for slot, key in enumerate(op.operands):
                if key is None or (operation.equation, slot) in self.program.numbered.known:
                    operands.append(self._known(operation.equation, slot))
                    continue
                x = self.read(key, op.sharded.reads[slot])
                dim = dim_of(op.factor, operation.rule.operands[slot])
                operands.append(
                    places.owned_only(x, self.held[op.unit], dim) if op.contracts and dim is not None else x
                )
            shapes = []
            for v, dims in zip(equation.outvars, operation.rule.results, strict=True):
                shape = tuple(v.aval.shape)  # pyright: ignore[reportAttributeAccessIssue]
                dim = dim_of(op.factor, dims)
                shapes.append(shape if dim is None else by_places(shape, dim, room))
            results = bind_resized(equation, operands, shapes)
            for slot, (key, x) in enumerate(zip(op.results, results, strict=True)):
                if key is not None:
                    entries = key.entries if isinstance(key, Form) else op.sharded.stored[slot]
                    self.env[key] = self._stored(x, entries)

    def output(self, n: int, old: Mapping[int, Any]) -> Any:
        """Output `n` as the function returns it; what succeeds an argument is held as that one is."""
        program = self.program
        output, steps = program.graph.outputs[n], program.output_steps[n]
        before = output.successor_of
        held = None if before is None else self.tensor_of.get(program.graph.arguments[before].value)
        if n in program.numbered.outputs or output.value is None:
            x = program.numbered.outputs[n]
        elif held is None:
            x = self.in_units(output.value).value
        else:
            x = self._value(output.value).value
        if held is None or before is None:
            return self.placement.move(x, steps)
        unit, tensor = held
        if output.value not in self.tensor_of:
            x = self.places[unit].enter(x, self.held[unit], tensor.dim, program.outputs[n])
        return self.places[unit].kept(self.placement.move(x, steps), old[before], self.held[unit], tensor.dim)
