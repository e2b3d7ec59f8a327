"""The loss over the rows of a batch: tables are replaced by the rows that the batch reads, ids by positions among them.

Everything else of the program stays as it was written, so the gradient of these rows is that of the tables, row by
row: duplicates are summed by the gather's own transpose, as they are for whole tables.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypedDict

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from autoshard.errors import PlanMismatchError
from autoshard.tables.cuts import Cut, CutAt, cuts_in, same_cuts
from autoshard.tables.find import Found, Reading, found_in
from autoshard.tables.ids_in_numpy import in_numpy
from autoshard.tables.look_ups import Table
from autoshard.tables.traced_loss import TracedLoss, sliced, trace_loss
from autoshard.trace.walk import shape_of, variables
from autoshard.train_step import TrainStep


class RowsBatch(TypedDict):
    """The batch of a step over rows.

    Attributes:
      batch: As the user gives it.
      positions: For each look-up, tables first, the position of each id's row among the rows of the batch, as int32.
    """

    batch: Any
    positions: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class RowsLoss:
    """The loss of a `TrainStep` over rows; it takes what the loss does, with a `RowsBatch` as batch.

    Attributes:
      step: The step whose loss it is, over arrays.
      tables: The parameters that are rows here.
      cuts: Values that are given: in place of the first table of each, while its other tables and its parameters stand
        for nothing; `positions` have none for its tables.
    """

    takes_arrays: ClassVar[bool] = True

    step: TrainStep
    tables: tuple[Table, ...]
    cuts: tuple[Cut, ...] = ()

    @property
    def __name__(self) -> str:
        return getattr(self.step.loss_fn, "__name__", "loss_fn")

    def __call__(self, params: Any, *rest: Any) -> Any:
        """What the loss returns.

        Raises:
          PlanMismatchError: Its look-ups or cuts are not those that were found when the step was made.
        """
        mutable, fed, key = rest if self.step.has_mutable else ({}, *rest)
        leaves, tree = jax.tree.flatten(params)
        whole = list(leaves)
        for table in self.tables:
            whole[table.index] = jax.ShapeDtypeStruct((table.num_rows, *table.row_shape), jnp.dtype(table.dtype))
        for param in (param for cut in self.cuts for param in cut.params):
            whole[param.index] = jax.ShapeDtypeStruct(param.shape, jnp.dtype(param.dtype))
        loss = trace_loss(self.step, jax.tree.unflatten(tree, whole), mutable, fed["batch"], key)
        all_found = found_in(loss)
        found, cuts = chosen(all_found, self.tables), self._cuts_in(loss, all_found)
        at_host = {table.path for at in cuts for table in at.cut.tables}
        rows = [t.num_rows if t.path in at_host else jnp.shape(leaves[t.index])[0] for t in self.tables]
        program = _behind(cuts, loss, found, _over_rows(loss, found.readings, rows))
        positions = [jnp.reshape(p, (*p.shape, 1)) for p in fed["positions"]]
        args = [*leaves, *jax.tree.leaves(mutable), *jax.tree.leaves(fed["batch"]), key, *positions]
        return jax.tree.unflatten(loss.out_tree, jex.jaxpr_as_fun(program)(*args))

    def _cuts_in(self, loss: TracedLoss, found: Found) -> tuple[CutAt, ...]:
        if not self.cuts:
            return ()
        cuts = same_cuts(cuts_in(loss, found.readings), self.cuts)
        if cuts is None:
            raise PlanMismatchError(
                f"A step is cut behind the values that it was made for: {self.cuts[0]}. The loss no longer has all of "
                "them, for a batch of these shapes. Make the step anew for this loss and batch."
            )
        return cuts


def chosen(found: Found, tables: Sequence[Table]) -> Found:
    """Of what was found, the given tables.

    Raises:
      PlanMismatchError: One of them is not there any more.
    """
    readings = {reading.table.path: reading for reading in found.readings}
    missing = [t.path for t in tables if t.path not in readings]
    if missing:
        raise PlanMismatchError(
            f"A step over rows needs the look-ups that it was made for; the loss no longer looks up `{missing[0]}`, or "
            "reads it otherwise too, for a batch of these shapes. Make the step anew for this loss and batch."
        )
    return dataclasses.replace(found, readings=tuple(readings[table.path] for table in tables))


def ids_function(step: TrainStep, state: Any, batch: Any, tables: Sequence[Table]) -> "IdsFunction":
    """The part of a loss that makes ids: from a batch to the ids of each look-up, as its gather sees them.

    Args:
      step: The training step. state, batch: Its arguments, arrays or shapes. tables: Of its loss.
    """
    loss = trace_loss(step, state.params, state.mutable, batch, jax.eval_shape(step.key, state))
    jaxpr = loss.closed.jaxpr
    readings = chosen(found_in(loss), tables).readings
    ids = [jaxpr.eqns[number].invars[1] for reading in readings for number in reading.gathers]
    kept, _ = sliced(jaxpr, ids)
    names = jex.DebugInfo("ids", "ids", ("",) * len(loss.batch), ("",) * len(ids))
    part = jaxpr.replace(invars=loss.batch, outvars=ids, eqns=kept, effects=set(), debug_info=names)
    return IdsFunction(jex.ClosedJaxpr(part, loss.closed.consts))


def host_program(
    loss: TracedLoss, cuts: Sequence[CutAt], readings: Sequence[Reading], num_rows: Sequence[int]
) -> tuple[jex.ClosedJaxpr, tuple[int, ...]]:
    """The host's part of a loss: from rows, parameters, positions and leaves of the batch to the value of each cut.

    Args:
      loss: The loss. cuts: Of it.
      readings: Of their tables, in the order in which rows are given. num_rows: Rows that stand in place of each.

    Returns:
      The program, and which leaves of the batch it takes.
    """
    program = _over_rows(loss, readings, num_rows)
    jaxpr, values = program.jaxpr, [at.value for at in cuts]
    kept, needed = sliced(jaxpr, values)
    first = len(loss.paths) + loss.num_mutable
    batch = [i for i in range(loss.num_batch) if jaxpr.invars[first + i] in needed]
    rows = [jaxpr.invars[r.table.index] for r in readings]
    params = [jaxpr.invars[param.index] for at in cuts for param in at.cut.params]
    positions = jaxpr.invars[len(loss.closed.jaxpr.invars) :]
    inputs = [*rows, *params, *positions, *(jaxpr.invars[first + i] for i in batch)]
    names = jex.DebugInfo("host", "host", ("",) * len(inputs), ("",) * len(values))
    part = jaxpr.replace(invars=inputs, outvars=values, eqns=kept, effects=set(), debug_info=names)
    return jex.ClosedJaxpr(part, loss.closed.consts), tuple(batch)


@dataclasses.dataclass(frozen=True)
class IdsFunction:
    """From a batch to the ids of each look-up; within other functions, and on the host.

    Attributes:
      closed: From the leaves of a batch to index vectors of one id.
    """

    closed: jex.ClosedJaxpr

    def __call__(self, batch: Any) -> list[jax.Array]:
        """The ids, traced or on the default device."""
        return [x[..., 0] for x in jex.jaxpr_as_fun(self.closed)(*jax.tree.leaves(batch))]

    @functools.cached_property
    def _in_numpy(self) -> Callable[..., list[np.ndarray]] | None:
        return in_numpy(self.closed)

    @functools.cached_property
    def _compiled(self) -> Callable[..., list[jax.Array]]:
        return jax.jit(jex.jaxpr_as_fun(self.closed))

    def on_host(self, batch: Any) -> list[np.ndarray]:
        """The ids, in NumPy, or else on a CPU device where there is one, beside what the others do."""
        leaves = [np.asarray(x, jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)) for x in jax.tree.leaves(batch)]
        if (run := self._in_numpy) is not None:
            return [x[..., 0] for x in run(*leaves)]
        try:
            device = jax.default_device(jax.local_devices(backend="cpu")[0])
        except RuntimeError:  # the CPU was excluded, as by JAX_PLATFORMS=cuda
            device = contextlib.nullcontext()
        with device:
            return [np.asarray(x)[..., 0] for x in self._compiled(*leaves)]


def _behind(cuts: Sequence[CutAt], loss: TracedLoss, found: Found, over_rows: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A program over rows without what the host makes: values are inputs in place of the first table of each cut, and
    there are no positions in its tables.
    """
    if not cuts:
        return over_rows
    jaxpr = over_rows.jaxpr
    inputs, position = list(jaxpr.invars), len(loss.closed.jaxpr.invars)
    kept, at_host = inputs[:position], {table.path for at in cuts for table in at.cut.tables}
    for reading in found.readings:
        of_table = inputs[position : position + len(reading.gathers)]
        position += len(reading.gathers)
        if reading.table.path not in at_host:
            kept += of_table
    values = {at.value for at in cuts}
    gone = {inputs[p.index] for at in cuts for p in (*at.cut.tables, *at.cut.params)}
    for at in cuts:
        kept[at.cut.tables[0].index] = at.value
    equations = []
    for equation in jaxpr.eqns:
        if gone.intersection(variables(equation.invars)):
            gone.update(v for v in variables(equation.outvars) if v not in values)
        else:
            equations.append(equation)
    names = jex.DebugInfo("loss", "loss", ("",) * len(kept), ("",) * len(jaxpr.outvars))
    return jex.ClosedJaxpr(jaxpr.replace(invars=kept, eqns=equations, debug_info=names), over_rows.consts)


