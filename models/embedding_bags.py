"""Several embedding tables read at once: of each, one bag of rows for every example, pooled to one vector."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

NO_ID = -1
"""Fills the places of a bag that holds fewer ids than it may."""


def even_within(rows: int) -> nnx.Initializer:
    """Numbers evenly spread within +-sqrt(1 / rows), as in the released code of DLRM."""
    return lambda key, shape, dtype=jnp.float32, *_, **__: jax.random.uniform(key, shape, dtype, -1, 1) * rows**-0.5


class EmbeddingBags(nnx.Module):
    """Tables of one width, each with bags of its own size.

    Each table is an array of its own, so that each may lie where it is best. A bag holds from none to `bag_sizes[t]`
    ids; what is missing is `NO_ID`, at any place of the bag, and an empty bag gives zeros. An id that stands twice
    counts twice.
    """

    def __init__(
        self,
        table_rows: Sequence[int],
        embed_dim: int,
        bag_sizes: Sequence[int],
        *,
        is_mean: bool = False,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the tables.

        Args:
            table_rows: rows of each table.
            embed_dim: width of all tables.
            bag_sizes: for each table, the most ids of a bag.
            is_mean: vectors of a bag are averaged, not summed.
            dtype: type of the vectors that are returned.
            param_dtype: type of the tables.
            rngs: random numbers of the parameters.

        Raises:
            ValueError: not as many bag sizes as tables.
        """
        if len(bag_sizes) != len(table_rows):
            raise ValueError(
                f"bag_sizes must have one size for each table; received {len(bag_sizes)} for {len(table_rows)} tables."
            )
        types = {"dtype": dtype, "param_dtype": param_dtype}
        self.tables = nnx.List(
            [nnx.Embed(rows, embed_dim, embedding_init=even_within(rows), rngs=rngs, **types) for rows in table_rows]
        )
        self.bag_sizes, self.is_mean = tuple(bag_sizes), is_mean

    def __call__(self, ids: jax.Array) -> jax.Array:
        """One vector of each table for each example.

        Args:
            ids: int32 (batch, sum of bag_sizes), the bags side by side; `NO_ID` where there is none.

        Returns:
            (batch, tables, embed_dim).
        """
        ends = [sum(self.bag_sizes[: n + 1]) for n in range(len(self.bag_sizes))]
        bags = [ids[:, end - size : end] for end, size in zip(ends, self.bag_sizes, strict=True)]
        return jnp.stack([self._pooled(table, bag) for table, bag in zip(self.tables, bags, strict=True)], axis=1)

    def _pooled(self, table: nnx.Embed, ids: jax.Array) -> jax.Array:
        """The vectors of the bags of one table: ids (batch, size) to (batch, embed_dim)."""
        is_id = (ids != NO_ID)[..., None]
        total = jnp.sum(jnp.where(is_id, table(jnp.maximum(ids, 0)), 0), axis=1)
        return total / jnp.maximum(jnp.sum(is_id, axis=1), 1).astype(total.dtype) if self.is_mean else total
