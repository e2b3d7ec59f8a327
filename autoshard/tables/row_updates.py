"""Proves that the update of a step can run on the rows that a batch reads, and tells what that means for the others."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from autoshard.errors import TraceError
from autoshard.tables.look_ups import Table
from autoshard.tables.row_flow import CoupledRows, Coupling, Flow, RowFlow
from autoshard.tables.state_rows import RowLeaf, row_leaves, with_rows
from autoshard.tables.traced_loss import shape_like
from autoshard.trace.inline import inlined
from autoshard.trace.source import optimizer_line
from autoshard.train_step import TrainStep


@dataclasses.dataclass(frozen=True, slots=True)
class RowUpdate:
    """What the update of a step does to tables when it runs on the rows of a batch alone.

    Attributes:
      leaves: The leaves of the state that have rows.
      changes_untouched: Paths of the leaves whose rows would change even where the gradient is zero, as under momentum,
        Adam or weight decay. Run on the rows of a batch alone, the update leaves the others as they are: it is lazy.
      sums: Lines that add up rows of gradients, such as for a global norm; that is exact.
    """

    leaves: tuple[RowLeaf, ...]
    changes_untouched: tuple[str, ...]
    sums: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Whether the update equals that of the whole tables."""
        return not self.changes_untouched

    def __str__(self) -> str:
        if self.is_exact:
            return "the update of the rows that a batch reads equals that of whole tables"
        shown = ", ".join(self.changes_untouched[:3])
        more = f" and {len(self.changes_untouched) - 3} more" if len(self.changes_untouched) > 3 else ""
        return f"lazy update: rows that a batch does not read keep {shown}{more}, which whole tables would change"


def row_updates(step: TrainStep, state: Any, tables: Sequence[Table], is_lazy: bool = False) -> RowUpdate:
    """Proves that a step's update treats rows of tables alike and apart, so that it may run on some of them.

    The update is traced, and every row is followed through it by the sharding rules of its equations. Rows of gradients
    may be added up, as for a global norm, since rows that no id names add zero.

    Args:
      step: The step, with any Optax transformation. state: Arrays or shapes.
      tables: The tables.
      is_lazy: Accept that rows which no id names stay as they are, where the update of whole tables would change them.

    Raises:
      TraceError: The update couples rows, goes by their number, or is lazy and that is not accepted; names the line.
    """
    leaves = row_leaves(state, tables)
    shapes = jax.tree.map(shape_like, state)
    closed = traced_update(step, shapes)
    by_index = {leaf.index: leaf for leaf in leaves}
    flat = jax.tree.leaves(shapes)
    of_table = {table.index: number for number, table in enumerate(tables)}
    num_params = len(jax.tree.leaves(state.params))
    gradients = [Flow(of_table[i], is_zero=True) if i in of_table else Flow() for i in range(num_params)]
    of_state = [Flow(by_index[i].table, leaf=i) if i in by_index else Flow() for i in range(len(flat))]
    flow = RowFlow([x.dtype for x in flat])
    try:
        results = flow.through(closed.jaxpr, [*gradients, *of_state], closed.consts)
    except CoupledRows as error:
        raise _refusal(error.coupling, tables) from error
    few = [min(table.num_rows, table.most_rows) // 2 + 1 for table in tables]
    rows = [jax.ShapeDtypeStruct((few[x.table], *x.row_shape), x.dtype) for x in leaves]
    _refuse_dependence_on_count(closed, traced_update(step, with_rows(shapes, leaves, rows)))
    changed = []
    for i, result in enumerate(results):
        leaf = by_index.get(i)
        if result.table != (None if leaf is None else leaf.table):
            path = jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(shapes)[i][0], simple=True, separator=".")
            raise TraceError(
                f"The update of a table must keep its rows where they are; the optimizer's new `{path}` "
                f"{'has rows of a table, and the old has not' if leaf is None else 'has not the rows of its table'}. "
                "Keep this table on the accelerators, or give it another optimizer (optax.multi_transform)."
            )
        if leaf is not None and result.leaf != i:
            changed.append(leaf.path)
    update = RowUpdate(leaves, tuple(changed), tuple(dict.fromkeys(map(optimizer_line, flow.sums))))
    if changed and not is_lazy:
        raise TraceError(
            "An update that runs on the rows of a batch alone must leave all others as they are; the optimizer also "
            f"changes rows without a gradient: {', '.join(changed[:3])}{' ...' if changed[3:] else ''} (momentum, Adam "
            "and weight decay do). Use one that does not for tables (SGD, Adagrad; optax.multi_transform), or accept "
            "that such rows stay as they are until they are read again: lazy=True."
        )
    return update


def traced_update(step: TrainStep, state: Any) -> jex.ClosedJaxpr:
    """The update of a step as a program of the gradients and the leaves of the state, to those of the new state."""

    def finish(gradients: Any, state: Any) -> Any:
        return step.finish(state, gradients, state.mutable, {})[0]

    gradients = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state.params)
    return inlined(jax.make_jaxpr(finish)(gradients, state))


def _refuse_dependence_on_count(whole: jex.ClosedJaxpr, part: jex.ClosedJaxpr) -> None:
    """Refuses an update that is another program, or has other numbers in it, for fewer rows, such as a mean of rows."""
    mine, its = whole.jaxpr.eqns, part.jaxpr.eqns
    differs = next((a for a, b in zip(mine, its, strict=False) if _is_other(a, b)), None)
    if differs is None and len(mine) != len(its):
        differs = mine[min(len(mine), len(its)) - 1]
    if differs is not None:
        raise _refusal(Coupling(differs, "it goes by the number of rows, as a mean over them does"), ())


def _is_other(a: jex.JaxprEqn, b: jex.JaxprEqn) -> bool:
    if a.primitive.name != b.primitive.name:
        return True
    literals = [[v.val for v in e.invars if isinstance(v, jex.Literal)] for e in (a, b)]
    return len(literals[0]) != len(literals[1]) or any(
        not np.array_equal(x, y, equal_nan=jnp.issubdtype(np.asarray(x).dtype, np.inexact))
        for x, y in zip(*literals, strict=True)
    )


def _refusal(coupling: Coupling, tables: Sequence[Table]) -> TraceError:
    line = optimizer_line(coupling.equation)
    of = f" of `{tables[0].path}`" if len(tables) == 1 else ""
    return TraceError(
        f"An update that runs on the rows of a batch alone must treat each row of a table{of} by itself, but in the "
        f"optimizer's `{coupling.equation.primitive.name}`{f' at {line}' if line else ''} {coupling.why}. Give tables "
        "an optimizer that does not (SGD, Adagrad, Adam; optax.multi_transform), or keep them on the accelerators."
    )
