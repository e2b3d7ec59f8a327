"""Pooling at the host: sums of several rows an example, made beside the rows, so that only the sums go to the devices.

A loss that sums rows of a table (bags of ids, also masked, weighted or averaged) is cut behind the sum:

    host      rows, ids, batch     -> sums          the gathers and all that lies between them and the sum
    devices   sums, batch          -> gradients of the sums; the update of all else
    host      gradients of sums    -> gradients of rows (the transpose of the first line) -> the optimizer's update

All three are parts of the program that the user wrote, so that results are those of the whole step. The optimizer's
update must need nothing of other parameters, since their gradients stay on the devices; scalars of its state, such as
the number of steps, are sent.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, TypedDict

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from autoshard.errors import ConfigError, TraceError
from autoshard.tables.find import PooledReading
from autoshard.tables.look_ups import Table
from autoshard.tables.row_updates import RowUpdate, traced_update
from autoshard.tables.rows_loss import RowsBatch, host_program, sliced
from autoshard.tables.state_rows import RowLeaf, with_rows
from autoshard.tables.traced_loss import TracedLoss
from autoshard.trace.walk import shape_of
from autoshard.train_step import TrainStep


class PooledBatch(TypedDict):
    """The batch of a step some of whose tables are pooled at the host.

    Attributes:
      batch: As the user gives it.
      positions: For each look-up of the other tables, the position of each id's row among the rows of the batch.
      pooled: For each pooled table, its sums.
    """

    batch: Any
    positions: tuple[Any, ...]
    pooled: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class PooledResult:
    """What such a step returns beside the state.

    Attributes:
      metrics: As of the step.
      gradients: Of the sums. shared: Scalars of the state before the step that the update of rows needs.
    """

    metrics: Any
    gradients: tuple[Any, ...]
    shared: tuple[Any, ...]


jax.tree_util.register_dataclass(PooledResult, ["metrics", "gradients", "shared"], [])


@dataclasses.dataclass(frozen=True)
class PooledStep:
    """The part of a step on the devices: from a state and a `PooledBatch` to a state and a `PooledResult`.

    In place of each pooled table, and of the optimizer's leaves of it, the state has a single row that means nothing.

    Attributes:
      step: With a `RowsLoss` that takes sums in place of pooled tables.
      tables: The pooled ones. shared: Leaves of the state that are returned as they were.
    """

    step: TrainStep
    tables: tuple[Table, ...]
    shared: tuple[int, ...]

    @property
    def __name__(self) -> str:
        return self.step.__name__

    def __call__(self, state: Any, fed: PooledBatch) -> tuple[Any, PooledResult]:
        """Takes a step."""
        before = jax.tree.leaves(state)
        params, tree = jax.tree.flatten(state.params)
        own = list(params)
        for table, sums in zip(self.tables, fed["pooled"], strict=True):
            own[table.index] = sums
        rest = RowsBatch(batch=fed["batch"], positions=fed["positions"])
        found, mutable, metrics = self.step.gradients(
            jax.tree.unflatten(tree, own), state.mutable, rest, self.step.key(state), 1.0
        )
        gradients = jax.tree.leaves(found)
        of_sums = tuple(gradients[table.index] for table in self.tables)
        for table in self.tables:
            gradients[table.index] = jnp.zeros_like(params[table.index])
        state, metrics = self.step.finish(state, jax.tree.unflatten(tree, gradients), mutable, metrics)
        return state, PooledResult(metrics, of_sums, tuple(before[i] for i in self.shared))


@dataclasses.dataclass(frozen=True)
class HostPooling:
    """What the host does for pooled tables, by XLA on its CPUs.

    Attributes:
      tables: Numbers of the pooled tables. leaves: Numbers of their arrays of rows, among all of them.
      look_ups: Numbers of their look-ups, among all of them.
      shared: Leaves of the state that `update` takes.
      sums: Shapes and types of the sums of a batch.
    """

    tables: tuple[int, ...]
    leaves: tuple[int, ...]
    look_ups: tuple[int, ...]
    shared: tuple[int, ...]
    sums: tuple[jax.ShapeDtypeStruct, ...]
    _params: tuple[int, ...]
    """Which of `leaves` are the tables themselves."""
    _batch: tuple[int, ...]
    """Leaves of the batch that pooling reads."""
    _sum_program: jex.ClosedJaxpr
    _update_program: jex.ClosedJaxpr

    def pool(self, rows: Sequence[Any], positions: Sequence[Any], batch: Any) -> tuple[np.ndarray, ...]:
        """The sums of a batch.

        Args:
          rows: All arrays of rows of the batch. positions: Of all look-ups. batch: As the user gives it.
        """
        own = [rows[self.leaves[i]] for i in self._params]
        with _on_cpu():
            return tuple(map(np.asarray, self._pool(own, self._positions(positions), self._read(batch))))

    def update(
        self, rows: Sequence[Any], positions: Sequence[Any], batch: Any, result: PooledResult
    ) -> list[np.ndarray]:
        """The arrays of rows of pooled tables after a step, in the order of `leaves`; the other arguments as above."""
        own = [rows[i] for i in self.leaves]
        gradients, shared = ([np.asarray(x) for x in some] for some in (result.gradients, result.shared))
        with _on_cpu():
            new = self._update(own, self._positions(positions), self._read(batch), gradients, shared)
            return list(map(np.asarray, new))

    def _positions(self, positions: Sequence[Any]) -> list[np.ndarray]:
        return [np.asarray(positions[i])[..., None] for i in self.look_ups]

    def _read(self, batch: Any) -> list[np.ndarray]:
        leaves = jax.tree.leaves(batch)
        return [
            np.asarray(x, jax.dtypes.canonicalize_dtype(np.asarray(x).dtype))
            for x in map(leaves.__getitem__, self._batch)
        ]

    @functools.cached_property
    def _pool(self) -> Any:
        return jax.jit(lambda rows, positions, batch: jex.jaxpr_as_fun(self._sum_program)(*rows, *positions, *batch))

    @functools.cached_property
    def _update(self) -> Any:
        def update(rows: Any, positions: Any, batch: Any, gradients: Any, shared: Any) -> Any:
            sums = lambda own: jex.jaxpr_as_fun(self._sum_program)(*own, *positions, *batch)
            _, transposed = jax.vjp(sums, [rows[i] for i in self._params])
            (of_rows,) = transposed(list(gradients))
            return jex.jaxpr_as_fun(self._update_program)(*of_rows, *rows, *shared)

        return jax.jit(update)


def host_pooling(
    step: TrainStep,
    state: Any,
    loss: TracedLoss,
    readings: Sequence[PooledReading],
    numbers: Sequence[int],
    tables: Sequence[Table],
    capacities: Sequence[int],
    update: RowUpdate,
) -> HostPooling:
    """The parts of a step that pool tables at the host.

    Args:
      step: The training step. state: By shape, tables whole. loss: Its loss, traced.
      readings: Of the pooled tables. numbers: Their numbers among all that are cut out, `tables`.
      capacities: Rows of a batch of each of all.
      update: What the step's update does to rows.

    Raises:
      ConfigError: The step scales its loss, runs in micro-batches, or its optimizer adds up rows.
      TraceError: The optimizer's update of a pooled table needs other gradients, or arrays besides.
    """
    if step.scaling is not None or step.parts is not None or update.sums:
        why = (
            f"its optimizer adds up rows of all tables at {', '.join(update.sums)}"
            if update.sums
            else "this one scales its loss, or runs in micro-batches"
        )
        raise ConfigError(
            "Tables are pooled at the host only where the update of their rows needs nothing of the other parameters; "
            f"{why}. Leave `pooled` out, or take an optimizer that does not (SGD, Adagrad)."
        )
    leaves = tuple(i for i, leaf in enumerate(update.leaves) if leaf.table in numbers)
    own = [update.leaves[i] for i in leaves]
    params = tuple(next(k for k, x in enumerate(own) if x.is_param and x.table == n) for n in numbers)
    sums, read = host_program(loss, readings, [capacities[n] for n in numbers])
    program, shared = _update_program(step, state, update.leaves, leaves, [r.table for r in readings], capacities)
    counts = np.cumsum([0, *(len(table.look_ups) for table in tables)])
    look_ups = tuple(int(i) for n in numbers for i in range(counts[n], counts[n + 1]))
    shapes = tuple(jax.ShapeDtypeStruct(shape_of(v), v.aval.dtype) for v in sums.jaxpr.outvars)
    return HostPooling(tuple(numbers), leaves, look_ups, shared, shapes, params, read, sums, program)


def _update_program(
    step: TrainStep,
    state: Any,
    all_leaves: Sequence[RowLeaf],
    leaves: Sequence[int],
    tables: Sequence[Table],
    capacities: Sequence[int],
) -> tuple[jex.ClosedJaxpr, tuple[int, ...]]:
    """The optimizer's update of some tables: from their gradients, their arrays of rows and further leaves of the state
    to new arrays of rows; and which leaves these are.
    """
    rows = [jax.ShapeDtypeStruct((capacities[x.table], *x.row_shape), x.dtype) for x in all_leaves]
    closed = traced_update(step, with_rows(state, all_leaves, rows))
    jaxpr, num_params = closed.jaxpr, len(jax.tree.leaves(state.params))
    gradients, before = jaxpr.invars[:num_params], jaxpr.invars[num_params:]
    own = [all_leaves[i].index for i in leaves]
    wanted = [gradients[t.index] for t in tables] + [before[i] for i in own]
    part, needed = sliced(jaxpr, [jaxpr.outvars[i] for i in own])
    others = [v for v in jaxpr.invars if v in needed and v not in wanted]
    shared = [i for i, v in enumerate(before) if v in others]
    wrong = [v for v in others if v in gradients or math.prod(shape_of(v)) > 1]
    if wrong:
        what = "gradients of other parameters" if wrong[0] in gradients else "arrays of other parameters"
        raise TraceError(
            "Tables are pooled at the host only where the update of their rows needs nothing of the other parameters; "
            f"that of `{tables[0].path}` needs {what}. Leave `pooled` out, or take an optimizer that does not (SGD, "
            "Adagrad)."
        )
    inputs = [*wanted, *(before[i] for i in shared)]
    names = jex.DebugInfo("update", "update", ("",) * len(inputs), ("",) * len(own))
    outs = [jaxpr.outvars[i] for i in own]
    program = jaxpr.replace(invars=inputs, outvars=outs, eqns=part, effects=set(), debug_info=names)
    return jex.ClosedJaxpr(program, closed.consts), tuple(shared)


def _on_cpu() -> Any:
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError as error:  # the CPU was excluded, as by JAX_PLATFORMS=cuda
        raise ConfigError(
            "Sums of rows are made at the host by JAX on its CPUs, which JAX_PLATFORMS leaves out. Add `,cpu` to it."
        ) from error
