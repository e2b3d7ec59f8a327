"""The part of a step that lies in host memory: what `autoshard.HostTables` is told of tables, and who decides it."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from autoshard.checkpoints.agreement import from_first
from autoshard.host_tables.options import Execution
from autoshard.offloading.placement import TablePlacement
from autoshard.tables.frequent_rows import frequent_rows
from autoshard.tables.sparse_step import SparseStep, sparse_step
from autoshard.train_step import TrainStep


@dataclasses.dataclass(frozen=True, slots=True)
class HostPart:
    """What lies in host memory.

    Attributes:
      tables: Paths of the parameters; None for all tables.
      execution: How steps follow each other.
      hot_rows: By path, how many of the most frequent rows stay on the devices.
      pooled: Paths of the tables whose rows the host sums. host_layers: Paths of the parameters whose layers run there.
      placed: The decision that it follows from; None where there was none, or where another process made it.
    """

    tables: tuple[str, ...] | None
    execution: Execution
    hot_rows: Mapping[str, int]
    pooled: tuple[str, ...] = ()
    host_layers: tuple[str, ...] = ()
    placed: TablePlacement | None = None

    @classmethod
    def of(cls, placed: TablePlacement) -> "HostPart | None":
        """What a decision puts there; None for nothing."""
        own = placed.execution
        return own and cls(placed.host_tables, own, placed.hot_rows, placed.pooled, placed.host_layers, placed)

    def step_over_rows(self, step: TrainStep, state: Any, batch: Any, lazy: bool) -> SparseStep:
        """The step that runs on the devices: over the rows of a batch; see `sparse_step`."""
        return sparse_step(
            step,
            state,
            batch,
            tables=self.tables,
            lazy=lazy,
            hot_counts=self.hot_rows,
            pooled=self.pooled,
            host_layers=self.host_layers,
        )

    def hot_rows_of(
        self, step: TrainStep, state: Any, sample: Iterable[Any], is_ranked: bool
    ) -> Mapping[str, int | np.ndarray]:
        """The hot rows as `HostTables` takes them: the first ones of ranked rows, else those frequent in a sample.

        Where fewer are looked up in the sample, others fill them up.

        Args:
          step: The training step. state: Its state, arrays or shapes.
          sample: Batches. is_ranked: Whether row 0 is the most frequent, row 1 the next, and so on.

        Raises:
          ConfigError: There is no batch.
        """
        if is_ranked or not self.hot_rows:
            return self.hot_rows
        found = frequent_rows(step, state, sample, self.hot_rows)
        return {path: _filled(rows, self.hot_rows[path]) for path, rows in found.items()}

    def __str__(self) -> str:
        if self.placed is not None:
            return self.placed.outline
        which = "all tables" if self.tables is None else ", ".join(self.tables)
        return f"in host memory: {which}; the plan is that of the step over the rows of a batch"


def _filled(rows: np.ndarray, count: int) -> np.ndarray:
    """Rows, and the first others of their table, so many in all."""
    return np.concatenate([rows, np.setdiff1d(np.arange(count), rows)[: count - len(rows)]])


def agreed(decide: Callable[[], TablePlacement]) -> HostPart | None:
    """What the first process decides, in all of them, which call this together; None for nothing in host memory."""
    made: list[TablePlacement] = []

    def plain() -> tuple[Any, ...] | None:
        made.append(decide())
        part = HostPart.of(made[0])
        own = part and (part.tables, dataclasses.asdict(part.execution), part.hot_rows, part.pooled, part.host_layers)
        return own

    decided = from_first(plain)
    if decided is None:
        return None
    tables, execution, hot_rows, pooled, layers = decided
    placed = made[0] if made else None
    return HostPart(tuple(tables), Execution(**execution), hot_rows, tuple(pooled), tuple(layers), placed)
