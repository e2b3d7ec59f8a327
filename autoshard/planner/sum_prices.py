"""The collectives that sum partial results on one mesh, with their launches: each is priced once."""

import dataclasses
from collections.abc import Sequence

from autoshard.cluster import CollectiveKind, LogicalMesh, MeshAxis
from autoshard.cost.collectives import Collective, all_reduce, changed, launched, ordered, permute, reduce_scatter


class SumPrices:
    """Prices of sums, and of the permutations that put their pieces in order; see `cost/collectives.py`.

    Of all, `axes` are indices of mesh axes. `pace` is told where a sum sends so many bytes in a second, whatever its
    links do.
    """

    def __init__(self, mesh: LogicalMesh) -> None:
        self._mesh = mesh
        self._known: dict[tuple, Collective] = {}

    def all_reduce(self, axes: Sequence[int], partial_bytes: float, pace: float | None) -> Collective:
        """The whole sum on every device."""
        key = CollectiveKind.ALL_REDUCE, tuple(axes), partial_bytes, pace
        return self._known.get(key) or self._launched(key, all_reduce(self._of(axes), partial_bytes), pace)

    def reduce_scatter(
        self, axes: Sequence[int], partial_bytes: float, is_inner: bool, is_in_order: bool, pace: float | None
    ) -> Collective:
        """A piece of the sum on each device; `is_in_order` where no kernel has to put it in order first."""
        key = CollectiveKind.REDUCE_SCATTER, tuple(axes), partial_bytes, is_inner, is_in_order, pace
        if known := self._known.get(key):
            return known
        scatter = reduce_scatter(self._of(axes), partial_bytes, is_inner)
        return self._launched(key, scatter if is_in_order else ordered(scatter, self._mesh.device_type), pace)

    def permute(self, axes: Sequence[int], local_bytes: float, pace: float | None) -> Collective:
        """Pieces that change places."""
        key = CollectiveKind.PERMUTE, tuple(axes), local_bytes, pace
        return self._known.get(key) or self._launched(key, permute(self._of(axes), local_bytes), pace)

    def _of(self, axes: Sequence[int]) -> list[MeshAxis]:
        return [self._mesh.axes[a] for a in axes]

    def _launched(self, key: tuple, own: Collective, pace: float | None) -> Collective:
        if pace is not None:
            at_pace = lambda c: dataclasses.replace(c, time_s=c.fixed_s + c.wire_bytes / pace, separate_s=0.0)
            own = changed(own, at_pace)
        return self._known.setdefault(key, launched(own, self._mesh.device_type))
