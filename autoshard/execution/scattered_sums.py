"""Sums over devices of which each keeps a piece.

Where JAX's processes are joined (`jax.distributed`), XLA:CPU sends through Gloo, also between devices of one process,
and Gloo's reduce-scatter now and then returns wrong numbers, without an error, where pieces are large: it sends from
the buffer that it receives into (https://github.com/jax-ml/jax/issues/40830; jax 0.10 and 0.11 have it). There the
pieces are exchanged instead, and each device adds its own up: as many bytes.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh


def sum_over(x: jax.Array, axes: Sequence[str], scatters: Sequence[tuple[str, int]], mesh: Mesh) -> jax.Array:
    """The sum of `x` over the mesh `axes`. Of `scatters` (axis, dimension) each device keeps its piece. Within
    `jax.shard_map`."""
    for dim in dict.fromkeys(dim for _, dim in scatters):
        x = scattered_sum(x, [axis for axis, d in scatters if d == dim], dim, mesh)
    left = tuple(axis for axis in axes if axis not in dict(scatters))
    return jax.lax.psum(x, left) if left else x


def scattered_sum(x: jax.Array, axes: Sequence[str], dim: int, mesh: Mesh) -> jax.Array:
    """The sum of `x` over the mesh `axes`, of which each device keeps its piece along `dim`. Within `jax.shard_map`."""
    axes = tuple(axes)
    if not _is_sent_by_gloo(mesh):
        return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    return sum_of_pieces(x, axes, dim)


def sum_of_pieces(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """The same by an exchange of pieces."""
    count = jax.lax.axis_size(axes)
    pieces = jax.lax.all_to_all(x, axes, split_axis=dim, concat_axis=dim, tiled=True)
    apart = pieces.reshape(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
    return jnp.sum(apart, axis=dim, dtype=x.dtype)


def _is_sent_by_gloo(mesh: Mesh) -> bool:
    return jax.distributed.is_initialized() and mesh.devices.flat[0].platform == "cpu"
