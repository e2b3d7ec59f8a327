"""Which rows of tables are looked up most often, counted in a sample of batches."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from autoshard.errors import ConfigError
from autoshard.tables.find import find_tables
from autoshard.tables.rows_loss import ids_function
from autoshard.train_step import TrainStep


def frequent_rows(
    step: TrainStep, state: Any, batches: Iterable[Any], counts: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """The most frequent rows of tables, as `hot_rows` of `autoshard.HostTables`.

    Args:
      step: The training step. state: Its state, arrays or shapes.
      batches: A sample, of arrays. counts: By path of a table, how many of its rows are wanted.

    Returns:
      By path, at most so many rows, rising; fewer where fewer are looked up in the sample, equal counts by number.

    Raises:
      ConfigError: There is no batch, no such table, or more rows are wanted than a table has.
    """
    sample = [jax.tree.map(np.asarray, batch) for batch in batches]
    if not sample:
        raise ConfigError("Frequent rows are counted in batches; received none. Give some.")
    tables = find_tables(step, state, sample[0]).tables
    if missing := sorted(set(counts) - {table.path for table in tables}):
        raise ConfigError(
            f"Rows of tables are counted; `{missing[0]}` is none. Tables are {', '.join(t.path for t in tables)}."
        )
    tables = tuple(table for table in tables if table.path in counts)
    if larger := [table for table in tables if counts[table.path] > table.num_rows]:
        raise ConfigError(
            f"Rows of tables are counted; `{larger[0].path}` has {larger[0].num_rows:,} of them, and "
            f"{counts[larger[0].path]:,} are wanted. Lower that number."
        )
    ids = ids_function(step, state, sample[0], tables)
    read: list[list[np.ndarray]] = [[] for _ in tables]
    for batch in sample:
        found = iter(ids.on_host(batch))
        for own, table in zip(read, tables, strict=True):
            own += [next(found).reshape(-1) for _ in table.look_ups]
    return {t.path: _most(np.concatenate(own), t.num_rows, counts[t.path]) for own, t in zip(read, tables, strict=True)}


def _most(ids: np.ndarray, num_rows: int, count: int) -> np.ndarray:
    """The rows among ids that are there most often."""
    rows, times = np.unique(ids[(ids >= 0) & (ids < num_rows)].astype(np.int64), return_counts=True)
    return np.sort(rows[np.argsort(-times, kind="stable")[:count]])
