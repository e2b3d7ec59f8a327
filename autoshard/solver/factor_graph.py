"""The remaining problem as graph arrays, the form that the compiled kernels work on.

Nodes are renumbered 0.. in the order of the original problem; every factor runs from a lower to a higher node. Tables
and class maps that are the same object in the `Network` are stored once.
"""

import dataclasses
from collections.abc import Sequence

import numba
import numpy as np
from numba.extending import typeof_impl

from autoshard.solver.graph_type import RecordType
from autoshard.solver.reduce.network import Demand, Factor, Network


@dataclasses.dataclass(frozen=True, eq=False)
class FactorGraph:
    """Arrays of a problem with n nodes, L labels in all, m factors, T instants.

    label_start int64 [n+1]: labels of node i are label_start[i]..label_start[i+1]-1. unary float64 [L].
    source, target int64 [m]: nodes, source < target. rows, columns int64 [m]: shape of each table.
    source_map, target_map int64 [m]: where the class of the node's first label stands in `classes` int32.
    table int64 [m]: where the factor's table (row-major) begins in `tables` float64.
    source_message, target_message int64 [m]: where the messages of each end begin in a message array of
      `message_count` entries.
    in_start, out_start int64 [n+1], in_factors, out_factors int64 [m]: factors whose target / source is the node.
    usage_start int64 [n+1]: node usages of node i; usage_first, usage_last int64: instants first <= t < last;
      usage_amounts int64: where the amounts per label begin in `amounts` float64.
    pair_start int64 [m+1], pair_first, pair_last, pair_amounts: the same for factors (amounts per table entry).
    capacity float64 [T].
    places int64 [2 * arrays]: the address and the length of each array before, for kernels (`graph_type.py`).
    """

    label_start: np.ndarray
    unary: np.ndarray
    source: np.ndarray
    target: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    source_map: np.ndarray
    target_map: np.ndarray
    classes: np.ndarray
    table: np.ndarray
    tables: np.ndarray
    source_message: np.ndarray
    target_message: np.ndarray
    in_start: np.ndarray
    in_factors: np.ndarray
    out_start: np.ndarray
    out_factors: np.ndarray
    usage_start: np.ndarray
    usage_first: np.ndarray
    usage_last: np.ndarray
    usage_amounts: np.ndarray
    pair_start: np.ndarray
    pair_first: np.ndarray
    pair_last: np.ndarray
    pair_amounts: np.ndarray
    amounts: np.ndarray
    capacity: np.ndarray
    places: np.ndarray = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        places = []
        for name, dtype in GRAPH_TYPE.columns:
            column = np.ascontiguousarray(getattr(self, name), str(dtype))
            object.__setattr__(self, name, column)
            places += [column.ctypes.data, len(column)]
        object.__setattr__(self, "places", np.array(places, np.int64))

    def __reduce__(self) -> tuple[type["FactorGraph"], tuple[np.ndarray, ...]]:
        """A copy has arrays, and so places, of its own."""
        return FactorGraph, tuple(getattr(self, name) for name, _ in GRAPH_TYPE.columns)

    @property
    def address(self) -> int:
        """Where kernels find the address and the length of each array."""
        return self.places.ctypes.data


def _type_of_entries(name: str) -> numba.types.Type:
    if name == "classes":
        return numba.int32
    return numba.float64 if name in ("unary", "tables", "amounts", "capacity") else numba.int64


GRAPH_TYPE = RecordType(
    "FactorGraph",
    tuple((field.name, _type_of_entries(field.name)) for field in dataclasses.fields(FactorGraph) if field.init),
)
"""What kernels take a `FactorGraph` for."""


@typeof_impl.register(FactorGraph)
def _type_of_graph(graph: FactorGraph, context: object) -> RecordType:
    return GRAPH_TYPE


class _Store:
    """Concatenates arrays, each distinct object once."""

    def __init__(self, dtype: type) -> None:
        self._dtype = dtype
        self._place: dict[int, int] = {}
        self._parts: list[np.ndarray] = []
        self._length = 0

    def put(self, array: np.ndarray) -> int:
        if id(array) not in self._place:
            self._place[id(array)] = self._length
            self._parts.append(np.ravel(array).astype(self._dtype))
            self._length += array.size
        return self._place[id(array)]

    def joined(self) -> np.ndarray:
        return np.concatenate(self._parts) if self._parts else np.zeros(0, self._dtype)


