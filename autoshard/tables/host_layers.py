"""Layers at the host: the beginning of a loss runs beside the rows of its tables, so that little goes to the devices.

A loss is cut behind values that the host can make (`cuts.py`): sums of rows, or what dense layers make of these.

    host      rows, parameters, ids, batch  -> values      the gathers and all that lies between them and the values
    devices   values, batch                 -> gradients of the values; the update of all else
    host      gradients of values           -> gradients of rows and parameters (the transpose of the first line)
                                            -> the optimizer's update of them

All three are parts of the program that the user wrote, so that results are those of the whole step. The optimizer's
update must need nothing of other parameters, since their gradients stay on the devices, nor may the others need
anything of these; scalars of its state, such as the number of steps, are sent.
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
from autoshard.tables.cuts import Cut, CutAt
from autoshard.tables.find import Reading
from autoshard.tables.row_updates import RowUpdate, traced_update
from autoshard.tables.rows_loss import RowsBatch, host_program
from autoshard.tables.state_rows import ParamLeaf, RowLeaf, param_leaves, rows_of, with_rows
from autoshard.tables.traced_loss import TracedLoss, sliced
from autoshard.trace.walk import shape_of, variables
from autoshard.train_step import TrainStep


class CutBatch(TypedDict):
    """The batch of a step whose loss begins at the host.

    Attributes:
      batch: As the user gives it.
      positions: For each look-up of the other tables, the position of each id's row among the rows of the batch.
      values: Of each cut.
    """

    batch: Any
    positions: tuple[Any, ...]
    values: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class CutResult:
    """What such a step returns beside the state.

    Attributes:
      metrics: As of the step.
      gradients: Of the values. shared: Scalars of the state before the step that the host's update needs.
    """

    metrics: Any
    gradients: tuple[Any, ...]
    shared: tuple[Any, ...]


jax.tree_util.register_dataclass(CutResult, ["metrics", "gradients", "shared"], [])


@dataclasses.dataclass(frozen=True)
class CutStep:
    """The part of a step on the devices: from a state and a `CutBatch` to a state and a `CutResult`.

    In place of each table of a cut, and of the optimizer's leaves of it, the state has a single row that means nothing;
    in place of each parameter, and of its leaves, a single number.

    Attributes:
      step: With a `RowsLoss` that takes the values of these cuts.
      cuts: Behind which it begins.
      at_host: Leaves of the state that it leaves as they are. shared: Leaves of the state that it returns as they were.
    """

    step: TrainStep
    cuts: tuple[Cut, ...]
    at_host: tuple[int, ...]
    shared: tuple[int, ...]

    @property
    def __name__(self) -> str:
        return self.step.__name__

    def __call__(self, state: Any, fed: CutBatch) -> tuple[Any, CutResult]:
        """Takes a step."""
        before = jax.tree.leaves(state)
        params, tree = jax.tree.flatten(state.params)
        own = list(params)
        for cut, value in zip(self.cuts, fed["values"], strict=True):
            own[cut.tables[0].index] = value
        rest = RowsBatch(batch=fed["batch"], positions=fed["positions"])
        found, mutable, metrics = self.step.gradients(
            jax.tree.unflatten(tree, own), state.mutable, rest, self.step.key(state), 1.0
        )
        gradients = jax.tree.leaves(found)
        of_values = tuple(gradients[cut.tables[0].index] for cut in self.cuts)
        for one in (one for cut in self.cuts for one in (*cut.tables, *cut.params)):
            gradients[one.index] = jnp.zeros_like(params[one.index])
        state, metrics = self.step.finish(state, jax.tree.unflatten(tree, gradients), mutable, metrics)
        after, tree = jax.tree.flatten(state)
        for i in self.at_host:
            after[i] = before[i]
        shared = tuple(before[i] for i in self.shared)
        return jax.tree.unflatten(tree, after), CutResult(metrics, of_values, shared)


@dataclasses.dataclass(frozen=True)
class HostLayers:
    """What the host does of a step, by XLA on its CPUs.

    Attributes:
      cuts: Behind which the devices go on.
      tables: Numbers of their tables, among all that are cut out. look_ups: Numbers of their look-ups, likewise.
      leaves: Numbers of their arrays of rows, likewise.
      dense: Leaves of the state that belong to their parameters, which the host has whole.
      shared: Leaves of the state that `update` takes.
    """

    cuts: tuple[Cut, ...]
    tables: tuple[int, ...]
    look_ups: tuple[int, ...]
    leaves: tuple[int, ...]
    dense: tuple[ParamLeaf, ...]
    shared: tuple[int, ...]
    _tables: tuple[int, ...]
    """Which of `leaves` are the tables themselves."""
    _params: tuple[int, ...]
    """Which of `dense` are the parameters themselves, in the order of the cuts."""
    _batch: tuple[int, ...]
    """Leaves of the batch that the host's part reads."""
    _value_program: jex.ClosedJaxpr
    _update_program: jex.ClosedJaxpr

    @property
    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of the values."""
        return tuple(jax.ShapeDtypeStruct(cut.shape, jnp.dtype(cut.dtype)) for cut in self.cuts)

    @property
    def places(self) -> list[jax.ShapeDtypeStruct]:
        """What stands in place of `dense` on the devices: single numbers."""
        return [jax.ShapeDtypeStruct((1,) * len(leaf.shape), leaf.dtype) for leaf in self.dense]

    def values(
        self, rows: Sequence[Any], dense: Sequence[Any], positions: Sequence[Any], batch: Any
    ) -> tuple[np.ndarray, ...]:
        """What goes to the devices of a batch.

        Args:
          rows: All arrays of rows of the batch. dense: The leaves of `dense`.
          positions: Of all look-ups. batch: As the user gives it.
        """
        own = [rows[self.leaves[i]] for i in self._tables], [dense[i] for i in self._params]
        with _on_cpu():
            return tuple(map(np.asarray, self._values(*own, self._positions(positions), self._read(batch))))

    def update(
        self,
        rows: Sequence[Any],
        dense: Sequence[Any],
        positions: Sequence[Any],
        batch: Any,
        result: CutResult,
        newest: Sequence[Any] | None = None,
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The arrays of rows of `leaves` after a step, and the leaves of `dense`.

        Args:
          rows, dense, positions, batch: Those of which `values` were made.
          result: Of the step on the devices.
          newest: Leaves of `dense` that the optimizer updates; None for those of which values were made.
        """
        own = [rows[i] for i in self.leaves]
        gradients, shared = ([np.asarray(x) for x in some] for some in (result.gradients, result.shared))
        with _on_cpu():
            new = self._update(
                own,
                [dense[i] for i in self._params],
                list(dense if newest is None else newest),
                self._positions(positions),
                self._read(batch),
                gradients,
                shared,
            )
            made = list(map(np.asarray, new))
        return made[: len(own)], made[len(own) :]

    def _positions(self, positions: Sequence[Any]) -> list[np.ndarray]:
        return [np.asarray(positions[i])[..., None] for i in self.look_ups]

    def _read(self, batch: Any) -> list[np.ndarray]:
        leaves = jax.tree.leaves(batch)
        return [
            np.asarray(x, jax.dtypes.canonicalize_dtype(np.asarray(x).dtype))
            for x in map(leaves.__getitem__, self._batch)
        ]

    @functools.cached_property
    def _values(self) -> Any:
        def values(rows: Any, params: Any, positions: Any, batch: Any) -> Any:
            return jex.jaxpr_as_fun(self._value_program)(*rows, *params, *positions, *batch)

        return jax.jit(values)

    @functools.cached_property
    def _update(self) -> Any:
        def update(rows: Any, params: Any, newest: Any, positions: Any, batch: Any, gradients: Any, shared: Any) -> Any:
            values = lambda own, params: jex.jaxpr_as_fun(self._value_program)(*own, *params, *positions, *batch)
            _, transposed = jax.vjp(values, [rows[i] for i in self._tables], params)
            of_rows, of_params = transposed(list(gradients))
            return jex.jaxpr_as_fun(self._update_program)(*of_rows, *of_params, *rows, *newest, *shared)

        return jax.jit(update)


