"""A function of state and batch that looks tables up, such as an evaluation, over the rows that one batch reads."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from autoshard.errors import TraceError
from autoshard.tables.find import find_tables
from autoshard.tables.look_ups import Table
from autoshard.tables.rows_loss import IdsFunction, RowsBatch, RowsLoss, ids_function
from autoshard.tables.rows_of_batch import BatchRows, rows_of_batch
from autoshard.train_step import TrainStep


@dataclasses.dataclass(frozen=True)
class RowsFunction:
    """A function cut at its look-ups.

    Attributes:
      tables: Those that it looks up. numbers: Of each, its number among the tables of the training step.
      capacities: Of each, the most rows that a batch can read.
      ids: From a batch to the ids of each look-up, tables first.
      run: From a state, with so many rows in place of each table's parameter, and a `RowsBatch` to what the function
        returns.
    """

    tables: tuple[Table, ...]
    numbers: tuple[int, ...]
    capacities: tuple[int, ...]
    ids: IdsFunction
    run: Callable[[Any, RowsBatch], Any]

    def rows_of_batch(self, batch: Any, order: Callable[[int, np.ndarray], np.ndarray]) -> BatchRows:
        """Which rows a batch reads, each once; `order` takes the number of a table among those of the step."""
        own = lambda number, rows: order(self.numbers[number], rows)
        return rows_of_batch(self.tables, self.capacities, self.ids.on_host(batch), own)


def rows_function(fn: Callable[[Any, Any], Any], state: Any, batch: Any, tables: Sequence[Table]) -> RowsFunction:
    """Cuts a function at its look-ups.

    Args:
      fn: From a state and a batch to arrays; pure, and reads the parameters of tables by look-ups alone.
      state, batch: Its arguments, arrays or shapes; tables whole.
      tables: Those of the training step whose rows are apart.

    Raises:
      TraceError: It reads a table otherwise than by look-ups of whole rows with ids from the batch.
    """
    step = TrainStep(_OfState(fn), optax.identity(), has_mutable=True)
    apart = state.replace(mutable=state.replace(params=None))
    found = find_tables(step, apart, batch)
    number_of = {table.path: number for number, table in enumerate(tables)}
    refused = next((r for r in found.refused if r.path in number_of), None)
    if refused is not None:
        raise TraceError(
            f"A function over rows looks tables up, and reads nothing else of them; of `{refused.path}` "
            f"{list(refused.shape)}, {refused.why}."
        )
    own = tuple(table for table in found.tables if table.path in number_of)
    loss, ids = RowsLoss(step, own), ids_function(step, apart, batch, own)

    def run(state: Any, fed: RowsBatch) -> Any:
        return loss(state.params, state.replace(params=None), fed, jax.random.key(0))

    return RowsFunction(own, tuple(number_of[t.path] for t in own), tuple(t.most_rows for t in own), ids, run)


@dataclasses.dataclass(frozen=True)
class _OfState:
    """A function of a state as a loss: of the parameters, of the rest of the state in place of mutable state, and of a
    batch.
    """

    takes_arrays: ClassVar[bool] = True

    fn: Callable[[Any, Any], Any]

    @property
    def __name__(self) -> str:
        return getattr(self.fn, "__name__", "function")

    def __call__(self, params: Any, rest: Any, batch: Any, _: Any) -> Any:
        return jax.tree.map(jnp.asarray, self.fn(rest.replace(params=params), batch))