def _over_rows(loss: TracedLoss, readings: Sequence[Reading], num_rows: Sequence[int]) -> jex.ClosedJaxpr:
    """The program of a loss whose tables have so many rows; positions of each look-up are further inputs."""
    jaxpr = loss.closed.jaxpr
    renamed: dict[Any, Any] = {}
    at_gather: dict[int, Any] = {}
    by_element = set()
    for reading, rows in zip(readings, num_rows, strict=True):
        v = loss.params[reading.table.index]
        renamed[v] = _with_rows(v, rows)
        for number in reading.by_element:
            (made,) = jaxpr.eqns[number].outvars
            renamed[made] = _with_rows(made, rows)
        by_element.update(reading.by_element)
        for number in reading.gathers:
            shape = shape_of(jaxpr.eqns[number].invars[1])
            at_gather[number] = jex.Var(jax.typeof(jax.ShapeDtypeStruct(shape, jnp.int32)))
    of = lambda v: v if isinstance(v, jex.Literal) else renamed.get(v, v)
    equations = []
    for number, equation in enumerate(jaxpr.eqns):
        if number in at_gather:
            operands = [of(equation.invars[0]), at_gather[number]]
            params = {**equation.params, "indices_are_sorted": False}
            equation = equation.replace(invars=operands, params=params)
        elif number in by_element:
            equation = equation.replace(invars=[*map(of, equation.invars)], outvars=[*map(of, equation.outvars)])
        equations.append(equation)
    in_order = [at_gather[number] for reading in readings for number in reading.gathers]
    inputs = [*map(of, jaxpr.invars), *in_order]
    names = jex.DebugInfo("loss", "loss", ("",) * len(inputs), ("",) * len(jaxpr.outvars))
    return jex.ClosedJaxpr(jaxpr.replace(invars=inputs, eqns=equations, debug_info=names), loss.closed.consts)


def _with_rows(v: Any, rows: int) -> Any:
    return jex.Var(v.aval.update(shape=(rows, *shape_of(v)[1:])))
