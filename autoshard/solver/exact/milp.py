"""The exact search: the remaining problem as a mixed integer milp.

Over binaries x (one per label), reals y in 0..1 (one per finite entry of a factor's table) and slacks s >= 0:

  (1) minimise  sum_i theta_i . x_i  +  sum_f theta_f . y_f  +  sum_t price_t s_t        -> _columns
  (2) sum_k x_i,k                    = 1                       for every node i           -> _one_label
  (3) sum_b y_f,ab                   = sum_{k in class a} x_source,k   for every row a    -> _marginals
  (4) sum_a y_f,ab                   = sum_{k in class b} x_target,k   for every column b -> _marginals
  (5) sum usages live at t + s_t     = capacity_t              for every instant t        -> _capacity

theta and price are the reparametrised costs of `messages.py` (all zero prices and messages give the plain costs).
By (5), price_t s_t = price_t capacity_t - price_t usage_t, so (1) is the plain cost up to a constant; but every
coefficient is then a reduced cost >= 0 of a nearly optimal dual solution. A coefficient above (incumbent - bound)
belongs to no better solution, so its column is left out: that is reduced-cost fixing.
"""

import dataclasses

import numpy as np

from autoshard.solver.bound.reparametrization import Reparametrization
from autoshard.solver.factor_graph import FactorGraph


@dataclasses.dataclass(frozen=True, slots=True)
class Milp:
    """Arrays of the program: columns, rows, entries, and how to read labels from it."""

    column_cost: np.ndarray
    column_upper: np.ndarray
    integer: np.ndarray
    row_bounds: np.ndarray
    entry_row: np.ndarray
    entry_column: np.ndarray
    entry_value: np.ndarray
    label_column: np.ndarray
    """int64 [L]: column of each label, -1 if left out."""


def entry_estimate(graph: FactorGraph, keep: np.ndarray) -> int:
    """Matrix entries of the program that keeps the labels where `keep` (bool [L]) is True; an upper estimate."""
    kept = np.add.reduceat(keep.astype(np.int64), graph.label_start[:-1]) if len(keep) else np.zeros(0, np.int64)
    rows = np.minimum(graph.rows, kept[graph.source])
    columns = np.minimum(graph.columns, kept[graph.target])
    lengths = graph.usage_last - graph.usage_first
    usage_node = np.repeat(np.arange(len(kept)), np.diff(graph.usage_start))
    usages = int((np.minimum(lengths, 2) * kept[usage_node]).sum())
    return int((2 * rows * columns + kept[graph.source] + kept[graph.target]).sum() + kept.sum() + usages)


def build_milp(
    graph: FactorGraph, point: Reparametrization, *, keep: np.ndarray, cutoff: float, active: np.ndarray
) -> Milp:
    """Builds (1) to (5).

    Args:
      point: The prices and messages whose reduced costs are the objective.
      keep: bool [L], the labels that have a column.
      cutoff: factor entries with a reduced cost above this have no column; +inf to keep all finite ones.
      active: bool [T]; instants that have a row (5). All those with a price must.
    """
    builder = _MilpBuilder()
    label_column = np.full(len(point.theta), -1, np.int64)
    label_column[keep] = np.arange(keep.sum())
    builder.columns(point.theta[keep], True)
    _one_label(graph, label_column, builder)
    factor_columns = _marginals(graph, point, label_column, cutoff, builder)
    _capacity(graph, point.prices, label_column, factor_columns, active, builder)
    return builder.milp(label_column)


class _MilpBuilder:
    """Gathers columns, rows and entries."""

    def __init__(self) -> None:
        self.cost, self.upper, self.integer, self.bounds = [], [], [], []
        self.entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.column_count = self.row_count = 0

    def columns(self, cost: np.ndarray, integer: bool, upper: float = 1.0) -> np.ndarray:
        self.cost.append(cost)
        self.upper.append(np.full(len(cost), upper))
        self.integer.append(np.full(len(cost), integer))
        self.column_count += len(cost)
        return np.arange(self.column_count - len(cost), self.column_count)

    def rows(self, bounds: np.ndarray) -> np.ndarray:
        self.bounds.append(bounds)
        self.row_count += len(bounds)
        return np.arange(self.row_count - len(bounds), self.row_count)

    def put(self, row: np.ndarray, column: np.ndarray, value: np.ndarray | float) -> None:
        self.entries.append((row, column, np.broadcast_to(np.asarray(value, np.float64), row.shape)))

    def milp(self, label_column: np.ndarray) -> Milp:
        rows, columns, values = (np.concatenate([entry[part] for entry in self.entries]) for part in range(3))
        return Milp(
            np.concatenate(self.cost),
            np.concatenate(self.upper),
            np.concatenate(self.integer),
            np.concatenate(self.bounds),
            rows,
            columns,
            values,
            label_column,
        )


