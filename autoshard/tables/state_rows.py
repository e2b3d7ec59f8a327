"""Which leaves of a training state have a row for each row of a table: the parameter, and the optimizer's of it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from autoshard.tables.look_ups import Table
from autoshard.trace.trace import path_name


@dataclasses.dataclass(frozen=True, slots=True)
class RowLeaf:
    """A leaf of the state with the rows of a table as its first dimension.

    Attributes:
      index: Its number among the leaves of the state. path: Its path in the state.
      table: Number of its table.
      row_shape: Its other dimensions. dtype: Its type.
      is_param: Whether it is the table itself, not the optimizer's.
    """

    index: int
    path: str
    table: int
    row_shape: tuple[int, ...]
    dtype: Any
    is_param: bool


def row_leaves(state: Any, tables: Sequence[Table]) -> tuple[RowLeaf, ...]:
    """The leaves of a state that belong to tables by rows.

    A leaf of the optimizer belongs to the parameter whose path its own path ends with, the longest if there are
    several; it has its rows if it has as many.

    Args:
      state: Arrays or shapes. tables: Of the step.
    """
    params = [_keys(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.params)]
    of_table = {table.index: number for number, table in enumerate(tables)}
    found = []
    for index, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
        head, keys = _keys(path[:1])[0], _keys(path[1:])
        if head not in ("params", "opt_state"):
            continue
        owners = [i for i, own in enumerate(params) if keys[len(keys) - len(own) :] == own]
        owner = max(owners, key=lambda i: len(params[i]), default=None)
        if owner not in of_table:
            continue
        number = of_table[owner]
        if leaf.shape[:1] == (tables[number].num_rows,):
            is_param = head == "params"
            found.append(RowLeaf(index, path_name(path), number, tuple(leaf.shape[1:]), leaf.dtype, is_param))
    return tuple(found)


def with_rows(state: Any, leaves: Sequence[RowLeaf], rows: Sequence[Any]) -> Any:
    """A state whose row leaves are replaced, in their order."""
    flat, tree = jax.tree.flatten(state)
    for leaf, own in zip(leaves, rows, strict=True):
        flat[leaf.index] = own
    return jax.tree.unflatten(tree, flat)


def rows_of(state: Any, leaves: Sequence[RowLeaf]) -> list[Any]:
    """The row leaves of a state, in their order."""
    flat = jax.tree.leaves(state)
    return [flat[leaf.index] for leaf in leaves]


def _keys(path: Sequence[Any]) -> list[str]:
    return [path_name((key,)) for key in path]
