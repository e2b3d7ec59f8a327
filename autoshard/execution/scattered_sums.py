"""Sums over devices of which each keeps a piece.

Instead of a reduce-scatter devices may exchange the pieces, and each adds its own up: as many bytes. A plan says so for
XLA:TPU, which hides exchanges (`compiler/exchanged_sums.py`). And where JAX's processes are joined
(`jax.distributed`), XLA:CPU sends through Gloo, also between devices of one process, and Gloo's reduce-scatter now and
then returns wrong numbers, without an error, where pieces are large: it sends from the buffer that it receives into
(https://github.com/jax-ml/jax/issues/40830; jax 0.10 and 0.11 have it).
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh


def sum_over(
    x: jax.Array, axes: Sequence[str], scatters: Sequence[tuple[str, int]], mesh: Mesh, exchanges: bool = False
) -> jax.Array:
    """The sum of `x` over the mesh `axes`. Of `scatters` (axis, dimension) each device keeps its piece, by an exchange
    if it `exchanges`. Within `jax.shard_map`."""
    for dim in dict.fromkeys(dim for _, dim in scatters):
        over = tuple(axis for axis, d in scatters if d == dim)
        x = sum_of_pieces(x, over, dim) if exchanges else scattered_sum(x, over, dim, mesh)
    left = tuple(axis for axis in axes if axis not in dict(scatters))
    return jax.lax.psum(x, left) if left else x


def scattered_sum(x: jax.Array, axes: Sequence[str], dim: int, mesh: Mesh) -> jax.Array:
    """The sum of `x` over the mesh `axes`, of which each device keeps its piece along `dim`. Within `jax.shard_map`."""
    axes = tuple(axes)
    if not _is_sent_by_gloo(mesh):
        return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    return sum_of_pieces(x, axes, dim)


def sum_of_pieces(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """The same by an exchange of pieces.

    The dimension `dim` is put in front: pieces are blocks of memory then, and XLA makes a product that way round. They
    are added one by one, since XLA:TPU expects a `reduce_sum` over them to take five times as long.
    """
    count = jax.lax.axis_size(axes)
    in_front = jnp.moveaxis(x, dim, 0)
    pieces = jax.lax.all_to_all(in_front, axes, split_axis=0, concat_axis=0, tiled=True)
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    parts = [part.astype(jnp.float32) if is_narrow else part for part in jnp.split(pieces, count)]
    return jnp.moveaxis(functools.reduce(jnp.add, parts).astype(x.dtype), 0, dim)


def _is_sent_by_gloo(mesh: Mesh) -> bool:
    return jax.distributed.is_initialized() and mesh.devices.flat[0].platform == "cpu"