class _Multiples:
    """Arrays times counts of copies; the same array and count give the same object."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], np.ndarray] = {}

    def of(self, array: np.ndarray, count: int) -> np.ndarray:
        if count == 1:
            return array
        key = id(array), count
        if key not in self._made:
            self._made[key] = array * count
        return self._made[key]

    def demands(self, demands: list[Demand], count: int) -> list[Demand]:
        if count == 1:
            return demands
        return [Demand(r.start, r.stop, self.of(r.amounts, count)) for r in demands]


def ordered_factors(network: Network) -> list[Factor]:
    """The factors of a network in the order in which they are laid out."""
    return sorted(network.factors.values(), key=lambda factor: (factor.i, factor.j))


def factor_graph_of(network: Network) -> tuple[FactorGraph, np.ndarray]:
    """Lays out the nodes still alive.

    In a lifted network, everything counts as often as there are copies.

    Returns:
      The arrays, and the original index of each node, int64 [n].
    """
    nodes = np.array([node for node, alive in enumerate(network.alive) if alive], np.int64)
    number = {int(node): index for index, node in enumerate(nodes)}
    sizes = [len(network.labels[node]) for node in nodes]
    classes, tables, amounts = _Store(np.int32), _Store(np.float64), _Store(np.float64)
    factors = ordered_factors(network)
    source = np.array([number[factor.i] for factor in factors], np.int64)
    target = np.array([number[factor.j] for factor in factors], np.int64)
    rows = np.array([factor.table.shape[0] for factor in factors], np.int64)
    columns = np.array([factor.table.shape[1] for factor in factors], np.int64)
    source_map = np.array([classes.put(factor.map_i) for factor in factors], np.int64)
    target_map = np.array([classes.put(factor.map_j) for factor in factors], np.int64)
    multiples = _Multiples()
    node_counts = [1 if network.multiplicity is None else int(network.multiplicity[node]) for node in nodes]
    factor_counts = [network.factor_multiplicity(factor) for factor in factors]
    own_tables = [multiples.of(f.table, count) for f, count in zip(factors, factor_counts, strict=True)]
    table = np.array([tables.put(own) for own in own_tables], np.int64)
    message_sizes = np.stack([rows, columns], axis=1).ravel()
    message_start = np.concatenate([[0], np.cumsum(message_sizes)]).astype(np.int64)
    in_start, in_factors = grouped(target, len(nodes))
    out_start, out_factors = grouped(source, len(nodes))
    node_demands = [multiples.demands(network.demands[n], c) for n, c in zip(nodes, node_counts, strict=True)]
    factor_demands = [multiples.demands(f.demands, c) for f, c in zip(factors, factor_counts, strict=True)]
    unary = [multiples.of(network.unary[n], c) for n, c in zip(nodes, node_counts, strict=True)]
    usage_start, usage_first, usage_last, usage_amounts = _lay_demands(node_demands, amounts)
    pair_start, pair_first, pair_last, pair_amounts = _lay_demands(factor_demands, amounts)
    graph = FactorGraph(
        label_start=offsets(sizes),
        unary=np.concatenate(unary) if unary else np.zeros(0),
        source=source,
        target=target,
        rows=rows,
        columns=columns,
        source_map=source_map,
        target_map=target_map,
        classes=classes.joined(),
        table=table,
        tables=tables.joined(),
        source_message=message_start[:-1][0::2].copy(),
        target_message=message_start[:-1][1::2].copy(),
        in_start=in_start,
        in_factors=in_factors,
        out_start=out_start,
        out_factors=out_factors,
        usage_start=usage_start,
        usage_first=usage_first,
        usage_last=usage_last,
        usage_amounts=usage_amounts,
        pair_start=pair_start,
        pair_first=pair_first,
        pair_last=pair_last,
        pair_amounts=pair_amounts,
        amounts=amounts.joined(),
        capacity=network.capacity.copy(),
    )
    return graph, nodes


def with_costs(graph: FactorGraph, unary: Sequence[np.ndarray], tables: Sequence[np.ndarray]) -> FactorGraph:
    """The same graph with other costs.

    Args:
      unary: Of each node, float64 [labels]. tables: Of each factor, float64 [rows, columns]; equal ones are one object.
    """
    store = _Store(np.float64)
    places = np.array([store.put(table) for table in tables], np.int64)
    together = np.concatenate(unary) if unary else np.zeros(0)
    return dataclasses.replace(graph, unary=together, table=places, tables=store.joined())


def with_own_tables(graph: FactorGraph) -> FactorGraph:
    """The same graph, in which each factor with usages has a table that no other has: prices on capacity can be added
    to it. Those without share theirs, which keeps what a sweep reads small."""
    own = np.diff(graph.pair_start) > 0
    sizes = (graph.rows * graph.columns)[own]
    places, table = offsets(sizes), graph.table.copy()
    table[own] = len(graph.tables) + places[:-1]
    return dataclasses.replace(
        graph, table=table, tables=np.concatenate([graph.tables, graph.tables[ranges(graph.table[own], sizes)]])
    )


def ranges(start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """start[0], start[0] + 1, .. (count[0] of them), start[1], ..; int64."""
    begins = offsets(count)
    return np.repeat(start - begins[:-1], count) + np.arange(begins[-1])


def message_count(graph: FactorGraph) -> int:
    """Entries of a message array."""
    return int(graph.rows.sum() + graph.columns.sum())


def table_entries(graph: FactorGraph) -> int:
    """Labels and table entries together: what one sweep visits in one direction."""
    return int(len(graph.unary) + graph.rows @ graph.columns)


def offsets(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """0, sizes[0], sizes[0] + sizes[1], ..; int64."""
    return np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))]).astype(np.int64)


def grouped(ends: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Where those of each of `count` ends begin, and the factors in that order."""
    return offsets(np.bincount(ends, minlength=count)[:count]), np.argsort(ends, kind="stable").astype(np.int64)


def _lay_demands(groups: list, amounts: _Store) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    laid = [demand for group in groups for demand in group]
    return (
        offsets([len(group) for group in groups]),
        np.array([demand.start for demand in laid], np.int64),
        np.array([demand.stop for demand in laid], np.int64),
        np.array([amounts.put(demand.amounts) for demand in laid], np.int64),
    )
