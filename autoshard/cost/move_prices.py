"""The time of every move between two lists of layouts at once.

The path of a move (`reshard.py`) does not ask which of a tensor's dimensions are which, but for whether others are in
front of them and what is gathered along them is to be put in order, nor how large they are but for what the axes on
them divide; and the time of each of its collectives is a constant plus a time per byte. So a move is priced once for
each pattern of dimensions, and any tensor's price follows from two numbers.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autoshard.cluster import LogicalMesh
from autoshard.cost.collectives import Joining, joined_share
from autoshard.cost.reshard import inner_dims, ordered_dims, reshard
from autoshard.graph.layout import WHOLE, Layout

_PROBE_BYTES = 1e9
"""Any size: prices are linear in it."""

_INT64_END = 2**63
"""What an int64 is less than."""


_Moves = tuple[np.ndarray, np.ndarray]
"""Numbers of distinct patterns [n], and for each move which of them it has [moves]."""


class MovePrices:
    """Prices of moves on one mesh; patterns already seen are remembered."""

    def __init__(self, mesh: LogicalMesh) -> None:
        self.mesh = mesh
        self._prices = _Prices()
        self._known: dict[tuple[tuple[int, ...], tuple[Layout, ...], tuple[Layout, ...]], _Moves] = {}

    def seconds(
        self,
        shape: tuple[int, ...],
        size_bytes: float,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        joining: Joining | None = None,
    ) -> np.ndarray:
        """Seconds of the move of a tensor of `shape` and `size_bytes` from each source to each target.

        Args:
          joining: What the compiler joins with each of its collectives (`collectives.joined`); None if nothing.

        Returns:
          float64 [sources, targets]; 0 where both are equal. The same as `total_s(reshard(...))`, of each collective
          `joined` if any are.
        """
        if not sources or not targets:
            return np.zeros((len(sources), len(targets)))
        numbers, which = self._moves(tuple(shape), tuple(sources), tuple(targets))
        seconds = self._prices.seconds(numbers, size_bytes, joining)
        return seconds[which].reshape(len(sources), len(targets))

    def _moves(self, shape: tuple[int, ...], sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> _Moves:
        """The distinct patterns of all moves, by number, and which of them each move has; sources major."""
        known = self._known.get((shape, sources, targets))
        if known is not None:
            return known
        axes = len(self.mesh.shape)
        before = np.array(sources, np.int64).reshape(len(sources), axes)
        after = np.array(targets, np.int64).reshape(len(targets), axes)
        rows = np.repeat(np.arange(len(sources)), len(targets))
        columns = np.tile(np.arange(len(targets)), len(sources))
        moves = np.concatenate([before[rows], after[columns]], axis=1)
        keys, inverse = _distinct(self._patterns(shape, moves))
        found = self._numbers(keys), inverse.astype(np.int32)
        self._known[shape, sources, targets] = found
        return found

    def _patterns(self, shape: tuple[int, ...], moves: np.ndarray) -> np.ndarray:
        """What the price of each move depends on; int64 [n, 8 axes] from [n, 2 axes], the entries of both layouts.

        First the layouts with dimensions numbered by first appearance, then the extents of those dimensions: of an
        extent only what it shares with the product of the axes on it matters to what divides it. Last, of dimensions
        along which something is gathered, whether others are in front of them, and whether that is to be put in order.
        """
        places = moves.shape[1]
        sizes = np.array(self.mesh.shape * 2, np.int64)
        number = np.full(moves.shape, WHOLE)
        extents = np.ones(moves.shape, np.int64)
        inner = np.zeros(moves.shape, np.int64)
        ordered = np.zeros(moves.shape, np.int64)
        is_inner = np.array([*inner_dims(shape), False], np.int64)
        is_ordered = self._ordered(shape, moves[:, places // 2 :])
        count = np.zeros(len(moves), np.int64)
        whole_shape = np.array([*shape, 1], np.int64)
        is_gathered = (moves[:, : places // 2] != WHOLE) & (moves[:, places // 2 :] == WHOLE)
        for place in range(places):
            dim = moves[:, place]
            seen = np.zeros(len(moves), bool)
            for earlier in range(place):
                same = ~seen & (moves[:, earlier] == dim)
                number[same, place] = number[same, earlier]
                seen |= same
            fresh = np.flatnonzero(~seen & (dim != WHOLE))
            number[fresh, place] = count[fresh]
            # each axis counts once, also where it is on the dimension both before and after
            on = moves[fresh] == dim[fresh, None]
            on[:, places // 2 :] &= ~on[:, : places // 2]
            product = np.where(on, sizes, 1).prod(axis=1)
            extents[fresh, count[fresh]] = np.gcd(whole_shape[dim[fresh]], product)
            gathers = (on[:, : places // 2] & is_gathered[fresh]).any(axis=1)
            inner[fresh, count[fresh]] = is_inner[dim[fresh]] & gathers
            ordered[fresh, count[fresh]] = is_ordered[fresh, dim[fresh]] & gathers
            count[fresh] += 1
        return np.concatenate([number, extents, inner, ordered], axis=1)

    def _ordered(self, shape: tuple[int, ...], targets: np.ndarray) -> np.ndarray:
        """`ordered_dims` of each target; int64 [n, dimensions] from [n, axes]."""
        layouts, inverse = _distinct(targets)
        of_layout = [ordered_dims(shape, tuple(layout), self.mesh.shape) for layout in layouts.tolist()]
        return np.array(of_layout, np.int64).reshape(len(layouts), len(shape))[inverse]

    def _numbers(self, keys: np.ndarray) -> np.ndarray:
        """The patterns `keys` [n, 8 axes] among those that are known, priced if they were not; int64 [n]."""
        data, width = keys.tobytes(), keys.itemsize * keys.shape[1]
        names = [data[at : at + width] for at in range(0, len(data), width)]
        new = {name: n for n, name in enumerate(names) if name not in self._prices.number}
        self._prices.add({name: self._priced(keys[n].tolist()) for name, n in new.items()})
        return np.array([self._prices.number[name] for name in names], np.int64)

    def _priced(self, key: list[int]) -> "list[_Price]":
        """The collectives of a pattern."""
        axes = len(self.mesh.shape)
        source, target, extents = tuple(key[:axes]), tuple(key[axes : 2 * axes]), tuple(key[2 * axes : 4 * axes])
        inner, ordered = (tuple(map(bool, key[n * axes : (n + 2) * axes])) for n in (4, 6))
        return [
            _Price(c.fixed_s, c.separate_s, (c.time_s - c.fixed_s) / _PROBE_BYTES, c.buffer_bytes / _PROBE_BYTES)
            for c in reshard(extents, _PROBE_BYTES, source, target, self.mesh, inner, ordered)
        ]


class _Price(NamedTuple):
    """The price of one collective: seconds of an empty one, which of them joining does not save, and for each byte of
    the whole tensor its seconds and the bytes that it handles on each device.
    """

    fixed_s: float
    separate_s: float
    s_per_byte: float
    buffer_share: float


class _Prices:
    """The prices of patterns, in one table.

    Attributes:
      number: Of each pattern, by its name.
    """

    def __init__(self) -> None:
        self.number: dict[bytes, int] = {}
        self._rows = np.zeros((0, len(_Price._fields)))  # of all collectives, those of a pattern side by side
        self._first, self._count = np.zeros(0, np.int64), np.zeros(0, np.int64)  # of a pattern

    def add(self, patterns: Mapping[bytes, Sequence[_Price]]) -> None:
        """Takes the collectives of patterns that are not known."""
        if not patterns:
            return
        self.number |= {name: n for n, name in enumerate(patterns, len(self.number))}
        counts = np.array([len(prices) for prices in patterns.values()], np.int64)
        rows = [price for prices in patterns.values() for price in prices]
        self._first = np.concatenate([self._first, len(self._rows) + np.cumsum(counts) - counts])
        self._count = np.concatenate([self._count, counts])
        self._rows = np.concatenate([self._rows, np.array(rows, np.float64).reshape(-1, self._rows.shape[1])])

    def seconds(self, numbers: np.ndarray, size_bytes: float, joining: Joining | None) -> np.ndarray:
        """float64 [moves]: the time of each for a tensor of `size_bytes`; `numbers`: of their patterns."""
        counts = self._count[numbers]
        moves = np.repeat(np.arange(len(numbers)), counts)
        within = np.arange(len(moves)) - np.repeat(np.cumsum(counts) - counts, counts)
        fixed_s, separate_s, s_per_byte, buffer_share = self._rows[self._first[numbers][moves] + within].T
        if joining is not None:
            share = joined_share(buffer_share * size_bytes, joining)
            fixed_s = separate_s + (fixed_s - separate_s) * share
        each_s = fixed_s + s_per_byte * size_bytes
        return np.bincount(moves, weights=each_s, minlength=len(numbers))


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows, and which of them each row is."""
    numbers, end = np.zeros(len(rows), np.int64), 1
    for column in rows.T:
        width = int(column.max()) + 2
        if end * width > _INT64_END:
            numbers, end = np.unique(numbers, return_inverse=True)[1], len(rows)
        numbers, end = numbers * width + (column + 1), end * width
    _, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
    return rows[first], inverse
