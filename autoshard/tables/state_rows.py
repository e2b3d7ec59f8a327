"""Which leaves of a training state belong to a parameter: itself, and the optimizer's for it; of tables, by rows."""

import dataclasses
from collections.abc import Collection, Sequence
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


@dataclasses.dataclass(frozen=True, slots=True)
class ParamLeaf:
    """A leaf of the state that belongs to a parameter.

    Attributes:
      index: Its number among the leaves of the state. path: Its path in the state.
      param: Number of the parameter among the leaves of the parameters.
      shape, dtype: Of it.
      is_param: Whether it is the parameter itself, not the optimizer's.
    """

    index: int
    path: str
    param: int
    shape: tuple[int, ...]
    dtype: Any
    is_param: bool


def param_leaves(state: Any, indices: Collection[int]) -> tuple[ParamLeaf, ...]:
    """The leaves of a state that belong to some parameters.

    A leaf of the optimizer belongs to the parameter whose path its own path ends with, the longest if there are
    several.

    Args:
      state: Arrays or shapes. indices: Numbers of the parameters among their leaves.
    """
    params = [_keys(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.params)]
    found = []
    for index, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
        head, keys = _keys(path[:1])[0], _keys(path[1:])
        if head not in ("params", "opt_state"):
            continue
        owners = [i for i, own in enumerate(params) if keys[len(keys) - len(own) :] == own]
        owner = max(owners, key=lambda i: len(params[i]), default=None)
        if owner is not None and owner in indices:
            is_param = head == "params"
            found.append(ParamLeaf(index, path_name(path), owner, tuple(leaf.shape), leaf.dtype, is_param))
    return tuple(found)


def row_leaves(state: Any, tables: Sequence[Table]) -> tuple[RowLeaf, ...]:
    """The leaves of a state that belong to tables by rows: those of a table that have as many rows.

    Args:
      state: Arrays or shapes. tables: Of the step.
    """
    of_table = {table.index: number for number, table in enumerate(tables)}
    found = []
    for leaf in param_leaves(state, of_table):
        number = of_table[leaf.param]
        if leaf.shape[:1] == (tables[number].num_rows,):
            found.append(RowLeaf(leaf.index, leaf.path, number, leaf.shape[1:], leaf.dtype, leaf.is_param))
    return tuple(found)


def with_rows(state: Any, leaves: Sequence[RowLeaf | ParamLeaf], rows: Sequence[Any]) -> Any:
    """A state some of whose leaves are replaced, in their order."""
    flat, tree = jax.tree.flatten(state)
    for leaf, own in zip(leaves, rows, strict=True):
        flat[leaf.index] = own
    return jax.tree.unflatten(tree, flat)


def rows_of(state: Any, leaves: Sequence[RowLeaf | ParamLeaf]) -> list[Any]:
    """Some leaves of a state, in their order."""
    flat = jax.tree.leaves(state)
    return [flat[leaf.index] for leaf in leaves]


def _keys(path: Sequence[Any]) -> list[str]:
    return [path_name((key,)) for key in path]