def host_layers_of(
    step: TrainStep,
    state: Any,
    loss: TracedLoss,
    cuts: Sequence[CutAt],
    readings: Sequence[Reading],
    capacities: Sequence[int],
    update: RowUpdate,
) -> HostLayers:
    """The host's part of a step.

    Args:
      step: The training step. state: By shape, tables whole. loss: Its loss, traced.
      cuts: Of the loss.
      readings: Of all tables that are cut out. capacities: Rows of a batch of each.
      update: What the step's update does to rows.

    Raises:
      ConfigError: The step scales its loss, runs in micro-batches, or its optimizer adds up rows.
      TraceError: The update of these parameters needs those of others, or the others need these.
    """
    if step.scaling is not None or step.parts is not None or update.sums:
        why = (
            f"its optimizer adds up rows of all tables at {', '.join(update.sums)}"
            if update.sums
            else "this one scales its loss, or runs in micro-batches"
        )
        raise ConfigError(f"{_RULE}; {why}. {_NEXT_STEP}")
    paths = {table.path for at in cuts for table in at.cut.tables}
    numbers = tuple(n for n, reading in enumerate(readings) if reading.table.path in paths)
    leaves = tuple(i for i, leaf in enumerate(update.leaves) if leaf.table in numbers)
    own = [update.leaves[i] for i in leaves]
    of_tables = tuple(next(k for k, x in enumerate(own) if x.is_param and x.table == n) for n in numbers)
    params = [param.index for at in cuts for param in at.cut.params]
    dense = param_leaves(state, set(params))
    of_params = tuple(next(k for k, x in enumerate(dense) if x.is_param and x.param == p) for p in params)
    program, read = host_program(loss, cuts, [readings[n] for n in numbers], [capacities[n] for n in numbers])
    indices = [readings[n].table.index for n in numbers] + params
    updates, shared = _update_program(step, state, update.leaves, leaves, dense, indices, capacities)
    counts = np.cumsum([0, *(len(reading.table.look_ups) for reading in readings)])
    look_ups = tuple(int(i) for n in numbers for i in range(counts[n], counts[n + 1]))
    all_cuts = tuple(at.cut for at in cuts)
    return HostLayers(all_cuts, numbers, look_ups, leaves, dense, shared, of_tables, of_params, read, program, updates)


