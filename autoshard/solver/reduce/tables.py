"""Algebra of factor tables: classes merged, parallel tables joined, labels minimised out. Results are remembered by the
identity of the interned arrays."""

import numpy as np

from autoshard.solver.reduce.network import Demand, Factor, InternPool, Network

JOINT_ENTRIES = 4096
"""Parallel factors are merged, and nodes eliminated, freely while the new table has at most this many entries."""


def tidied(pool: InternPool, factor: Factor) -> tuple:
    """Classes that no label has dropped, equal ones merged, and minima of rows and columns moved out (rule 3).

    Returns:
      (class maps, table and amounts of the new factor, and what the labels of i and of j cost more, None for nothing).
    """
    layers = [factor.table, *(demand.amounts for demand in factor.demands)]
    map_i, layers = _compact(factor.map_i, layers, axis=0)
    map_j, layers = _compact(factor.map_j, layers, axis=1)
    table = layers[0].copy()
    shift_i = shift_j = None
    row = table.min(axis=1)
    row[~np.isfinite(row)] = 0.0
    if row.any():
        table -= row[:, None]
        shift_i = row[map_i]
    column = table.min(axis=0)
    column[~np.isfinite(column)] = 0.0
    if column.any():
        table -= column[None, :]
        shift_j = column[map_j]
    layers[0] = table
    map_i, layers = _merge_equal(map_i, layers, axis=0)
    map_j, layers = _merge_equal(map_j, layers, axis=1)
    table, *amounts = [pool.intern(np.ascontiguousarray(layer)) for layer in layers]
    return (pool.intern(map_i, np.int64), pool.intern(map_j, np.int64), table, amounts, shift_i, shift_j)


def joined(network: Network, first: Factor, second: Factor) -> Factor | None:
    """One factor over joint classes for two parallel ones (rule 4); None where it would be too large."""
    memo = (
        "joint",
        id(first.map_i),
        id(first.map_j),
        id(first.table),
        id(second.map_i),
        id(second.map_j),
        id(second.table),
    )
    if memo not in network.memo:
        network.memo[memo] = _joint(network.pool, first, second)
    found = network.memo[memo]
    if found is None:
        return None
    map_i, map_j, table, (i1, j1, i2, j2) = found
    demands = [Demand(r.start, r.stop, network.pool.intern(r.amounts[np.ix_(i1, j1)])) for r in first.demands]
    demands += [Demand(r.start, r.stop, network.pool.intern(r.amounts[np.ix_(i2, j2)])) for r in second.demands]
    return Factor(first.i, first.j, map_i, map_j, table, demands, first.copy_pairs)


def _joint(pool: InternPool, first: Factor, second: Factor) -> tuple | None:
    pair_i, map_i = np.unique(first.map_i * second.table.shape[0] + second.map_i, return_inverse=True)
    pair_j, map_j = np.unique(first.map_j * second.table.shape[1] + second.map_j, return_inverse=True)
    if len(pair_i) * len(pair_j) > max(JOINT_ENTRIES, 2 * (first.table.size + second.table.size)):
        return None
    i1, i2 = np.divmod(pair_i, second.table.shape[0])
    j1, j2 = np.divmod(pair_j, second.table.shape[1])
    table = first.table[np.ix_(i1, j1)] + second.table[np.ix_(i2, j2)]
    intern = pool.intern
    return intern(map_i, np.int64), intern(map_j, np.int64), intern(table), (i1, j1, i2, j2)


def minimised(network: Network, unary: np.ndarray, sides: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """min over labels x of unary[x] + the tables' rows of x; axes: the columns of each table."""
    memo = ("minimised", id(unary), *(id(part) for side in sides for part in side))
    if memo in network.memo:
        return network.memo[memo]
    if not sides:
        return unary.min()
    if len(sides) == 1:
        ((table, own),) = sides
        result = (unary[:, None] + table[own]).min(axis=0)
    else:
        (left, own_left), (right, own_right) = sides
        result = np.full((left.shape[1], right.shape[1]), np.inf)
        for label in range(len(unary)):
            row = unary[label] + left[own_left[label]][:, None] + right[own_right[label]][None, :]
            np.minimum(result, row, out=result)
    network.memo[memo] = network.pool.intern(result)
    return network.memo[memo]


def _compact(classes: np.ndarray, layers: list[np.ndarray], axis: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Drops classes that no label has."""
    is_present = np.bincount(classes, minlength=layers[0].shape[axis]) > 0
    if is_present.all():
        return classes, layers
    renamed = np.cumsum(is_present) - 1
    return renamed[classes], [np.compress(is_present, layer, axis=axis) for layer in layers]


def _merge_equal(classes: np.ndarray, layers: list[np.ndarray], axis: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Makes one class of classes with equal lines in all layers."""
    contents = zip(*(_line_bytes(layer if axis == 0 else layer.T) for layer in layers), strict=True)
    first: dict[tuple[bytes, ...], int] = {}
    kept: list[int] = []
    renaming: list[int] = []
    for line, content in enumerate(contents):
        if content not in first:
            first[content] = len(kept)
            kept.append(line)
        renaming.append(first[content])
    if len(kept) == len(renaming):
        return classes, layers
    return np.array(renaming)[classes], [np.take(layer, kept, axis=axis) for layer in layers]


def _line_bytes(layer: np.ndarray) -> list[bytes]:
    """The bytes of each row; of equal numbers they are equal, 0.0 and -0.0 among them."""
    content, step = (layer + 0.0).tobytes(), layer.shape[1] * layer.itemsize
    return [content[line * step : (line + 1) * step] for line in range(len(layer))]
