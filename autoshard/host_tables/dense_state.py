"""What of a state is no rows of tables, with keys of random numbers as plain data, for what cannot hold keys."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.tables.sparse_step import SparseStep


def dense_leaves(state: Any, sparse: SparseStep) -> dict[str, Any]:
    """The leaves of a state that are no rows, by number; keys of random numbers as their data."""
    skipped = {leaf.index for leaf in sparse.update.leaves}
    return {str(i): x for i, x in enumerate(jax.tree.leaves(without_keys(state))) if i not in skipped}


def with_dense_leaves(state: Any, sparse: SparseStep, dense: Mapping[str, Any]) -> Any:
    """A state with the leaves that `dense_leaves` gave of another."""
    leaves, tree = jax.tree.flatten(state)
    for number, x in dense.items():
        leaves[int(number)] = as_key(x, leaves[int(number)])
    return jax.tree.unflatten(tree, leaves)


def without_keys(state: Any) -> Any:
    """A state with the data of keys in their place."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, state)


def as_key(data: Any, like: Any) -> Any:
    """An array as keys of random numbers, if another has such."""
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like)) if _is_key(like) else data


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
