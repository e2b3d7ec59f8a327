"""Layers that several families share: attention with its rotations and cache, feed-forward layers, repeated blocks.

Letters in einsums: b batch, q query position, k key position, h head (of keys and values), g query head that shares
them, d feature within a head. Heads keep axes of their own from the projections to the output, so that a split over
heads needs no reshape.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

INIT_STDDEV = 0.02
"""Standard deviation of the initial weights (Radford et al. 2019, GPT-2, section 2.3 and its released code)."""


def residual_stddev(num_layers: int) -> float:
    """Initial scale of layers that write to the residual stream, so that its variance is free of depth (GPT-2)."""
    return INIT_STDDEV / (2 * num_layers) ** 0.5


def types_of(config: Any) -> dict[str, Any]:
    """The types of `config` as the keyword arguments that Flax layers take."""
    return {"dtype": config.dtype, "param_dtype": config.param_dtype}


def made(make: Callable[[nnx.Rngs], Any], rngs: nnx.Rngs) -> Any:
    """A module made from random numbers of its own, in a trace of its own: NNX's key counter makes a trace quadratic
    in its length.
    """
    return nnx.jit(lambda key: make(nnx.Rngs(params=key)))(rngs.params())


def repeated(make: Callable[[nnx.Rngs], Any], count: int, rngs: nnx.Rngs) -> nnx.List:
    """`count` modules made alike, each from random numbers of its own, in one trace that serves all."""
    make_one = nnx.jit(lambda key: make(nnx.Rngs(params=key)))
    return nnx.List([make_one(rngs.params()) for _ in range(count)])


# ---- attention


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: jax.Array | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Scaled dot-product attention. The softmax is taken in float32.

    Args:
        query: (batch, queries, heads, head_dim), or (batch, queries, heads, group, head_dim) where each head of keys
            and values serves a group of query heads.
        key, value: (batch, keys, heads, head_dim).
        visible: bool, broadcast to the scores (batch, heads[, group], queries, keys): what a query may see; None: all.
        bias: added to the scores, which it is broadcast to.
        scale: factor of the scores; by default 1 / sqrt(head_dim).

    Returns:
        The shape of `query` in the type of `value`.
    """
    g = "g" if query.ndim > key.ndim else ""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = jnp.einsum(f"bqh{g}d,bkhd->bh{g}qk", query, key).astype(jnp.float32) * scale
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum(f"bh{g}qk,bkhd->bqh{g}d", weights.astype(value.dtype), value)


