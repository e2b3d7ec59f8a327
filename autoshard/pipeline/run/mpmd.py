"""Runs a program that is split by place: one compiled program for each place and level, on the place's own mesh.

A process walks through all levels and exchanges in order, also those of places that have none of its devices: their
programs it skips, and their arrays it stands for by shapes. So all processes meet in every exchange.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding

from autoshard.errors import PlanMismatchError
from autoshard.pipeline.run.place_arrays import Holdings, Key
from autoshard.pipeline.run.place_program import Compiled, compile_all
from autoshard.pipeline.split.mpmd import PlacedProgram

Array: TypeAlias = jax.Array | jax.ShapeDtypeStruct
"""An array, or what stands for it in a process that has none of its devices."""
Send: TypeAlias = Callable[[Array, NamedSharding, int], Array]
"""(array, where to, number of the transfer within a run) -> the array there."""
_Arrays: TypeAlias = dict[tuple[Key, int], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Copies:
    """A value that every place has: its array on each, by place."""

    arrays: tuple[Array, ...]


def send_by_jax(array: Array, target: NamedSharding, number: int) -> Array:
    """Sends an array within one process, or between processes where `jax.device_put` can."""
    return jax.device_put(array, target)


class PlacedFunction:
    """A program over several places. Call it with flat arrays.

    Args:
      program: What runs where.
      meshes: The mesh of each place.
      input_shardings: For each flat input its sharding, on the mesh of its place; None: whole on every device.
      output_shardings: Likewise for the flat outputs. One that succeeds an input should have that one's sharding. For
        None: that of the first input of the same shape on the same place, or else whole on every device; always whole
        where every place has it.
      donated: Flat inputs, by position, whose buffers may be reused or freed. Values that every place has are not.
      send: Moves an array to another place, see `Send`; in every process it is called for the same transfers in the
        same order.
      local_places: The places whose programs run in this process; by default those with devices of it.

    Raises:
      MeshError, PlanMismatchError: If meshes or shardings do not fit the program.
    """

    def __init__(
        self,
        program: PlacedProgram,
        meshes: Sequence[Mesh],
        input_shardings: Sequence[NamedSharding | None],
        output_shardings: Sequence[NamedSharding | None] | None = None,
        donated: Collection[int] = (),
        send: Send = send_by_jax,
        local_places: Collection[int] | None = None,
    ):
        self._ends = tuple(output_shardings or [None] * len(program.outputs))
        self.program, self._send = program, send
        self._holdings = Holdings(program, meshes, input_shardings, self._ends, donated)
        self.local_places = frozenset(_local(meshes) if local_places is None else local_places)

    @functools.cached_property
    def programs(self) -> tuple[Compiled, ...]:
        """The compiled programs of this process's places, in the order in which they run."""
        return tuple(compile_all(self._holdings, self.local_places))

    def __call__(self, *inputs: Array | Copies | Any) -> list[Array | Copies]:
        """Runs the program.

        Args:
          inputs: The flat inputs in their shardings; `Copies` or a plain number for one that every place has. What lies
            on places of other processes may be anything.

        Returns:
          The flat outputs: `Copies` for one that every place has.
        """
        arrays = self._inputs(inputs)
        programs = collections.defaultdict(list)
        for one in self.programs:
            programs[one.level].append(one)
        number = 0
        for level, content in enumerate(self.program.levels):
            for exchange in content.exchanges:
                key = exchange if len(exchange.values) > 1 else exchange.values[0]
                for target in exchange.targets:
                    held = self._read(arrays, key, exchange.source)
                    there = self._send(held, self._holdings.sharding(key, target), number)
                    if target in self.local_places:
                        arrays[key, target] = there
                    number += 1
            for one in programs[level]:
                results = one.compiled(*(arrays[key, one.place] for key in one.inputs))
                arrays.update(((key, one.place), x) for key, x in zip(one.outputs, results, strict=True))
                self._release(arrays, one)
        return [self._output(arrays, k) for k in range(len(self.program.outputs))]

    def _inputs(self, inputs: Sequence[Any]) -> _Arrays:
        if len(inputs) != len(self.program.inputs):
            raise PlanMismatchError(
                f"The program has {len(self.program.inputs)} flat inputs, but {len(inputs)} are given. Pass "
                "jax.tree.leaves of the arguments that it was traced with, with `Copies` as leaves."
            )
        arrays: _Arrays = {}
        for v, (x, home) in enumerate(zip(inputs, self.program.inputs, strict=True)):
            if home is not None:
                arrays[v, home] = x
                continue
            for place in self.local_places:
                if isinstance(x, Copies):
                    arrays[v, place] = x.arrays[place]
                elif (v, place) in self._holdings.last_use:
                    arrays[v, place] = jax.device_put(x, self._holdings.sharding(v, place))
        return arrays

    def _read(self, arrays: _Arrays, key: Key, place: int) -> Array:
        """What a place holds; what stands for it if that is not in this process."""
        return arrays[key, place] if place in self.local_places else self._holdings.struct(key, place)

    def _release(self, arrays: _Arrays, one: Compiled) -> None:
        """Forgets what a place reads no more, and frees what was donated but not reused."""
        for slot, key in enumerate(one.inputs):
            if self._holdings.last_use[key, one.place] != one.level:
                continue
            array = arrays.pop((key, one.place))
            is_free = key in self._holdings.donated and key not in self._holdings.sent
            if is_free and slot not in one.donated:
                array.delete()

    def _output(self, arrays: _Arrays, k: int) -> Array | Copies:
        value, end = self.program.outputs[k], self._ends[k]
        held = [self._read(arrays, value, place) for place in self.program.holders(k)]
        if self.program.output_places[k] is None:
            return Copies(tuple(held))
        (array,) = held
        if end is None or array.sharding == end or array.sharding.is_equivalent_to(end, len(array.shape)):
            return array
        if isinstance(array, jax.Array):  # an input that is returned as it is
            return jax.device_put(array, end)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=end)


def _local(meshes: Sequence[Mesh]) -> list[int]:
    """The places with devices of this process."""
    here = jax.process_index()
    return [p for p, mesh in enumerate(meshes) if any(d.process_index == here for d in mesh.devices.flat)]
