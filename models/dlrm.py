"""A recommender after DLRM in Flax NNX: embedding tables for categories, an MLP for numbers, products of all pairs.

Naumov et al. 2019, arXiv:1906.00091. Nearly all parameters are in the tables, of which an example reads one row each.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from .embedding_bags import EmbeddingBags, even_within
from .layers import types_of
from .losses import binary_cross_entropy
from .objective import Batch, Metrics, Objective, nnx_objective


@dataclasses.dataclass(frozen=True, slots=True)
class DLRMConfig:
    """Sizes and options of a recommender.

    Attributes:
        table_rows: rows of each embedding table, one table for each category.
        num_numbers: numeric features of an example.
        embed_dim: width of the tables and of the last layer of the bottom MLP.
        bottom_dims: widths of the hidden layers of the MLP that reads the numbers.
        top_dims: widths of the hidden layers of the MLP that reads the products.
        bag_sizes: for each table, the most ids that an example has of it; empty for exactly one of each.
        averages_bags: the rows of a bag are averaged, not summed.
        dtype: type of activations and of matrix products.
        param_dtype: type in which parameters are stored.
    """

    table_rows: tuple[int, ...]
    num_numbers: int
    embed_dim: int
    bottom_dims: tuple[int, ...]
    top_dims: tuple[int, ...]
    bag_sizes: tuple[int, ...] = ()
    averages_bags: bool = False
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        if self.bag_sizes and len(self.bag_sizes) != len(self.table_rows):
            raise ValueError(
                f"bag_sizes must have one size for each of the {len(self.table_rows)} tables; received "
                f"{len(self.bag_sizes)}."
            )
        if self.averages_bags and not self.bag_sizes:
            raise ValueError("averages_bags is for bags of several ids, and bag_sizes is empty.")


class ReluMLP(nnx.Module):
    """Linear layers with a ReLU behind each, but the last if `is_open`."""

    def __init__(self, dims: Sequence[int], config: DLRMConfig, *, is_open: bool = False, rngs: nnx.Rngs):
        pairs = zip(dims[:-1], dims[1:], strict=True)
        self.layers = nnx.List([nnx.Linear(m, n, rngs=rngs, **types_of(config)) for m, n in pairs])
        self.is_open = is_open

    def __call__(self, x: jax.Array) -> jax.Array:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if not self.is_open or number < len(self.layers) - 1:
                x = jax.nn.relu(x)
        return x


class DLRM(nnx.Module):
    """Tables and bottom MLP, the products of all pairs of their vectors, top MLP."""

    def __init__(self, config: DLRMConfig, *, rngs: nnx.Rngs):
        rows, dim, types = config.table_rows, config.embed_dim, types_of(config)
        if config.bag_sizes:
            self.bags = EmbeddingBags(rows, dim, config.bag_sizes, is_mean=config.averages_bags, rngs=rngs, **types)
        else:
            tables = [nnx.Embed(n, dim, embedding_init=even_within(n), rngs=rngs, **types) for n in rows]
            self.tables = nnx.List(tables)
        num_vectors = len(config.table_rows) + 1
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.bottom = ReluMLP((config.num_numbers, *config.bottom_dims, config.embed_dim), config, rngs=rngs)
        self.top = ReluMLP((config.embed_dim + num_pairs, *config.top_dims, 1), config, is_open=True, rngs=rngs)

    def __call__(self, numbers: jax.Array, categories: jax.Array) -> jax.Array:
        """Logits of a click.

        Args:
            numbers: float (batch, num_numbers).
            categories: int32 (batch, tables), the row of each table; with bags (batch, sum of bag_sizes), as
                `EmbeddingBags` takes them.

        Returns:
            (batch,) in `config.dtype`.
        """
        dense = self.bottom(numbers)
        if hasattr(self, "bags"):
            vectors = jnp.concatenate([dense[:, None], self.bags(categories)], axis=1)
        else:
            rows = [table(categories[:, number]) for number, table in enumerate(self.tables)]
            vectors = jnp.stack([dense, *rows], axis=1)
        products = jnp.einsum("bid,bjd->bij", vectors, vectors)
        first, second = np.tril_indices(vectors.shape[1], -1)
        return self.top(jnp.concatenate([dense, products[:, first, second]], axis=1))[:, 0]


def objective(config: DLRMConfig) -> Objective:
    """Prediction of clicks; see `batch_shapes`."""

    def loss(model: DLRM, batch: Batch, _: jax.Array | None) -> tuple[jax.Array, Metrics]:
        return binary_cross_entropy(model(batch["numbers"], batch["categories"]), batch["clicks"]), {}

    def evaluate(model: DLRM, batch: Batch, _: jax.Array) -> tuple[jax.Array, Metrics]:
        logits, clicks = model(batch["numbers"], batch["categories"]).astype(jnp.float32), batch["clicks"]
        return binary_cross_entropy(logits, clicks), {"logits": logits, "clicks": clicks}

    return nnx_objective(lambda rngs: DLRM(config, rngs=rngs), loss, evaluate=evaluate)


def batch_shapes(config: DLRMConfig, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of `batch_size` examples; a click is 0 or 1."""
    num_ids = sum(config.bag_sizes) or len(config.table_rows)
    return {
        "numbers": jax.ShapeDtypeStruct((batch_size, config.num_numbers), jnp.float32),
        "categories": jax.ShapeDtypeStruct((batch_size, num_ids), jnp.int32),
        "clicks": jax.ShapeDtypeStruct((batch_size,), jnp.float32),
    }


def padded(rows: int) -> int:
    """A number of rows that meshes can split: large ones are rounded up to a multiple of 1,024."""
    return -(-rows // 1024) * 1024 if rows > 1024 else rows


_CRITEO_ROWS = (40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10)
_CRITEO_ROWS += (2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36)
_CRITEO_TINY_ROWS = tuple(min(rows, 1024) for rows in _CRITEO_ROWS)

PRESETS: Mapping[str, DLRMConfig] = MappingProxyType(
    {
        "tiny": DLRMConfig(
            table_rows=(1024, 64, 16, 3), num_numbers=4, embed_dim=16, bottom_dims=(32,), top_dims=(32, 16)
        ),
        "criteo_tiny": DLRMConfig(
            table_rows=_CRITEO_TINY_ROWS, num_numbers=13, embed_dim=16, bottom_dims=(64,), top_dims=(64, 32)
        ),
        "criteo": DLRMConfig(
            table_rows=tuple(padded(rows) for rows in _CRITEO_ROWS),
            num_numbers=13,
            embed_dim=128,
            bottom_dims=(512, 256),
            top_dims=(1024, 1024, 512, 256),
        ),
        "criteo_1tb": DLRMConfig(
            table_rows=tuple(padded(190_000_000 if rows == 40_000_000 else rows) for rows in _CRITEO_ROWS),
            num_numbers=13,
            embed_dim=128,
            bottom_dims=(512, 256),
            top_dims=(1024, 1024, 512, 256),
        ),
    }
)
"""Sizes by name. `criteo` is MLPerf's benchmark on the Criteo 1 TB click logs (training rules 0.7 to 2.1), whose
categories are cut to 40 million rows; rows are padded by at most 1,023. `criteo_tiny` reads the same logs into tables
of at most 1,024 rows; `criteo_1tb` has five tables of 190 million rows, so that tables and the momentum of their rows
take 1 TB."""
