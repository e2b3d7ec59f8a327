"""What each submesh of a split program holds: which arrays, how they lie, and how long they are needed."""

import functools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.errors import MeshError, PlanMismatchError
from autoshard.pipelines.split.mpmd_program import Exchange, MpmdProgram

ArrayKey: TypeAlias = int | Exchange
"""What a submesh holds: a value, or several that are sent together, as one vector."""


class MpmdArrays:
    """The arrays of a split program on the meshes of its submeshes.

    Args:
      program: What runs where.
      meshes: The mesh of each submesh.
      input_shardings, output_shardings: For each flat input and output its sharding, or None; see `MpmdFunction`.
      donated: Flat inputs whose buffers may be reused.

    Raises:
      MeshError, PlanMismatchError: If meshes or shardings do not fit the program.
    """

    def __init__(
        self,
        program: MpmdProgram,
        meshes: Sequence[Mesh],
        input_shardings: Sequence[NamedSharding | None],
        output_shardings: Sequence[NamedSharding | None],
        donated: Collection[int],
    ):
        _check(program, meshes, input_shardings, output_shardings)
        self.program, self.meshes = program, tuple(meshes)
        self.donated = frozenset(v for v in donated if program.inputs[v] is not None)
        self.whole = tuple(NamedSharding(mesh, PartitionSpec()) for mesh in meshes)
        self.exchanges = tuple(x for level in program.levels for x in level.exchanges)
        self.sent = frozenset(v for x in self.exchanges for v in x.values)
        self.received = frozenset((v, submesh) for x in self.exchanges for v in x.values for submesh in x.targets)
        self._bundles = {
            (v, submesh): x for x in self.exchanges if len(x.values) > 1 for v in x.values for submesh in x.targets
        }
        self._inputs = tuple(input_shardings)
        self.results: dict[tuple[int, int], NamedSharding | None] = {}
        """How each submesh holds the values that it must have in the end."""
        for k, value in enumerate(program.outputs):
            for submesh in program.holders(k):
                is_everywhere = program.output_submeshes[k] is None
                self.results.setdefault((value, submesh), self.whole[submesh] if is_everywhere else output_shardings[k])

    def key(self, value: int, submesh: int) -> ArrayKey:
        """What a program on a submesh reads to get a value."""
        return self._bundles.get((value, submesh), value)

    @functools.cached_property
    def last_use(self) -> dict[tuple[ArrayKey, int], int]:
        """The last level in which a submesh reads something; the number of levels if it must have it in the end.

        What is exchanged before a level is read in that level.
        """
        last: dict[tuple[ArrayKey, int], int] = {}
        for number, level in enumerate(self.program.levels):
            last.update(((v, x.source), number) for x in level.exchanges for v in x.values)
            last.update(((self.key(v, one.submesh), one.submesh), number) for one in level.programs for v in one.inputs)
        last.update(dict.fromkeys(self.results, len(self.program.levels)))
        return last

    def sharding(self, key: ArrayKey, submesh: int) -> NamedSharding:
        """How a submesh holds what it is given, gets, sends, or has in the end."""
        if isinstance(key, Exchange):
            return self.whole[submesh]
        if key < len(self.program.inputs) and self.program.inputs[key] in (None, submesh):
            return self._inputs[key] or self.whole[submesh]
        return self.results.get((key, submesh)) or self._like(self.program.avals[key].shape, submesh)

    def _like(self, shape: tuple[int, ...], submesh: int) -> NamedSharding:
        """The sharding of the first input of this shape on a submesh, or else whole."""
        for v, owner in enumerate(self.program.inputs):
            found = self._inputs[v]
            if found is not None and shape and owner == submesh and self.program.avals[v].shape == shape:
                return found
        return self.whole[submesh]

    def struct(
        self, key: ArrayKey, submesh: int, sharding: jax.sharding.Sharding | None = None
    ) -> jax.ShapeDtypeStruct:
        """Shape, type and sharding (`self.sharding` by default) of what a submesh holds."""
        lies = self.sharding(key, submesh) if sharding is None else sharding
        if not isinstance(key, Exchange):
            aval = self.program.avals[key]
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=lies)
        length = sum(math.prod(self.program.avals[v].shape) for v in key.values)
        return jax.ShapeDtypeStruct((length,), self.program.avals[key.values[0]].dtype, sharding=lies)

    def unpacked(self, keys: Sequence[ArrayKey], arrays: Sequence[jax.Array]) -> Iterator[tuple[int, jax.Array]]:
        """The values that are in `arrays`, and their arrays."""
        for key, array in zip(keys, arrays, strict=True):
            if not isinstance(key, Exchange):
                yield key, array
                continue
            start = 0
            for v in key.values:
                shape = self.program.avals[v].shape
                stop = start + math.prod(shape)
                yield v, array[start:stop].reshape(shape)
                start = stop


def _check(
    program: MpmdProgram,
    meshes: Sequence[Mesh],
    inputs: Sequence[NamedSharding | None],
    outputs: Sequence[NamedSharding | None],
) -> None:
    if len(meshes) != program.num_submeshes:
        raise MeshError(
            f"Every submesh needs a mesh: the program has {program.num_submeshes} submeshes, but {len(meshes)} meshes "
            "are given. Pass one for each submesh, in order."
        )
    for what, given, submeshes in (("input", inputs, program.inputs), ("output", outputs, program.output_submeshes)):
        if len(given) != len(submeshes):
            raise PlanMismatchError(
                f"Every flat {what} needs a sharding or None: the program has {len(submeshes)}, but {len(given)} are "
                "given. Flatten the tree of shardings with None as a leaf."
            )
        for k, (sharding, submesh) in enumerate(zip(given, submeshes, strict=True)):
            if sharding is not None and (submesh is None or sharding.mesh != meshes[submesh]):
                where = "every submesh, whole" if submesh is None else f"submesh {submesh}, {meshes[submesh]}"
                raise PlanMismatchError(
                    f"A sharding must be on the mesh of its submesh: {what} {k} is on {where}, but its sharding is "
                    f"{sharding}. Pass a sharding on that mesh, or None."
                )
