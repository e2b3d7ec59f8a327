"""Where the arrays of a hand-written strategy lie: one rule a strategy, applied to every leaf of the training state."""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DATA, TENSOR = "data", "tensor"
"""Names of the mesh axes."""
LEAST_ELEMENTS = 2**16
"""Smaller leaves stay whole: their gathers would cost latency and save nothing, so that FSDP's users leave them."""

_SPLIT_DIMENSIONS = (
    (r"\b(key|query|value)'\]\['kernel", 1),
    (r"\b(key|query|value)'\]\['bias", 0),
    (r"\boutput'\]\['kernel", 0),
    (r"\b(up|gate)'\]\['kernel", 1),
    (r"\b(up|gate)'\]\['bias", 0),
    (r"\bdown'\]\['kernel", 0),
    (r"\bexperts'\]\['(up|down)", 0),
    (r"\bembedding\b", 0),
    (r"\bhead'\]\['kernel", 1),
    (r"'qkv'", 2),
    (r"'o'", 0),
    (r"'up'\]$", 1),
    (r"'down'\]$", 0),
    (r"'embed'", 0),
)
"""Which dimension Megatron splits, by the name of the parameter (Shoeybi et al. 2019, arXiv:1909.08053): heads, the
inner width, the vocabulary; of experts the experts. The last five are `gpt.py`'s, all others the zoo's."""


def split_dimension(path: str, shape: tuple[int, ...], size: int) -> int | None:
    """The dimension of a leaf that `size` tensor-parallel devices share; None where it stays whole.

    Args:
      path: Where the leaf is in the state, as `jax.tree_util.keystr` writes it. shape: Of the leaf.
    """
    if size == 1:
        return None
    for pattern, dimension in _SPLIT_DIMENSIONS:
        if re.search(pattern, path):
            return dimension if dimension < len(shape) and shape[dimension] % size == 0 else None
    return None


def largest_dimension(shape: tuple[int, ...], size: int, taken: int | None = None) -> int | None:
    """The largest dimension that `size` devices can share, as FSDP splits weights; None for small leaves.

    Args:
      taken: A dimension that is split otherwise already.
    """
    if math.prod(shape) < LEAST_ELEMENTS:
        return None
    fitting = [d for d, n in enumerate(shape) if d != taken and n % size == 0]
    return max(fitting, key=lambda d: shape[d], default=None)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Rules for the leaves of a training state.

    Attributes:
      mesh: Has the axis `data`, and `tensor` where something is split over it.
      is_sharded: Whether the state is split over `data` too (FSDP), and gathered where it is used.
      kept_split: Names of leaves that are used as they are stored, such as experts and look-up tables; None for none.
    """

    mesh: Mesh
    is_sharded: bool
    kept_split: str | None = None

    def sharding(self, *entries: str | None) -> NamedSharding:
        """On this mesh."""
        return NamedSharding(self.mesh, PartitionSpec(*entries))

    def stored(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        """Where a leaf lies between steps."""
        if self._is_kept(path):
            return self._kept(path, shape)
        tensor = split_dimension(path, shape, self.mesh.shape.get(TENSOR, 1))
        data = largest_dimension(shape, self.mesh.shape[DATA], tensor) if self.is_sharded else None
        return self._split(shape, tensor, data)

    def used(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        """Where a parameter lies when the model reads it."""
        if self._is_kept(path):
            return self._kept(path, shape)
        return self._split(shape, split_dimension(path, shape, self.mesh.shape.get(TENSOR, 1)), None)

    def of(self, tree: Any) -> Any:
        """`stored` of every leaf of a pytree of shapes."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self.stored(jax.tree_util.keystr(path), leaf.shape), tree
        )

    def batch(self, tree: Any) -> Any:
        """The batch split over `data`."""
        return jax.tree.map(lambda leaf: self.sharding(DATA), tree)

    def weights(self, path: str, leaf: jax.Array, dtype: Any, reads: int = 1) -> tuple[jax.Array, ...]:
        """A parameter as the model reads it, cast where it is stored and then gathered; once for each of its `reads`.

        A barrier holds the cast before the gather, and gradients are reduced to where the parameter is stored, in the
        type in which they were computed: both halve what is sent. The gradients of several reads are reduced apart,
        since XLA adds them otherwise where they are whole, and gathers one for it; if they stay whole, together.
        """
        stored, used = self.stored(path, leaf.shape), self.used(path, leaf.shape)
        read_dtype = jnp.dtype(dtype) if leaf.ndim > 1 and leaf.dtype == jnp.float32 else leaf.dtype
        if stored == used and read_dtype == leaf.dtype:
            return (leaf,) * reads
        return _reading(stored, used, leaf.dtype, read_dtype, reads)(leaf)

    def _is_kept(self, path: str) -> bool:
        return self.kept_split is not None and re.search(rf"'{self.kept_split}'", path) is not None

    def _kept(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        """Experts by the first dimension; a look-up table by its columns, so that every device has every row."""
        dimension = len(shape) - 1 if self.kept_split == "tables" else 0
        fits = math.prod(shape) >= LEAST_ELEMENTS and shape[dimension] % self.mesh.shape[DATA] == 0
        return self._split(shape, None, dimension if fits else None)

    def _split(self, shape: tuple[int, ...], tensor: int | None, data: int | None) -> NamedSharding:
        names = {tensor: TENSOR, data: DATA}
        return self.sharding(*[names.get(d) for d in range(len(shape))])


def _reading(
    stored: NamedSharding, used: NamedSharding, stored_dtype: Any, read_dtype: Any, reads: int
) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    constrained = jax.lax.with_sharding_constraint

    def gathered(weight: jax.Array) -> tuple[jax.Array, ...]:
        cast = constrained(weight.astype(read_dtype), stored)
        return (constrained(jax.lax.optimization_barrier(cast), used),) * reads

    def reduced(_: None, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array]:
        if stored == used:
            return (constrained(functools.reduce(operator.add, gradients), stored).astype(stored_dtype),)
        parts = [constrained(gradient, stored).astype(stored_dtype) for gradient in gradients]
        return (functools.reduce(operator.add, parts),)

    reading = jax.custom_vjp(gathered)
    reading.defvjp(lambda weight: (gathered(weight), None), reduced)
    return reading
