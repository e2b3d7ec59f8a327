"""A problem as a handful of arrays, every distinct table once: what is stored in a file, and what is hashed."""

import dataclasses
import hashlib
import struct

import numpy as np

from autoshard.solver.array_numbers import ArrayNumbers
from autoshard.solver.problem import Edge, EdgeUsage, Node, Problem, Usage

VECTOR = -1
"""In place of the number of columns of a table: it has one axis only."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A problem without names.

    Attributes:
      capacity: As in `Problem`.
      values: float64; all distinct tables one after the other, row-major. Table k begins at value_start[k] (int64, one
        more entry than tables) and has the shape value_shape[k] (int32 [tables, 2]: rows, columns or `VECTOR`).
      classes: int32; all distinct class maps. Map k begins at class_start[k] (int64, one more entry than maps).
      nodes: int32 [n]; the table of each node's costs.
      edges: int32 [m, 5]; source, target, class map of the source, of the target, table of costs.
      usages: int64 [u, 4]; node, start, stop, table of amounts.
      edge_usages: int64 [v, 4]; edge, start, stop, table of amounts.
    """

    capacity: float | None
    values: np.ndarray
    value_start: np.ndarray
    value_shape: np.ndarray
    classes: np.ndarray
    class_start: np.ndarray
    nodes: np.ndarray
    edges: np.ndarray
    usages: np.ndarray
    edge_usages: np.ndarray


def pack(problem: Problem) -> Packed:
    """Packs `problem`; equal problems give equal arrays, whether or not they share tables, whatever their names."""
    tables, maps = ArrayNumbers(np.float64), ArrayNumbers(np.int32)
    edges = problem.edges
    nodes = [tables.of(node.costs) for node in problem.nodes]
    edge_rows = [
        [edge.source for edge in edges],
        [edge.target for edge in edges],
        [maps.of(edge.source_class) for edge in edges],
        [maps.of(edge.target_class) for edge in edges],
        [tables.of(edge.costs) for edge in edges],
    ]
    usages, edge_usages = problem.usages, problem.edge_usages
    amounts = [tables.of(usage.amounts) for usage in usages]
    edge_amounts = [tables.of(usage.amounts) for usage in edge_usages]
    usage_rows = [(u.node, u.start, u.stop, k) for u, k in zip(usages, amounts, strict=True)]
    edge_usage_rows = [(u.edge, u.start, u.stop, k) for u, k in zip(edge_usages, edge_amounts, strict=True)]
    values, value_start = tables.joined()
    classes, class_start = maps.joined()
    shapes = [(*shape, VECTOR)[:2] for shape in tables.shapes]
    return Packed(
        None if problem.capacity is None else float(problem.capacity),
        values,
        value_start,
        np.array(shapes, np.int32).reshape(-1, 2),
        classes,
        class_start,
        np.array(nodes, np.int32),
        np.array(edge_rows, np.int32).T.copy(),
        np.array(usage_rows, np.int64).reshape(-1, 4),
        np.array(edge_usage_rows, np.int64).reshape(-1, 4),
    )


def unpack(packed: Packed, names: list[str]) -> Problem:
    """The problem, with `names` for its nodes; equal tables are the same object.

    Raises:
      ValueError: if the arrays contradict each other. (What they promise beyond that, `check_problem` checks.)
    """
    shapes, start = packed.value_shape.tolist(), packed.value_start.tolist()
    tables = [
        packed.values[a:b].reshape(rows if columns == VECTOR else (rows, columns))
        for a, b, (rows, columns) in zip(start[:-1], start[1:], shapes, strict=True)
    ]
    bounds = packed.class_start.tolist()
    classes = packed.classes.astype(np.intp)
    maps = [classes[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    for numbers, count in (
        (packed.nodes, len(tables)),
        (packed.edges[:, 2:4], len(maps)),
        (packed.edges[:, 4], len(tables)),
        (packed.usages[:, 3], len(tables)),
        (packed.edge_usages[:, 3], len(tables)),
    ):
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < count):
            raise ValueError("a table is named that is not there")
    return Problem(
        tuple(Node(name, tables[k]) for name, k in zip(names, packed.nodes.tolist(), strict=True)),
        tuple(Edge(i, j, maps[a], maps[b], tables[k]) for i, j, a, b, k in packed.edges.tolist()),
        tuple(Usage(i, start, stop, tables[k]) for i, start, stop, k in packed.usages.tolist()),
        tuple(EdgeUsage(e, start, stop, tables[k]) for e, start, stop, k in packed.edge_usages.tolist()),
        packed.capacity,
    )


def digest(packed: Packed) -> str:
    """32 hexadecimal digits that two problems share only if they are the same but for names (BLAKE2b)."""
    state = hashlib.blake2b(b"autoshard problem 1", digest_size=16)
    state.update(b"-" if packed.capacity is None else struct.pack("<d", packed.capacity))
    for field in dataclasses.fields(packed)[1:]:
        array = getattr(packed, field.name)
        state.update(struct.pack("<qq", *(*array.shape, VECTOR)[:2]))
        state.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return state.hexdigest()


def problem_digest(problem: Problem) -> str:
    """`digest` of a problem."""
    return digest(pack(problem))