def _update_program(
    step: TrainStep,
    state: Any,
    all_leaves: Sequence[RowLeaf],
    leaves: Sequence[int],
    dense: Sequence[ParamLeaf],
    indices: Sequence[int],
    capacities: Sequence[int],
) -> tuple[jex.ClosedJaxpr, tuple[int, ...]]:
    """The optimizer's update of some parameters: from their gradients, their arrays of rows, their other leaves, and
    further leaves of the state to new ones; and which leaves these are.

    Args:
      indices: Numbers of the parameters among all, in the order of their gradients.
    """
    rows = [jax.ShapeDtypeStruct((capacities[x.table], *x.row_shape), x.dtype) for x in all_leaves]
    closed = traced_update(step, with_rows(state, all_leaves, rows))
    jaxpr, paths = closed.jaxpr, _paths(state)
    num_params = len(jax.tree.leaves(state.params))
    gradients, before = jaxpr.invars[:num_params], jaxpr.invars[num_params:]
    own = [all_leaves[i].index for i in leaves] + [leaf.index for leaf in dense]
    wanted = [gradients[i] for i in indices] + [before[i] for i in own]
    outs = [jaxpr.outvars[i] for i in own]
    part, needed = sliced(jaxpr, outs)
    others = [v for v in jaxpr.invars if v in needed and v not in wanted]
    shared = [i for i, v in enumerate(before) if v in others]
    wrong = [v for v in others if v in gradients or math.prod(shape_of(v)) > 1]
    if wrong:
        what = "gradients of other parameters" if wrong[0] in gradients else "arrays of other parameters"
        raise TraceError(f"{_RULE}; that of `{paths[own[0]]}` needs {what}. {_NEXT_STEP}")
    made = set(wanted)
    for equation in jaxpr.eqns:
        if made.intersection(variables(equation.invars)):
            made.update(variables(equation.outvars))
    for i, v in enumerate(jaxpr.outvars):
        if i not in own and not isinstance(v, jex.Literal) and v in made:
            raise TraceError(f"{_RULE}; that of `{paths[i]}` needs what the host has. {_NEXT_STEP}")
    inputs = [*wanted, *(before[i] for i in shared)]
    names = jex.DebugInfo("update", "update", ("",) * len(inputs), ("",) * len(own))
    program = jaxpr.replace(invars=inputs, outvars=outs, eqns=part, effects=set(), debug_info=names)
    return jex.ClosedJaxpr(program, closed.consts), tuple(shared)


def without_dense(state: Any, layers: HostLayers | None) -> Any:
    """A state, as arrays or shapes, with single numbers that mean nothing in place of what the host has whole."""
    if layers is None or not layers.dense:
        return state
    are_shapes = isinstance(rows_of(state, layers.dense)[0], jax.ShapeDtypeStruct)
    places = layers.places if are_shapes else [jnp.zeros(x.shape, x.dtype) for x in layers.places]
    return with_rows(state, layers.dense, places)


_RULE = (
    "Tables are pooled at the host, and layers run there, only where the update of their parameters needs nothing of "
    "the others, nor the others of them"
)
_NEXT_STEP = (
    "Leave `pooled` and `host_layers` out, or take an optimizer that treats parameters by themselves (SGD, Adagrad; "
    "without clipping by the norm of all gradients)."
)


def _paths(state: Any) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]


def _on_cpu() -> Any:
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError as error:  # the CPU was excluded, as by JAX_PLATFORMS=cuda
        raise ConfigError(
            "Sums of rows and layers at the host are made by JAX on its CPUs, which JAX_PLATFORMS leaves out. Add "
            "`,cpu` to it."
        ) from error
