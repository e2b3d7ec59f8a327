"""A GPT-style decoder in Flax NNX: pre-layer-norm blocks, learned positions, multi-head causal attention, GELU MLP.

The model carries no sharding annotation, no device and no mesh. Heads keep an axis of their own from the projections
to the output, (batch, sequence, heads, head_dim), so that a split over heads needs no reshape.
Letters in einsums: b batch, q query position, k key position, h head, d feature within a head.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

INIT_STDDEV = 0.02
"""Standard deviation of the initial weights (Radford et al. 2019, GPT-2, section 2.3 and its released code)."""


@dataclasses.dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes and options of a GPT.

    Attributes:
        vocab_size: number of token ids, and of rows in the token embedding.
        context_length: longest sequence, in tokens.
        num_layers: number of decoder blocks.
        num_heads: attention heads per block; must divide `embed_dim`.
        embed_dim: width of the residual stream.
        mlp_ratio: width of the MLP's hidden layer divided by `embed_dim`.
        dropout_rate: share of activations dropped in training; 0 leaves all random operations out of the trace.
        tie_embeddings: use the token embedding as the output projection.
        dtype: type of activations and of matrix products.
        param_dtype: type in which parameters are stored.
        remat: keep only each block's input for the backward pass and compute the rest of the block again.
    """

    vocab_size: int
    context_length: int
    num_layers: int
    num_heads: int
    embed_dim: int
    mlp_ratio: int = 4
    dropout_rate: float = 0.0
    tie_embeddings: bool = True
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    remat: bool = False

    def __post_init__(self) -> None:
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"`num_heads` must divide `embed_dim`; received num_heads={self.num_heads}, embed_dim={self.embed_dim}."
            )

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        return self.embed_dim // self.num_heads

    @property
    def residual_stddev(self) -> float:
        """Initial scale of the layers that write to the residual stream, so that its variance is free of depth."""
        return INIT_STDDEV / (2 * self.num_layers) ** 0.5


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Scaled dot-product attention in which a position sees itself and what precedes it.

    Args:
        query, key, value: (batch, sequence, heads, head_dim).

    Returns:
        (batch, sequence, heads, head_dim) in the type of `value`. The softmax is taken in float32.
    """
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) * query.shape[-1] ** -0.5
    positions = jnp.arange(query.shape[1])
    visible = positions[:, None] >= positions[None, :]
    weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(jnp.float32).min), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value)


class Attention(nnx.Module):
    """Causal self-attention with separate query, key and value projections."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        heads = (config.num_heads, config.head_dim)
        types = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        init = nnx.initializers.normal(INIT_STDDEV)
        self.query = nnx.LinearGeneral(config.embed_dim, heads, kernel_init=init, rngs=rngs, **types)
        self.key = nnx.LinearGeneral(config.embed_dim, heads, kernel_init=init, rngs=rngs, **types)
        self.value = nnx.LinearGeneral(config.embed_dim, heads, kernel_init=init, rngs=rngs, **types)
        self.output = nnx.LinearGeneral(
            heads,
            config.embed_dim,
            axis=(-2, -1),
            kernel_init=nnx.initializers.normal(config.residual_stddev),
            rngs=rngs,
            **types,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.output(causal_attention(self.query(x), self.key(x), self.value(x)))


class MLP(nnx.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        hidden_dim = config.mlp_ratio * config.embed_dim
        types = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        self.up = nnx.Linear(
            config.embed_dim, hidden_dim, kernel_init=nnx.initializers.normal(INIT_STDDEV), rngs=rngs, **types
        )
        self.down = nnx.Linear(
            hidden_dim,
            config.embed_dim,
            kernel_init=nnx.initializers.normal(config.residual_stddev),
            rngs=rngs,
            **types,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


class Block(nnx.Module):
    """One decoder block: attention and MLP, each behind a layer norm and added to the residual stream."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        types = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        self.attention_norm = nnx.LayerNorm(config.embed_dim, rngs=rngs, **types)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(config.embed_dim, rngs=rngs, **types)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout_rate)

    def __call__(self, x: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        attention_key, mlp_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        x = x + self._drop(self.attention(self.attention_norm(x)), attention_key)
        return x + self._drop(self.mlp(self.mlp_norm(x)), mlp_key)

    def _drop(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        return x if key is None else self.dropout(x, rngs=key)


class GPT(nnx.Module):
    """The decoder: token and position embeddings, blocks, final norm, logits."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        types = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        init = nnx.initializers.normal(INIT_STDDEV)
        self.config = config
        self.token_embed = nnx.Embed(config.vocab_size, config.embed_dim, embedding_init=init, rngs=rngs, **types)
        self.position_embed = nnx.Param(
            init(rngs.params(), (config.context_length, config.embed_dim), config.param_dtype)
        )
        # Jitted, so that one trace serves all layers: NNX's key counter makes a trace quadratic in its length.
        make_block = nnx.jit(lambda key: Block(config, rngs=nnx.Rngs(params=key)))
        self.blocks = nnx.List([make_block(rngs.params()) for _ in range(config.num_layers)])
        self.final_norm = nnx.LayerNorm(config.embed_dim, rngs=rngs, **types)
        if not config.tie_embeddings:
            self.head = nnx.Linear(
                config.embed_dim, config.vocab_size, use_bias=False, kernel_init=init, rngs=rngs, **types
            )

    def __call__(self, tokens: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        """Logits of the token that follows each position.

        Args:
            tokens: int32 (batch, sequence), with sequence <= `context_length`.
            dropout_key: key of the dropout masks, or None for no dropout.

        Returns:
            (batch, sequence, vocab_size) in `config.dtype`.
        """
        x = self.token_embed(tokens) + self.position_embed[: tokens.shape[1]].astype(self.config.dtype)
        run_block = nnx.remat(Block.__call__) if self.config.remat else Block.__call__
        for layer, block in enumerate(self.blocks):
            x = run_block(block, x, None if dropout_key is None else jax.random.fold_in(dropout_key, layer))
        x = self.final_norm(x)
        return self.token_embed.attend(x) if self.config.tie_embeddings else self.head(x)
