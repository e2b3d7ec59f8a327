"""The time of every move between two lists of layouts at once.

The path of a move (`reshard.py`) does not ask how large the tensor is, nor which of its dimensions are which, as long
as every layout on the way divides it; and the time of each of its collectives is a constant plus a time per byte. So a
move is priced once for each pattern of dimensions, and any tensor's price follows from two numbers. Where some layout
on the way might not divide the tensor, its own path is priced.
"""

import math
from collections.abc import Sequence

import numpy as np

from autoshard.cluster import LogicalMesh
from autoshard.cost.reshard import reshard, total_s
from autoshard.graph.layout import WHOLE, Layout

_PROBE_BYTES = 1e9
"""Any size: prices are linear in it."""


class MovePrices:
    """Prices of moves on one mesh; patterns already seen are remembered."""

    def __init__(self, mesh: LogicalMesh) -> None:
        self.mesh = mesh
        self._prices: dict[tuple[tuple[int, ...], Layout, Layout], tuple[float, float]] = {}
        self._codes: dict[int, tuple[float, float]] = {}
        """By both layouts' entries as digits, where every layout on the way divides the tensor."""

    def seconds(
        self, shape: tuple[int, ...], size_bytes: float, sources: Sequence[Layout], targets: Sequence[Layout]
    ) -> np.ndarray:
        """Seconds of the move of a tensor of `shape` and `size_bytes` from each source to each target.

        Returns:
          float64 [sources, targets]; 0 where both are equal. The same as `total_s(reshard(...))`.
        """
        if not sources or not targets:
            return np.zeros((len(sources), len(targets)))
        axes = len(self.mesh.shape)
        before = np.array(sources, np.int64).reshape(len(sources), axes)
        after = np.array(targets, np.int64).reshape(len(targets), axes)
        base = len(shape) + 1
        weights = base ** np.arange(axes)
        codes = ((before + 1) @ weights)[:, None] * base**axes + ((after + 1) @ weights)[None, :]
        regular = self._is_regular(shape, before, after)
        unique, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
        prices = np.empty((len(unique), 2))
        for k, (code, at) in enumerate(zip((unique * 64 + base).tolist(), first.tolist(), strict=True)):
            price = self._codes.get(code)
            if price is None:
                source, target = sources[at // len(targets)], targets[at % len(targets)]
                price = self._codes[code] = self._of_pattern(source, target)
            prices[k] = price
        table = prices[inverse.ravel()]
        result = (table[:, 0] + size_bytes * table[:, 1]).reshape(codes.shape)
        for s, t in np.argwhere(~regular).tolist():
            fixed_s, per_byte_s = self._of_shape(shape, sources[s], targets[t])
            result[s, t] = fixed_s + size_bytes * per_byte_s
        return result

    def _is_regular(self, shape: tuple[int, ...], before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """bool [sources, targets]: whether every layout on the way surely divides the tensor."""
        regular = np.ones((len(before), len(after)), bool)
        for dim, extent in enumerate(shape):
            product = np.ones(regular.shape, np.int64)
            for axis, size in enumerate(self.mesh.shape):
                on = (before[:, None, axis] == dim) | (after[None, :, axis] == dim)
                product = np.where(on, product * size, product)
            regular &= extent % product == 0
        return regular

    def _of_pattern(self, source: Layout, target: Layout) -> tuple[float, float]:
        before, after, dims = _renamed(source, target)
        return self._of_extents((math.prod(self.mesh.shape),) * len(dims), before, after)

    def _of_shape(self, shape: tuple[int, ...], source: Layout, target: Layout) -> tuple[float, float]:
        """Of a dimension only the factors that it shares with the axes on it matter to what divides it."""
        before, after, dims = _renamed(source, target)
        on = [1] * len(dims)
        for size, *places in zip(self.mesh.shape, before, after, strict=True):
            for place in {*places} - {WHOLE}:
                on[place] *= size
        extents = tuple(math.gcd(shape[dim], product) for dim, product in zip(dims, on, strict=True))
        return self._of_extents(extents, before, after)

    def _of_extents(self, extents: tuple[int, ...], source: Layout, target: Layout) -> tuple[float, float]:
        key = extents, source, target
        price = self._prices.get(key)
        if price is None:
            price = self._prices[key] = self._price(*key)
        return price

    def _price(self, shape: tuple[int, ...], source: Layout, target: Layout) -> tuple[float, float]:
        """Seconds of an empty tensor's move, and seconds per byte of the whole tensor."""
        fixed_s = total_s(reshard(shape, 0.0, source, target, self.mesh))
        probe_s = total_s(reshard(shape, _PROBE_BYTES, source, target, self.mesh))
        return fixed_s, (probe_s - fixed_s) / _PROBE_BYTES


def _renamed(source: Layout, target: Layout) -> tuple[Layout, Layout, tuple[int, ...]]:
    """Both layouts with dimensions numbered by first appearance, and which dimension each number stands for."""
    names: dict[int, int] = {WHOLE: WHOLE}
    renamed = tuple(names.setdefault(d, len(names) - 1) for d in (*source, *target))
    return renamed[: len(source)], renamed[len(source) :], tuple(names)[1:]