def causal_mask(num_queries: int, num_keys: int, first: jax.Array | int = 0) -> jax.Array:
    """bool (num_queries, num_keys): a query sees its own position, counted from `first`, and what precedes it."""
    return first + jnp.arange(num_queries)[:, None] >= jnp.arange(num_keys)[None, :]


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array, num_chunks: int = 1) -> jax.Array:
    """`attention` in which a position sees itself and what precedes it.

    Args:
        query, key, value: those of `attention`, of one length.
        num_chunks: parts that the queries are taken in, one after another and computed again in the backward pass, so
            that the scores of one part alone are in memory (Rabe and Staats 2021, arXiv:2112.05682). Part n has
            queries n, n + num_chunks and so on, so that each part is spread over devices that split the sequence.
            Must divide the length.
    """
    batch, length, *heads = query.shape
    if num_chunks == 1:
        return attention(query, key, value, causal_mask(length, length))
    if length % num_chunks:
        raise ValueError(f"`num_chunks` must divide the sequence; received num_chunks={num_chunks}, length={length}.")

    @jax.checkpoint
    def run(_: None, part: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        chunk, number = part
        positions = jnp.arange(length // num_chunks) * num_chunks + number
        return None, attention(chunk, key, value, positions[:, None] >= jnp.arange(length)[None, :])

    chunks = jnp.moveaxis(query.reshape(batch, length // num_chunks, num_chunks, *heads), 2, 0)
    _, attended = jax.lax.scan(run, None, (chunks, jnp.arange(num_chunks)))
    return jnp.moveaxis(attended, 0, 2).reshape(query.shape)


def fused_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, is_causal: bool, scale: float | None = None
) -> jax.Array:
    """`attention` or `causal_attention` by cuDNN's kernels, which never store the scores: on GPUs, in 16-bit floats.

    Args:
        query, key, value, scale: those of `attention`.
        is_causal: whether a position sees itself and what precedes it alone.
    """
    by_head = query.reshape(*query.shape[:2], -1, query.shape[-1])
    attended = jax.nn.dot_product_attention(
        by_head, key, value, scale=scale, is_causal=is_causal, implementation="cudnn"
    )
    return attended.reshape(query.shape)


class Rotation(NamedTuple):
    """Cosines and sines of the rotary embedding of some positions, each float32 (positions, head_dim / 2)."""

    cos: jax.Array
    sin: jax.Array


def rotation(positions: jax.Array, head_dim: int, theta: float) -> Rotation:
    """Angles of the rotary position embedding (Su et al. 2021, arXiv:2104.09864, section 3.4.2).

    Args:
        positions: int32 (positions,).
        head_dim: features of a head, an even number.
        theta: base of the wavelengths; 10,000 in the paper.
    """
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[:, None].astype(jnp.float32) * frequencies
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: jax.Array, by: Rotation) -> jax.Array:
    """Turns each pair of features (i, i + head_dim / 2) of `x` (batch, positions, heads.., head_dim) by its angle."""
    shape = (x.shape[1], *(1,) * (x.ndim - 3), x.shape[-1] // 2)
    cos, sin = by.cos.reshape(shape), by.sin.reshape(shape)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class LayerCache(NamedTuple):
    """Keys and values of past positions in one layer, each (batch, context, heads, head_dim)."""

    key: jax.Array
    value: jax.Array


class Cache(NamedTuple):
    """What a decoder keeps of the positions that it has seen: one cache a layer, and how many they are (int32)."""

    layers: tuple[LayerCache, ...]
    length: jax.Array


class Attention(nnx.Module):
    """Attention with separate query, key and value projections, over the sequence itself or over another one."""

    def __init__(
        self,
        dim: int,
        heads: tuple[int, ...],
        head_dim: int,
        *,
        use_bias: bool = True,
        output_stddev: float = INIT_STDDEV,
        scale: float | None = None,
        fused: bool = False,
        rngs: nnx.Rngs,
        **types: Any,
    ):
        """Makes the projections.

        Args:
            dim: width of the residual stream.
            heads: (heads,), or (heads of keys and values, query heads for each of them).
            head_dim: features of a head.
            use_bias: whether the projections have biases.
            output_stddev: initial scale of the output projection.
            scale: factor of the scores; by default 1 / sqrt(head_dim).
            fused: whether `fused_attention` computes what has no mask but a causal one, and no bias.
            rngs: random numbers of the parameters.
            types: `dtype` and `param_dtype`.
        """
        init, types = nnx.initializers.normal(INIT_STDDEV), types | {"use_bias": use_bias}
        self.scale, self.fused = scale, fused
        self.query = nnx.LinearGeneral(dim, (*heads, head_dim), kernel_init=init, rngs=rngs, **types)
        self.key = nnx.LinearGeneral(dim, (heads[0], head_dim), kernel_init=init, rngs=rngs, **types)
        self.value = nnx.LinearGeneral(dim, (heads[0], head_dim), kernel_init=init, rngs=rngs, **types)
        self.output = nnx.LinearGeneral(
            (*heads, head_dim),
            dim,
            axis=tuple(range(-len(heads) - 1, 0)),
            kernel_init=nnx.initializers.normal(output_stddev),
            rngs=rngs,
            **types,
        )

    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array | None = None,
        *,
        visible: jax.Array | None = None,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        """Attends from `x` (batch, queries, dim) to `memory` (batch, keys, dim), or to `x` itself.

        `visible` and `bias` are those of `attention`.
        """
        memory = x if memory is None else memory
        query, key, value = self.query(x), self.key(memory), self.value(memory)
        if self.fused and visible is None and bias is None:
            return self.output(fused_attention(query, key, value, is_causal=False, scale=self.scale))
        return self.output(attention(query, key, value, visible, bias, self.scale))

    def causal(self, x: jax.Array, by: Rotation | None = None, num_chunks: int = 1) -> jax.Array:
        """Attends from each position of `x` (batch, sequence, dim) to itself and to what precedes it.

        Queries and keys are turned `by` a rotation if one is given; `num_chunks` is that of `causal_attention`, where
        attention is not fused.
        """
        query, key, value = self.query(x), self.key(x), self.value(x)
        if by is not None:
            query, key = rotate(query, by), rotate(key, by)
        if self.fused:
            return self.output(fused_attention(query, key, value, is_causal=True))
        return self.output(causal_attention(query, key, value, num_chunks))

    def extend(
        self, x: jax.Array, cache: LayerCache, start: jax.Array, by: Rotation | None = None
    ) -> tuple[jax.Array, LayerCache]:
        """Attends causally from new positions to themselves and to those in the cache, which they are added to.

        Args:
            x: (batch, new positions, dim).
            cache: keys and values of the `start` positions before them; the rest of it is not read.
            start: int32 scalar.
            by: rotation of the new positions.
        """
        query, key, value = self.query(x), self.key(x), self.value(x)
        if by is not None:
            query, key = rotate(query, by), rotate(key, by)
        cache = LayerCache(
            jax.lax.dynamic_update_slice_in_dim(cache.key, key.astype(cache.key.dtype), start, axis=1),
            jax.lax.dynamic_update_slice_in_dim(cache.value, value.astype(cache.value.dtype), start, axis=1),
        )
        visible = causal_mask(x.shape[1], cache.key.shape[1], start)
        return self.output(attention(query, cache.key, cache.value, visible)), cache


# ---- feed-forward layers


class MLP(nnx.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, dim: int, hidden_dim: int, *, down_stddev: float = INIT_STDDEV, rngs: nnx.Rngs, **types: Any):
        up_init, down_init = nnx.initializers.normal(INIT_STDDEV), nnx.initializers.normal(down_stddev)
        self.up = nnx.Linear(dim, hidden_dim, kernel_init=up_init, rngs=rngs, **types)
        self.down = nnx.Linear(hidden_dim, dim, kernel_init=down_init, rngs=rngs, **types)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)), without biases (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
        down_stddev: float = INIT_STDDEV,
        rngs: nnx.Rngs,
        **types: Any,
    ):
        init, types = nnx.initializers.normal(INIT_STDDEV), types | {"use_bias": False}
        self.activation = activation
        self.gate = nnx.Linear(dim, hidden_dim, kernel_init=init, rngs=rngs, **types)
        self.up = nnx.Linear(dim, hidden_dim, kernel_init=init, rngs=rngs, **types)
        down_init = nnx.initializers.normal(down_stddev)
        self.down = nnx.Linear(hidden_dim, dim, kernel_init=down_init, rngs=rngs, **types)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.activation(self.gate(x)) * self.up(x))
