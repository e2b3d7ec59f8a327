"""Steps from one logical mesh to others: a prime factor of the size of one axis moves to another axis.

A mesh without one of the axes has it with size 1, in front of the last: `data=128, tensor=8` is 128 x 1 x 8, one step
from 64 x 2 x 8. Of meshes that are the same up to the names of their axes one is listed (`Slice.logical_meshes`); where
the one a step leads to is not, those take its place of which two axes side by side have changed places. Where devices
of a mesh are in an order of their own, sizes are taken from the largest down, since such meshes are told apart by their
sizes alone (`placement/candidates.py`).
"""

import math
from collections.abc import Iterator, Sequence

from autoshard.cluster import LogicalMesh

Step = tuple[int, int]
"""From which axis a factor moves to which."""


class MeshSteps:
    """Which of some meshes, all of as many axes, lie a step from another.

    Args:
      meshes: The meshes.
    """

    def __init__(self, meshes: Sequence[LogicalMesh]) -> None:
        self._num_axes = len(meshes[0].shape) if meshes else 0
        self._is_in_order = any(m.shape != _descending(m.shape) for m in meshes)
        self._by_sizes: dict[tuple[int, ...], list[LogicalMesh]] = {}
        for mesh in meshes:
            self._by_sizes.setdefault(mesh.shape, []).append(mesh)

    def of(self, mesh: LogicalMesh, like: Step | None = None) -> Iterator[tuple[Step, LogicalMesh]]:
        """The meshes a step from `mesh`, which may have fewer axes; those of a step `like` that come first."""
        missing = self._num_axes - len(mesh.shape)
        if missing < 0:
            return
        sizes = (*mesh.shape[:-1], *(1,) * missing, mesh.shape[-1])
        axes = range(self._num_axes)
        steps = [(i, j) for j in axes for i in axes if i != j]
        for i, j in sorted(steps, key=lambda step: step != like):
            if sizes[i] == 1:
                continue
            factor = _least_prime(sizes[i])
            moved = list(sizes)
            moved[i], moved[j] = moved[i] // factor, moved[j] * factor
            for other in self._with_sizes(tuple(moved) if self._is_in_order else _descending(moved)):
                yield (i, j), other

    def _with_sizes(self, sizes: tuple[int, ...]) -> list[LogicalMesh]:
        found = self._by_sizes.get(sizes, [])
        if found or not self._is_in_order:
            return found
        swapped = {(*sizes[:k], sizes[k + 1], sizes[k], *sizes[k + 2 :]) for k in range(len(sizes) - 1)}
        return [mesh for other in sorted(swapped) for mesh in self._by_sizes.get(other, ())]


def _descending(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(sizes, reverse=True))


def _least_prime(number: int) -> int:
    return next((p for p in range(2, math.isqrt(number) + 1) if number % p == 0), number)