def _one_label(graph: FactorGraph, label_column: np.ndarray, builder: _MilpBuilder) -> None:
    """(2)"""
    count = len(graph.label_start) - 1
    rows = builder.rows(np.ones(count))
    node = np.repeat(np.arange(count), np.diff(graph.label_start))
    kept = label_column >= 0
    builder.put(rows[node[kept]], label_column[kept], 1.0)


def _marginals(
    graph: FactorGraph, point: Reparametrization, label_column: np.ndarray, cutoff: float, builder: _MilpBuilder
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(3) and (4). Returns for each factor its columns and the class at either end."""
    result = []
    for f in range(len(graph.source)):
        rows, columns = int(graph.rows[f]), int(graph.columns[f])
        ends = []
        for node, start, size in (
            (graph.source[f], graph.source_map[f], rows),
            (graph.target[f], graph.target_map[f], columns),
        ):
            own = label_column[graph.label_start[node] : graph.label_start[node + 1]]
            classes = graph.classes[start : start + len(own)][own >= 0]
            own = own[own >= 0]
            present = np.zeros(size, bool)
            present[classes] = True
            ends.append((own, classes, present))
        place = graph.table[f]
        table = point.tables[place : place + rows * columns].reshape(rows, columns)
        table = table - point.messages[graph.source_message[f] :][:rows, None]
        table = table - point.messages[graph.target_message[f] :][None, :columns]
        row, column = np.nonzero((table <= cutoff) & np.isfinite(table) & ends[0][2][:, None] & ends[1][2][None, :])
        entry_columns = builder.columns(table[row, column], False)
        result.append((entry_columns, row, column))
        for (own, classes, present), side in zip(ends, (row, column), strict=True):
            position = np.cumsum(present) - 1
            row_ids = builder.rows(np.zeros(int(present.sum())))
            builder.put(row_ids[position[side]], entry_columns, 1.0)
            builder.put(row_ids[position[classes]], own, -1.0)
    return result


def _capacity(
    graph: FactorGraph,
    prices: np.ndarray,
    label_column: np.ndarray,
    factor_columns: list,
    active: np.ndarray,
    builder: _MilpBuilder,
) -> None:
    """(5), in thousandths of the largest capacity left, to be far above tolerances.

    Each row is stated minus the one before where that has fewer entries.
    """
    capacity, prices = graph.capacity[active], prices[active]
    count = len(capacity)
    if not count:
        return
    position = np.concatenate([[0], np.cumsum(active)])
    unit = max(float(capacity.max()) / 1e3, 1e-300)
    pieces = []
    for i in range(len(graph.label_start) - 1):
        own = label_column[graph.label_start[i] : graph.label_start[i + 1]]
        for r in range(graph.usage_start[i], graph.usage_start[i + 1]):
            amounts = graph.amounts[graph.usage_amounts[r] : graph.usage_amounts[r] + len(own)]
            used = (own >= 0) & (amounts > 0)
            pieces.append((position[graph.usage_first[r]], position[graph.usage_last[r]], own[used], amounts[used]))
    for f, (columns, row, column) in enumerate(factor_columns):
        for r in range(graph.pair_start[f], graph.pair_start[f + 1]):
            amounts = graph.amounts[graph.pair_amounts[r] + row * graph.columns[f] + column]
            used = amounts > 0
            pieces.append((position[graph.pair_first[r]], position[graph.pair_last[r]], columns[used], amounts[used]))
    pieces = [piece for piece in pieces if piece[0] < piece[1]]
    dense = sum((last - first) * len(own) for first, last, own, _ in pieces)
    sparse = sum(2 * len(own) for _, _, own, _ in pieces)
    slack = builder.columns(prices * unit, False, np.inf)
    if dense <= max(4 * sparse, 200_000):
        rows = builder.rows(capacity / unit)
        for first, last, own, amounts in pieces:
            instants = np.arange(first, last)
            builder.put(
                np.repeat(rows[instants], len(own)), np.tile(own, len(instants)), np.tile(amounts / unit, len(instants))
            )
        builder.put(rows, slack, 1.0)
        return
    rows = builder.rows(np.diff(capacity, prepend=0.0) / unit)
    for first, last, own, amounts in pieces:
        builder.put(np.full(len(own), rows[first]), own, amounts / unit)
        if last < count:
            builder.put(np.full(len(own), rows[last]), own, -amounts / unit)
    builder.put(rows, slack, 1.0)
    builder.put(rows[1:], slack[:-1], -1.0)
