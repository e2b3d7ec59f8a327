"""Runs a program that is split by submesh: one compiled program for each submesh and level, on the submesh's own mesh.

A process walks through all levels and exchanges in order, also those of submeshes that have none of its devices: their
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
from autoshard.pipelines.run.mpmd_arrays import ArrayKey, MpmdArrays
from autoshard.pipelines.run.mpmd_compile import CompiledProgram, compile_programs
from autoshard.pipelines.split.mpmd_program import MpmdProgram

Array: TypeAlias = jax.Array | jax.ShapeDtypeStruct
"""An array, or what stands for it in a process that has none of its devices."""
Send: TypeAlias = Callable[[Array, NamedSharding, int], Array]
"""(array, where to, number of the transfer within a run) -> the array there."""
_Arrays: TypeAlias = dict[tuple[ArrayKey, int], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Replicated:
    """A value that every submesh has: its array on each, by submesh."""

    arrays: tuple[Array, ...]


def send_by_jax(array: Array, target: NamedSharding, number: int) -> Array:
    """Sends an array within one process, or between processes where `jax.device_put` can."""
    return jax.device_put(array, target)


class MpmdFunction:
    """A program over several submeshes. Call it with flat arrays.

    Args:
      program: What runs where.
      meshes: The mesh of each submesh.
      input_shardings: For each flat input its sharding, on the mesh of its submesh; None: whole on every device.
      output_shardings: Likewise for the flat outputs. One that succeeds an input should have that one's sharding. For
        None: that of the first input of the same shape on the same submesh, or else whole on every device; always whole
        where every submesh has it.
      donated: Flat inputs, by position, whose buffers may be reused or freed. Values that every submesh has are not.
      send: Moves an array to another submesh, see `Send`; in every process it is called for the same transfers in the
        same order.
      local_submeshes: The submeshes whose programs run in this process; by default those with devices of it.

    Raises:
      MeshError, PlanMismatchError: If meshes or shardings do not fit the program.
    """

    def __init__(
        self,
        program: MpmdProgram,
        meshes: Sequence[Mesh],
        input_shardings: Sequence[NamedSharding | None],
        output_shardings: Sequence[NamedSharding | None] | None = None,
        donated: Collection[int] = (),
        send: Send = send_by_jax,
        local_submeshes: Collection[int] | None = None,
    ):
        self._ends = tuple(output_shardings or [None] * len(program.outputs))
        self.program, self._send = program, send
        self._layout = MpmdArrays(program, meshes, input_shardings, self._ends, donated)
        self.local_submeshes = frozenset(_local(meshes) if local_submeshes is None else local_submeshes)

    @functools.cached_property
    def programs(self) -> tuple[CompiledProgram, ...]:
        """The compiled programs of this process's submeshes, in the order in which they run."""
        return tuple(compile_programs(self._layout, self.local_submeshes))

    def __call__(self, *inputs: Array | Replicated | Any) -> list[Array | Replicated]:
        """Runs the program.

        Args:
          inputs: The flat inputs in their shardings; `Replicated` or a plain number for one that every submesh has.
            What lies on submeshes of other processes may be anything.

        Returns:
          The flat outputs: `Replicated` for one that every submesh has.
        """
        arrays = self._inputs(inputs)
        programs = collections.defaultdict(list)
        for one in self.programs:
            programs[one.level].append(one)
        number = 0
        for level, content in enumerate(self.program.levels):
            for exchange in content.exchanges:
                first, *others = exchange.values
                key = exchange if others else first
                for target in exchange.targets:
                    held = self._read(arrays, key, exchange.source)
                    there = self._send(held, self._layout.sharding(key, target), number)
                    if target in self.local_submeshes:
                        arrays[key, target] = there
                    number += 1
            for one in programs[level]:
                results = one.compiled(*(arrays[key, one.submesh] for key in one.inputs))
                arrays.update(((key, one.submesh), x) for key, x in zip(one.outputs, results, strict=True))
                self._release(arrays, one)
        return [self._output(arrays, k) for k in range(len(self.program.outputs))]

    def _inputs(self, inputs: Sequence[Any]) -> _Arrays:
        if len(inputs) != len(self.program.inputs):
            raise PlanMismatchError(
                f"The program has {len(self.program.inputs)} flat inputs, but {len(inputs)} are given. Pass "
                "jax.tree.leaves of the arguments that it was traced with, with `Replicated` as leaves."
            )
        arrays: _Arrays = {}
        for v, (x, owner) in enumerate(zip(inputs, self.program.inputs, strict=True)):
            if owner is not None:
                arrays[v, owner] = x
                continue
            for submesh in self.local_submeshes:
                if isinstance(x, Replicated):
                    arrays[v, submesh] = x.arrays[submesh]
                elif (v, submesh) in self._layout.last_use:
                    arrays[v, submesh] = jax.device_put(x, self._layout.sharding(v, submesh))
        return arrays

    def _read(self, arrays: _Arrays, key: ArrayKey, submesh: int) -> Array:
        """What a submesh holds; what stands for it if that is not in this process."""
        return arrays[key, submesh] if submesh in self.local_submeshes else self._layout.struct(key, submesh)

    def _release(self, arrays: _Arrays, one: CompiledProgram) -> None:
        """Forgets what a submesh reads no more, and frees what was donated but not reused."""
        for slot, key in enumerate(one.inputs):
            if self._layout.last_use[key, one.submesh] != one.level:
                continue
            array = arrays.pop((key, one.submesh))
            is_free = key in self._layout.donated and key not in self._layout.sent
            if is_free and slot not in one.donated:
                array.delete()

    def _output(self, arrays: _Arrays, k: int) -> Array | Replicated:
        value, end = self.program.outputs[k], self._ends[k]
        held = [self._read(arrays, value, submesh) for submesh in self.program.holders(k)]
        if self.program.output_submeshes[k] is None:
            return Replicated(tuple(held))
        (array,) = held
        if end is None or array.sharding == end or array.sharding.is_equivalent_to(end, len(array.shape)):
            return array
        if isinstance(array, jax.Array):  # an input that is returned as it is
            return jax.device_put(array, end)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=end)


def _local(meshes: Sequence[Mesh]) -> list[int]:
    """The submeshes with devices of this process."""
    here = jax.process_index()
    return [p for p, mesh in enumerate(meshes) if any(d.process_index == here for d in mesh.devices.flat)]
